"""The facts of a plausible run on eight ranks at the closed division's own constants."""

import pytest

from dlrm_hstu.mlperf.facts import RunFacts


@pytest.fixture
def facts() -> RunFacts:
    return RunFacts(
        submission_org="Org",
        submission_division="closed",
        submission_status="onprem",
        submission_platform="1x8 GPU",
        seed=7,
        global_batch_size=8192,
        gradient_accumulation_steps=1,
        train_samples=2_290_835_423,
        eval_samples=2_058_204,
        max_sequence_length=4096,
        opt_name="Adam",
        opt_base_learning_rate=1e-6,
        opt_adam_beta_1=0.95,
        opt_adam_beta_2=0.999,
        opt_adam_epsilon=1e-8,
        opt_weight_decay=0.0,
        opt_gradient_clip_norm=1.0,
        opt_sparse_name="RowWiseAdagrad",
        opt_sparse_base_learning_rate=1e-6,
        opt_learning_rate_warmup_steps=24000,
        opt_learning_rate_warmup_start_lr=0.0,
        eval_every_data_pct=0.001,
        lowest_numerical_precision_in_linear="bfloat16",
        lowest_numerical_precision_in_attn="bfloat16",
        lowest_numerical_precision_in_comm="fp16",
        micro_batch_size=1024,
        config_filename="configs/yambda_5b.gin",
        auc_threshold=0.75,
        eval_set="window 299",
        eval_interval_samples=2_293_760,
        first_eval_samples=57_344_000,
    )
