import math
from importlib.resources import files

import pytest
import yaml

from dlrm_hstu.mlperf import rules
from dlrm_hstu.training.schedule import (
    check_schedule,
    eval_interval_steps,
    first_eval_samples,
    is_eval_step,
    learning_rate,
    reference_learning_rate,
)

TRAIN = 2_290_835_423
ALL_BATCHES = range(256, 131072 + 1, 8)

# global batch, steps of a block, samples of a block, samples at the first evaluation, its step
TABLE = [
    (1024, 2238, 2291712, 48125952, 46998),
    (4096, 560, 2293760, 52756480, 12880),
    (8192, 280, 2293760, 57344000, 7000),
    (12288, 187, 2297856, 64339968, 5236),
    (16384, 140, 2293760, 71106560, 4340),
    (24576, 94, 2310144, 83165184, 3384),
    (32768, 70, 2293760, 94044160, 2870),
    (65536, 35, 2293760, 144506880, 2205),
]


@pytest.mark.parametrize("batch, steps, samples, first, first_step", TABLE)
def test_the_published_schedule(batch, steps, samples, first, first_step):
    assert eval_interval_steps(TRAIN, batch) == steps
    assert steps * batch == samples
    assert first_eval_samples(batch, TRAIN) == first == first_step * batch
    assert rules.eval_grid(batch) == (samples, first)


def test_every_batch_size_agrees_with_the_installed_official_checker():
    text = files("mlperf_logging").joinpath("compliance_checker/training_6.1.0/closed_dlrmv4.yaml").read_text()
    entries = yaml.load(text, Loader=yaml.BaseLoader)
    code = next(entry["KEY"]["POST"] for entry in entries if entry.get("KEY", {}).get("NAME") == "global_batch_size")
    compiled = compile(code, "closed_dlrmv4.yaml", "exec")
    state = {"train_samples": TRAIN}
    for batch in ALL_BATCHES:
        exec(compiled, {"s": state, "math": math}, {"v": {"value": batch}})
        interval, first = state["eval_interval_samples"], state["first_eval_samples"]
        assert (eval_interval_steps(TRAIN, batch) * batch, first_eval_samples(batch, TRAIN)) == (interval, first), batch
        assert rules.eval_grid(batch) == (interval, first), batch
        assert rules.learning_rate_band(batch) == (state["lr_min"], state["lr_max"]), batch


def test_a_fraction_is_the_decimal_that_was_written():
    # As floats, 0.07 * 100 is 7.000000000000001 and would round up to 8.
    assert eval_interval_steps(100, 1, 0.07) == 7
    assert first_eval_samples(1, 100, 0.01, 0.07) == 7


def test_an_interval_is_rounded_up_to_whole_steps_and_is_at_least_one():
    assert eval_interval_steps(1001, 10, 0.1) == 11
    assert eval_interval_steps(1000, 10, 0.1) == 10
    assert eval_interval_steps(1000, 4096, 1e-9) == 1


def test_evaluation_off():
    assert eval_interval_steps(TRAIN, 8192, 0.0) == 0
    assert first_eval_samples(8192, TRAIN, 0.0) == 0
    assert not any(is_eval_step(step, 0, 0) for step in range(10))


@pytest.mark.parametrize("train, batch, pct, word", [(0, 8, 0.1, "train_samples=0"), (8, 0, 0.1, "global_batch=0"), (8, 8, -0.1, "-0.1")])
def test_impossible_schedules_are_refused(train, batch, pct, word):
    with pytest.raises(ValueError, match=word):
        eval_interval_steps(train, batch, pct)


@pytest.mark.parametrize("pct, first", [(0.0, 100), (0.1, 100), (0.1001, 200), (0.2, 200), (0.95, 1000), (1.0, 1000)])
def test_an_explicit_skip_ends_at_the_first_grid_point_at_or_past_it(pct, first):
    assert first_eval_samples(10, 1000, every_data_pct=0.1, skip_epoch_pct=pct) == first


def test_the_skips_published_as_fractions_agree_with_the_rule():
    for batch, pct in ((8192, 0.025), (16384, 0.0303), (32768, 0.041)):
        assert first_eval_samples(batch, TRAIN, skip_epoch_pct=pct) == first_eval_samples(batch, TRAIN)


def test_evaluations_of_a_whole_run():
    assert [step for step in range(1, 60) if is_eval_step(step, 10, 30)] == [30, 40, 50]
    assert [step for step in range(1, 25) if is_eval_step(step, 10, 10)] == [10, 20]


def test_the_ramp_is_a_straight_line_from_the_first_step_on():
    assert learning_rate(0, 1e-6, 24000, 0.0) == 0.0
    assert learning_rate(7560, 1e-6, 24000, 0.0) == pytest.approx(1e-6 * 0.315, rel=1e-15)
    assert learning_rate(5, 1e-2, 10, 0.0) == pytest.approx(5e-3, rel=1e-15)
    assert learning_rate(5, 3.0, 10, 1.0) == 2.0
    assert [learning_rate(step, 0.1, 3, 0.03) for step in (3, 4, 10**9)] == [0.1, 0.1, 0.1]


def test_no_ramp_and_a_start_above_the_base():
    assert learning_rate(0, 1e-3, 0, 0.0) == 1e-3
    assert [learning_rate(step, 1.0, 10, 5.0) for step in (0, 5, 20)] == [1.0, 1.0, 1.0]


def test_the_reference_rate():
    assert reference_learning_rate(8192) == 1e-6
    assert reference_learning_rate(1024) == 1.25e-7


def test_a_log_without_evaluation_is_refused_at_the_start():
    with pytest.raises(ValueError, match=r"every_data_pct=0.*MLPerfConfig\.logging = False"):
        check_schedule(1000, 0, 0)


def test_a_first_evaluation_past_the_data_is_refused_with_both_numbers_and_the_fix():
    with pytest.raises(ValueError, match=r"step 101, .*step 100, .*skip_epoch_pct.*every 10 steps"):
        check_schedule(100, 10, 101)
    check_schedule(100, 10, 100)
