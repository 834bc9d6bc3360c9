"""Knobs: settings with a name of their own, in capitals, for the environment and as gin macros.

A knob is another name of one field of one settings dataclass; default and type are the field's. The tables in docs/knobs.md and the README
are made here: `python -m dlrm_hstu.knobs` prints them, `python -m dlrm_hstu.knobs FILE ...` renews them between the markers in FILE.
"""

import difflib
import importlib
import re
import sys
import typing
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path

MODULES = {
    "ModelConfig": "dlrm_hstu.config",
    "OptimizerConfig": "dlrm_hstu.config",
    "EvalConfig": "dlrm_hstu.config",
    "TrainConfig": "dlrm_hstu.config",
    "MLPerfConfig": "dlrm_hstu.config",
    "HistoryConfig": "data.history",
    "IndexConfig": "data.index",
    "StreamConfig": "data.loader",
}

BOOLEANS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}


def settings_class(name: str) -> type:
    """The settings dataclass of that name, imported at first use: data.loader brings torch with it."""
    return getattr(importlib.import_module(MODULES[name]), name)


@dataclass(frozen=True)
class Knob:
    """One environment variable and gin macro. binding: "Class.field"; doc: effect and unit."""

    name: str
    binding: str
    doc: str

    @property
    def type(self) -> type:
        """The field's type."""
        owner, field_name = self.binding.split(".")
        return typing.get_type_hints(settings_class(owner))[field_name]

    @property
    def default(self):
        """The field's default."""
        owner, field_name = self.binding.split(".")
        field = next(f for f in fields(settings_class(owner)) if f.name == field_name)
        return field.default if field.default is not MISSING else field.default_factory()

    def parse(self, text: str):
        """The value an environment text stands for. Raises ValueError that names variable, text and type."""
        kind = self.type
        try:
            if kind is bool:
                return BOOLEANS[text.strip().lower()]
            return kind(text)
        except (KeyError, ValueError):
            rule = {int: "an integer", float: "a number", bool: "one of " + ", ".join(BOOLEANS)}[kind]
            raise ValueError(f"environment variable {self.name}={text!r}: must be {rule}") from None


@dataclass(frozen=True)
class ForeignKnob:
    """A knob of the public MLPerf reference trainer that this one lacks.

    refused: True where the user would not get what was asked for (an error), False where nothing is lost (a warning).
    off: values that ask for nothing and pass in silence.
    """

    name: str
    refused: bool
    reason: str
    off: tuple[str, ...] = ()


_KNOBS = (
    Knob("BATCH_SIZE", "TrainConfig.batch_size", "samples per rank and step"),
    Knob("SEED", "TrainConfig.seed", "seed of initial weights and dropout; negative draws one from system entropy"),
    Knob("DENSE_LR", "OptimizerConfig.dense_lr", "base rate of Adam; 0 means 1e-6 * global batch / 8192"),
    Knob("SPARSE_LR", "OptimizerConfig.sparse_lr", "base rate of row-wise Adagrad; 0 means 1e-6 * global batch / 8192"),
    Knob("GRAD_CLIP_NORM", "OptimizerConfig.grad_clip_norm", "largest L2 norm of all dense gradients; 0 turns clipping off"),
    Knob("LR_WARMUP_STEPS", "OptimizerConfig.warmup_steps", "steps of the linear warm-up"),
    Knob("LR_WARMUP_START_LR", "OptimizerConfig.warmup_start_lr", "rate at step 0"),
    Knob("DLRM_DATA_PATH", "StreamConfig.path", "folder of the prepared data"),
    Knob("HISTORY_LENGTH", "HistoryConfig.length", "history budget of a sample, events"),
    Knob("HISTORY_STRATEGY", "HistoryConfig.strategy", "interleaved (a third for each pool) or last_n"),
    Knob("MIN_HISTORY", "IndexConfig.min_history", "earlier events an anchor needs"),
    Knob("MAX_SEQ_LEN", "ModelConfig.max_seq_len", "sequence budget, tokens: contextual + history + candidate"),
    Knob("HSTU_NUM_LAYERS", "ModelConfig.num_layers", "STU layers"),
    Knob("STREAMING_SHUFFLE_FRACTION", "StreamConfig.shuffle_fraction", "share of a window that is shuffled; 0 keeps user-major order"),
    Knob("STREAMING_SHUFFLE_SEED", "StreamConfig.shuffle_seed", "seed of that shuffle"),
    Knob(
        "TRAIN_SPLIT_PERCENTAGE",
        "StreamConfig.train_split_percentage",
        "share of users trained on; the rest only for evaluation",
    ),
    Knob("SPLIT_SALT", "StreamConfig.split_salt", "salt of the hash that splits the users"),
    Knob("START_TS", "StreamConfig.start_window", "first training window"),
    Knob("NUM_TRAIN_TS", "StreamConfig.num_windows", "training windows; -1 means all before the holdout"),
    Knob(
        "EVAL_HOLDOUT_TS", "StreamConfig.holdout_window", "first holdout window; negative: after training, or the last with NUM_TRAIN_TS=-1"
    ),
    Knob("EVAL_HOLDOUT_NUM_WINDOWS", "StreamConfig.holdout_num_windows", "holdout windows"),
    Knob("NUM_TRAIN_BATCHES", "TrainConfig.num_train_batches", "at most so many batches per window; 0 means all"),
    Knob("NUM_EVAL_BATCHES", "EvalConfig.num_batches", "at most so many batches per evaluation; 0 means the whole holdout"),
    Knob("EVAL_EVERY_DATA_PCT", "EvalConfig.every_data_pct", "fraction of the training samples between evaluations; 0: none"),
    Knob("SKIP_EVAL_EPOCH_PCT", "EvalConfig.skip_epoch_pct", "no evaluation before this fraction; negative means the benchmark's rule"),
    Knob("AUC_THRESHOLD", "EvalConfig.auc_threshold", "target; training stops at the first evaluation that reaches it"),
    Knob("METRIC_LOG_FREQ", "TrainConfig.metric_log_frequency", "steps between two reports"),
    Knob(
        "MLPERF_TRAIN_LOSS_LOG_FREQ",
        "MLPerfConfig.train_loss_log_frequency",
        "steps between train_loss records; 0 means METRIC_LOG_FREQ",
    ),
    Knob("NUM_WORKERS", "StreamConfig.num_workers", "loader processes per rank; 0 loads in the trainer"),
    Knob("PREFETCH_FACTOR", "StreamConfig.prefetch_factor", "batches made ahead per worker"),
    Knob("RUN_NAME", "TrainConfig.run_name", "the run's files go to results_dir/RUN_NAME"),
    Knob("MLPERF_LOGGING", "MLPerfConfig.logging", "write the MLPerf log"),
    Knob("MLPERF_LOG_PATH", "MLPerfConfig.log_path", "empty means mlperf.log in the run's folder"),
    Knob("MLPERF_SUBMISSION_PLATFORM", "MLPerfConfig.platform", "system name in the MLPerf log"),
)

_NO_CHECKPOINTS = "checkpoints cannot be written or read; unset it"
_NO_PLACEMENT = "placement and sharding of tables cannot be chosen by hand; unset it"
_NO_DIAGNOSTIC = "this diagnostic does not exist; unset it"
_EXACT_AUC = "AUC is exact, over all samples of an evaluation"
_TORCHRUN = "processes are started by torchrun: use its --nproc_per_node, --nnodes and --node_rank"

_FOREIGN = (
    ForeignKnob("CKPT_PATH", True, _NO_CHECKPOINTS),
    ForeignKnob("CKPT_STEP_FREQ", True, _NO_CHECKPOINTS, ("0",)),
    ForeignKnob("CKPT_TIME_INTERVAL_S", True, _NO_CHECKPOINTS, ("0", "0.0")),
    ForeignKnob("IN_WINDOW_CKPT_FREQ", True, _NO_CHECKPOINTS, ("0",)),
    ForeignKnob("ALLOW_SPLIT_MISMATCH", True, "runs cannot be resumed; unset it", ("0",)),
    ForeignKnob("DIE_AT_STEP", True, "there is no crash hook; unset it", ("-1",)),
    ForeignKnob("EVAL_EVERY_N_WINDOWS", True, "evaluation follows the data, not windows; use EVAL_EVERY_DATA_PCT", ("0",)),
    ForeignKnob("EMBEDDING_ROW_SCALE", True, "rows are never scaled; set ModelConfig.table_rows in gin", ("1", "1.0")),
    ForeignKnob("EMB_PLACEMENT", True, _NO_PLACEMENT, ("auto",)),
    ForeignKnob("EMB_PLACEMENT_OVERRIDES", True, _NO_PLACEMENT),
    ForeignKnob("EMB_SHARDING_OVERRIDES", True, _NO_PLACEMENT),
    ForeignKnob("TRITON_HSTU_LAST_LAYER_TARGETS_ONLY", True, "the last layer runs for all rows; unset it", ("0",)),
    ForeignKnob("TRITON_HSTU_TARGETS_ONLY_EVAL", False, "the last layer runs for all rows"),
    ForeignKnob("HBM_CAP_GB", True, "GPU memory cannot be capped; unset it"),
    ForeignKnob("SPARSE_A2A_FWD", True, "embeddings travel in fp32; unset it", ("fp32",)),
    ForeignKnob("SPARSE_A2A_BWD", True, "embedding gradients travel in fp32; unset it", ("fp32",)),
    ForeignKnob("DIAG_UNIQUE_EMB", True, _NO_DIAGNOSTIC, ("0",)),
    ForeignKnob("EVAL_INTERIM_LOG", True, _NO_DIAGNOSTIC, ("0",)),
    ForeignKnob("INIT_CHECKSUM", True, _NO_DIAGNOSTIC, ("0",)),
    ForeignKnob("OUTPUT_TRACE", True, _NO_DIAGNOSTIC, ("0",)),
    ForeignKnob("WINDOW_BARRIER_DEBUG", True, _NO_DIAGNOSTIC, ("0",)),
    ForeignKnob("KEEP_LAST_N", False, "there are no checkpoints to keep"),
    ForeignKnob("DECORRELATE_DROPOUT", False, "dropout is keyed by sample, so ranks never share a mask", ("1",)),
    ForeignKnob("PERSISTENT_LOADER", False, "the loader always outlives a window", ("1",)),
    ForeignKnob("DOUBLE_BUFFER", False, "the next batches are always made ahead", ("1",)),
    ForeignKnob("EC_INDEX_DEDUP", False, "every distinct row is always looked up once", ("1",)),
    ForeignKnob("QCOMM_LOWMEM_CODEC", False, "there is no codec to patch"),
    ForeignKnob("TRITON_FULL_AUTOTUNE", False, "kernel configurations are pinned", ("0",)),
    ForeignKnob("HSTU_HAMMER_KERNEL", False, "each op picks its kernel by device; set ModelConfig.kernels"),
    ForeignKnob("TENSORBOARD_LOG_PATH", False, "TensorBoard files go to the run's folder; TrainConfig.tensorboard turns them off"),
    ForeignKnob("TRAIN_LIFETIME_AUC_MODE", False, _EXACT_AUC),
    ForeignKnob("EVAL_LIFETIME_AUC_MODE", False, _EXACT_AUC),
    ForeignKnob("CUMULATIVE_AUC_BINS", False, _EXACT_AUC),
    ForeignKnob("LIFETIME_AUC_WINDOW", False, _EXACT_AUC),
    ForeignKnob("GPUS_PER_NODE", False, _TORCHRUN),
    ForeignKnob("NNODES", False, _TORCHRUN),
    ForeignKnob("NODE_RANK", False, _TORCHRUN),
)

KNOBS = {knob.name: knob for knob in _KNOBS}
FOREIGN_KNOBS = {knob.name: knob for knob in _FOREIGN}


def knobs_from_environment(environment: Mapping[str, str]) -> dict[str, object]:
    """Values of the knobs set in `environment`, by name; an empty text counts as unset. Raises ValueError on a malformed one."""
    return {name: knob.parse(environment[name]) for name, knob in KNOBS.items() if environment.get(name, "").strip()}


def check_foreign_knobs(environment: Mapping[str, str]) -> list[str]:
    """Warnings about variables without effect here, one line each.

    Raises ValueError on one whose wish cannot be granted, and on a name that is very nearly a knob's.
    """
    warnings = []
    for knob in FOREIGN_KNOBS.values():
        text = environment.get(knob.name, "").strip()
        if not text or text.lower() in knob.off:
            continue
        if knob.refused:
            raise ValueError(f"environment variable {knob.name}={text!r} is not supported: {knob.reason}")
        warnings.append(f"environment variable {knob.name}={text!r} has no effect: {knob.reason}")
    for name in sorted(environment.keys() - KNOBS.keys() - FOREIGN_KNOBS.keys()):
        like = difflib.get_close_matches(name, KNOBS, n=1, cutoff=0.9)
        if like:
            raise ValueError(
                f"environment variable {name}={environment[name]!r}: is no knob; did you mean {like[0]}? If not, unset it here"
            )
    return warnings


def nearest(name: str, candidates: Iterable[str]) -> str:
    """The candidate most like `name`, capitals or not; one that `name` is the beginning of comes first."""
    name = name.lower()

    def likeness(candidate: str) -> tuple[bool, float]:
        return candidate.lower().startswith(name), difflib.SequenceMatcher(None, name, candidate.lower()).ratio()

    return max(sorted(candidates), key=likeness)


def knob_table() -> str:
    """Markdown table of the knobs."""
    lines = ["| knob | setting | type | default | meaning |", "|---|---|---|---|---|"]
    for knob in KNOBS.values():
        lines.append(f"| `{knob.name}` | `{knob.binding}` | {knob.type.__name__} | `{knob.default!r}` | {knob.doc} |")
    return "\n".join(lines)


def foreign_knob_table() -> str:
    """Markdown table of the reference trainer's knobs that are refused or without effect."""
    lines = ["| variable | if set | why | accepted |", "|---|---|---|---|"]
    for knob in FOREIGN_KNOBS.values():
        accepted = ", ".join(f"`{text}`" for text in knob.off)
        lines.append(f"| `{knob.name}` | {'error' if knob.refused else 'warning'} | {knob.reason} | {accepted} |")
    return "\n".join(lines)


def renew_tables(text: str) -> str:
    """`text` with each block between `<!-- NAME:begin -->` and `<!-- NAME:end -->` made anew; NAME is knobs or foreign-knobs."""
    for name, table in (("knobs", knob_table), ("foreign-knobs", foreign_knob_table)):
        pattern = f"(<!-- {name}:begin -->\n).*?(<!-- {name}:end -->)"
        text = re.sub(pattern, lambda match, body=table: f"{match[1]}{body()}\n{match[2]}", text, flags=re.DOTALL)
    return text


def main(paths: list[str]) -> None:
    """Print the tables, or renew them in the files named."""
    if not paths:
        print(knob_table(), foreign_knob_table(), sep="\n\n")
    for path in map(Path, paths):
        path.write_text(renew_tables(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
