"""When to evaluate and at which learning rate, as pure functions of the step.

Steps and samples are exact integers; a fraction of the data is taken as the decimal that the user wrote, so that no rounding of a float
moves an evaluation by a step.
"""

import math
from fractions import Fraction

from data.checks import require
from dlrm_hstu.mlperf import rules

reference_learning_rate = rules.reference_learning_rate


def eval_interval_steps(train_samples: int, global_batch: int, every_data_pct: float = 0.001) -> int:
    """Steps between two evaluations: that fraction of the training samples, rounded up to whole steps; 0 means never.

    Raises ValueError for a count that is not positive or a negative fraction.
    """
    require(train_samples > 0, f"train_samples={train_samples}: must be positive; is the training data empty?")
    require(global_batch > 0, f"global_batch={global_batch}: must be positive")
    require(every_data_pct >= 0, f"every_data_pct={every_data_pct}: must not be negative; 0 turns evaluation off")
    return math.ceil(_share(every_data_pct, train_samples) / global_batch)


def first_eval_samples(global_batch: int, train_samples: int, every_data_pct: float = 0.001, skip_epoch_pct: float = -1.0) -> int:
    """Training samples at the first evaluation: the first point of the evaluation grid at or past a threshold; 0 means never.

    skip_epoch_pct: the threshold as a fraction of the training samples; negative means the rules' threshold, which follows from the
        batch size alone.
    """
    interval = eval_interval_steps(train_samples, global_batch, every_data_pct) * global_batch
    if interval == 0:
        return 0
    threshold = rules.first_eval_threshold(global_batch) if skip_epoch_pct < 0 else math.ceil(_share(skip_epoch_pct, train_samples))
    return max(1, -(-threshold // interval)) * interval


def is_eval_step(step: int, interval: int, first_step: int) -> bool:
    """Whether an evaluation follows the `step`-th training step (counted from 1); an interval of 0 means never."""
    return interval > 0 and step >= first_step and step % interval == 0


def learning_rate(step: int, base: float, warmup_steps: int, start: float) -> float:
    """Learning rate of step `step`, counted from 0: a straight line from `start` to `base` over `warmup_steps`, then `base`.

    A `start` above `base` counts as `base`.
    """
    if step >= warmup_steps:
        return base
    start = min(start, base)
    return start + (base - start) * (step / warmup_steps)


def check_schedule(total_steps: int, interval: int, first_step: int) -> None:
    """Raise ValueError unless a run of `total_steps` steps evaluates at least once, as an MLPerf log must show.

    interval, first_step: steps between evaluations and the step of the first.
    """
    log_off = "or turn the log off with MLPerfConfig.logging = False"
    require(
        interval > 0,
        f"EvalConfig.every_data_pct=0: evaluation is off, but an MLPerf log needs one; set it to 0.001, {log_off}",
    )
    require(
        first_step <= total_steps,
        f"the first evaluation comes after step {first_step}, but the data ends after step {total_steps}, and an MLPerf log needs one "
        f"evaluation; set EvalConfig.skip_epoch_pct (0: evaluate from the start, here every {interval} steps), a smaller "
        f"EvalConfig.every_data_pct, {log_off}",
    )


def _share(fraction: float, samples: int) -> Fraction:
    """`fraction` of `samples`, exactly, with the float read as its shortest decimal: 0.001 is 1/1000."""
    return Fraction(str(fraction)) * samples
