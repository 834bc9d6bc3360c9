"""What an MLPerf log says of a run before it starts."""

import math
from dataclasses import dataclass, fields

from data.checks import check_fields, require
from dlrm_hstu.mlperf import rules

# The official tools search whole lines for these words: in a value they would be taken for a record of that name.
RESERVED_WORDS = (":::MLLOG", "global_batch_size", "submission_benchmark", "eval_accuracy", "eval_error")

STATUSES = ("onprem", "cloud", "research")


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """The log's header: each field is a key of the log, in the log's order, to be filled from the live objects of the run.

    submission_org, submission_platform: who submits, on what. submission_division: closed or open. submission_status: onprem, cloud or
        research.
    seed: the run's one seed, drawn already. global_batch_size: samples of one optimizer step, all ranks.
    gradient_accumulation_steps: micro batches of a rank in one step, 1 without accumulation. micro_batch_size: samples of each.
    train_samples, eval_samples: samples that the training windows hold; samples that one evaluation scores.
    opt_*: of the optimizers as they stand: base learning rates before warm-up.
    eval_every_data_pct: fraction of the training samples between evaluations.
    lowest_numerical_precision_in_*: of the matrix products, the attention and the collectives: one of `rules.PRECISIONS`.
    *_parallelism: ways; 1 means unused. config_filename: names the configuration that was run.
    auc_threshold, eval_set: the target, and the name of the samples it is measured on.
    eval_interval_samples, first_eval_samples: the evaluation grid in training samples. The last four no official tool reads.
    Raises ValueError for a value of the wrong type, out of range, or with a word that the official tools would misread.
    """

    submission_org: str
    submission_division: str
    submission_status: str
    submission_platform: str
    seed: int
    global_batch_size: int
    gradient_accumulation_steps: int
    train_samples: int
    eval_samples: int
    max_sequence_length: int
    opt_name: str
    opt_base_learning_rate: float
    opt_adam_beta_1: float
    opt_adam_beta_2: float
    opt_adam_epsilon: float
    opt_weight_decay: float
    opt_gradient_clip_norm: float
    opt_sparse_name: str
    opt_sparse_base_learning_rate: float
    opt_learning_rate_warmup_steps: int
    opt_learning_rate_warmup_start_lr: float
    eval_every_data_pct: float
    lowest_numerical_precision_in_linear: str
    lowest_numerical_precision_in_attn: str
    lowest_numerical_precision_in_comm: str
    tensor_parallelism: int = 1
    pipeline_parallelism: int = 1
    context_parallelism: int = 1
    expert_parallelism: int = 1
    micro_batch_size: int
    config_filename: str
    auc_threshold: float
    eval_set: str
    eval_interval_samples: int
    first_eval_samples: int

    def __post_init__(self):
        check_fields(self)
        for f in fields(self):
            value = getattr(self, f.name)
            if f.type is str:
                check_words(f.name, value)
            elif f.type is float:
                require(math.isfinite(value) and value >= 0, f"{f.name}={value}: must be finite and not negative")
                object.__setattr__(self, f.name, float(value))
            else:
                least = 0 if f.name in ("seed", "opt_learning_rate_warmup_steps") else 1
                require(value >= least, f"{f.name}={value}: must be at least {least}")
            if f.name.startswith("lowest_numerical_precision"):
                allowed = ", ".join(rules.PRECISIONS)
                require(value in rules.PRECISIONS, f"{f.name}={value!r}: the MLPerf rules know {allowed}")
        for name, allowed in (("submission_division", ("closed", "open")), ("submission_status", STATUSES)):
            require(getattr(self, name) in allowed, f"{name}={getattr(self, name)!r}: must be one of {', '.join(allowed)}")
        require(self.auc_threshold <= 1, f"auc_threshold={self.auc_threshold}: must be in [0, 1]")
        rank_batch = self.gradient_accumulation_steps * self.micro_batch_size
        require(
            self.global_batch_size % rank_batch == 0,
            f"global_batch_size={self.global_batch_size}: must be a multiple of micro_batch_size * accumulation steps, {rank_batch}",
        )
        for name, unit in (("eval_interval_samples", "global_batch_size"), ("first_eval_samples", "eval_interval_samples")):
            value, step = getattr(self, name), getattr(self, unit)
            require(value % step == 0, f"{name}={value}: must be a multiple of {unit}, {step}")


def check_words(name: str, text: str) -> None:
    """Raise ValueError for an empty text, or one with a word that the official tools would misread."""
    require(text != "", f"{name}='': must not be empty")
    for word in RESERVED_WORDS:
        require(word not in text, f"{name}={text!r}: must not contain {word!r}, which the official tools misread; rename it")
