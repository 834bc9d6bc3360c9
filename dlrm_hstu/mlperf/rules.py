"""The closed division's rules of MLPerf Training 6.1 for this benchmark, as plain numbers and integer functions.

Source: the rule set 6.1.0 of mlperf-logging 4.1.68 (closed_dlrmv4.yaml, common.yaml) and, for what its checker does not look at, the rules'
text: three layers, 4086 events of history, the model's shape.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

BENCHMARK = "dlrmv4"  # the log's value and the results folder's name; the rules' text says dlrm_v4_hstu
USAGE, RULESET = "training", "6.1.0"
TRAIN_SAMPLES = 2_290_835_423
EVAL_SAMPLES = 2_058_204
TARGET_AUC = 0.75
MAX_SEQUENCE_LENGTH = 4096
HISTORY_LENGTH = 4086
INIT_LIMIT_MINUTES = MappingProxyType({"closed": 30, "open": 240})
PRECISIONS = ("fp64", "fp32", "tf32", "fp16", "fp8", "mxfp6", "nvfp4", "mxfp4", "bfloat16", "int8", "uint8", "int4", "uint4")

PINNED: Mapping[str, Any] = MappingProxyType(
    {
        "train_samples": TRAIN_SAMPLES,
        "eval_samples": EVAL_SAMPLES,
        "max_sequence_length": MAX_SEQUENCE_LENGTH,
        "opt_name": "Adam",
        "opt_adam_beta_1": 0.95,
        "opt_adam_beta_2": 0.999,
        "opt_adam_epsilon": 1e-8,
        "opt_weight_decay": 0.0,
        "opt_gradient_clip_norm": 1.0,
        "opt_sparse_name": "RowWiseAdagrad",
        "opt_learning_rate_warmup_steps": 24_000,
        "opt_learning_rate_warmup_start_lr": 0.0,
        "eval_every_data_pct": 0.001,
        "auc_threshold": TARGET_AUC,
        # The official checker sees none of these: the history's length, then the fields of ModelConfig.
        "length": HISTORY_LENGTH,
        "num_layers": 3,
        "table_dim": 512,
        "embedding_dim": 512,
        "num_heads": 4,
        "attention_dim": 128,
        "hidden_dim": 128,
        "preprocessor_hidden_dim": 256,
        "action_dim": 8,
        "input_dropout": 0.2,
        "layer_dropout": 0.1,
        "item_hidden_dim": 512,
        "head_hidden_dim": 512,
        "position_buckets": 8192,
        "time_buckets": 2048,
        "attention_scale": "batch_max",
        "loss_weight": 0.2,
        # And of the data's settings.
        "strategy": "interleaved",
        "scan_window": 20_000,
        "min_history": 4086,
        "window_seconds": 86_400,
        "shuffle_fraction": 0.0,
        "train_split_percentage": 1.0,
        "start_window": 0,
        "num_windows": 299,
        "holdout_window": 299,
        "holdout_num_windows": 1,
    }
)


def reference_learning_rate(global_batch: int) -> float:
    """Base learning rate of the reference recipe, dense and sparse alike: 1e-6 for each 8192 samples of a step."""
    return 1e-6 * global_batch / 8192


def learning_rate_band(global_batch: int) -> tuple[float, float]:
    """Lowest and highest base learning rate that the rules allow: half to 1.5 times the reference."""
    return 0.5e-6 * global_batch / 8192, 1.5e-6 * global_batch / 8192


def first_eval_threshold(global_batch: int) -> int:
    """Samples before which no evaluation may run: the rules' fit through the reference's convergence points."""
    return (4480 * global_batch + 135_331_840) // 3


def eval_grid(global_batch: int) -> tuple[int, int]:
    """Samples between two evaluations, and at the first one, of a run on the benchmark's own data."""
    interval = -(-TRAIN_SAMPLES // (1000 * global_batch)) * global_batch
    return interval, -(-first_eval_threshold(global_batch) // interval) * interval


def closed_deviations(values: Mapping[str, Any]) -> list[str]:
    """What keeps a run out of the closed division, one readable line each; an empty list means nothing does.

    values: plain values by name: every name of `PINNED`; of the log's header global_batch_size, opt_base_learning_rate,
        opt_sparse_base_learning_rate, eval_interval_samples and first_eval_samples; and seed_was_drawn, whether the seed came from the
        system's entropy. Other names are ignored.
    Raises KeyError for a name that is missing.
    """
    lines = [
        f"{name} is {values[name]!r}: the closed division pins it to {pinned!r}"
        for name, pinned in PINNED.items()
        if values[name] != pinned
    ]
    if not values["seed_was_drawn"]:
        lines.append("the seed was given: the closed division wants it drawn from the clock or system entropy; unset SEED")
    global_batch, dense_lr = values["global_batch_size"], values["opt_base_learning_rate"]
    low, high = learning_rate_band(global_batch)
    if not low * (1 - 1e-9) <= dense_lr <= high * (1 + 1e-9):  # the official checker's tolerance
        lines.append(
            f"opt_base_learning_rate is {dense_lr:g}: at a global batch of {global_batch} the closed division allows {low:g} to {high:g} "
            f"(reference {reference_learning_rate(global_batch):g})"
        )
    if values["opt_sparse_base_learning_rate"] != dense_lr:
        lines.append(
            f"opt_sparse_base_learning_rate is {values['opt_sparse_base_learning_rate']:g}: "
            f"it must equal opt_base_learning_rate, {dense_lr:g}"
        )
    for name, samples in zip(("eval_interval_samples", "first_eval_samples"), eval_grid(global_batch), strict=True):
        if values[name] != samples:
            lines.append(f"{name} is {values[name]}: at a global batch of {global_batch} the closed division has {samples}")
    return lines
