"""The log passes the official checker without a warning, and every way to spoil it is refused by the log or seen by the checker."""

import importlib.metadata
import json
import math
import os
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
from mlperf_logging.mllog import constants
from mlperf_logging.package_checker import seed_checker
from mlperf_logging.rcp_checker import rcp_checker

from dlrm_hstu.mlperf import log as log_module
from dlrm_hstu.mlperf.log import MLPerfLog
from tests.mlperf.runs import FIRST, INTERVAL, evaluate, start, whole_run
from tests.official_checker import complaints, objected_keys

CHECKED_KEYS = """
cache_clear init_start submission_benchmark submission_org submission_division submission_platform global_batch_size
gradient_accumulation_steps train_samples eval_samples max_sequence_length opt_name opt_base_learning_rate opt_adam_beta_1 opt_adam_beta_2
opt_adam_epsilon opt_weight_decay opt_gradient_clip_norm opt_sparse_name opt_sparse_base_learning_rate opt_learning_rate_warmup_steps
opt_learning_rate_warmup_start_lr eval_every_data_pct lowest_numerical_precision_in_linear lowest_numerical_precision_in_attn
lowest_numerical_precision_in_comm tensor_parallelism pipeline_parallelism context_parallelism expert_parallelism micro_batch_size
config_filename init_stop run_start block_start block_stop eval_accuracy run_stop
""".split()


def records(path) -> list[dict]:
    def refuse(name):
        raise ValueError(f"{name} is not JSON")

    lines = Path(path).read_text(encoding="ascii").splitlines()
    assert all(line.startswith(":::MLLOG ") for line in lines)
    return [json.loads(line.removeprefix(":::MLLOG "), parse_constant=refuse) for line in lines]


def keys(path) -> list[str]:
    return [record["key"] for record in records(path)]


def of(path, key) -> list[dict]:
    return [record for record in records(path) if record["key"] == key]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run" / "mlperf.log"


# The good run


def test_the_official_checker_has_nothing_to_say(path, facts):
    whole_run(path, facts)
    assert complaints(path) == ""


def test_the_official_command_says_success(path, facts, tmp_path):
    whole_run(path, facts)
    command = [sys.executable, "-m", "mlperf_logging.compliance_checker", "--usage", "training", "--ruleset", "6.1.0", "--werror"]
    done = subprocess.run([*command, str(path)], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and "SUCCESS" in done.stderr and "WARNING" not in done.stderr


def test_an_open_run_with_other_settings_passes(path, facts):
    whole_run(path, facts, submission_division="open", opt_adam_beta_1=0.9, first_eval_samples=INTERVAL, max_sequence_length=2048)
    assert complaints(path) == ""


@pytest.mark.parametrize("batch, interval, first", [(16384, 2293760, 71106560), (24576, 2310144, 83165184)])
def test_other_batch_sizes_pass(path, facts, batch, interval, first):
    rate = 1e-6 * batch / 8192
    grid = {"eval_interval_samples": interval, "first_eval_samples": first}
    whole_run(path, facts, global_batch_size=batch, opt_base_learning_rate=rate, opt_sparse_base_learning_rate=rate, **grid)
    assert complaints(path) == ""


def test_the_order_of_records(path, facts):
    whole_run(path, facts)
    header = list(asdict(facts))
    loop = ["block_start", "train_loss", "tracked_stats", "block_stop", "eval_start", "eval_accuracy", "eval_stop"]
    again = ["block_start", "block_stop", "eval_start", "eval_accuracy", "eval_stop", "run_stop"]
    assert keys(path) == ["cache_clear", "init_start", "submission_benchmark", *header, "init_stop", "run_start", *loop, *again]


def test_values_and_their_types(path, facts):
    whole_run(path, replace(facts, opt_weight_decay=0))
    logged = {record["key"]: record["value"] for record in records(path)}
    assert logged["submission_benchmark"] == "dlrmv4"
    assert logged["gradient_accumulation_steps"] == 1 and logged["seed"] == 7
    for key, value in asdict(facts).items():
        assert logged[key] == value and type(logged[key]) is type(value), key
    assert logged["cache_clear"] is False and logged["init_start"] is None


def test_kinds_of_record(path, facts):
    whole_run(path, facts)
    kinds = {"start": constants.INTERVAL_START, "stop": constants.INTERVAL_END}
    for record in records(path):
        assert record["event_type"] == kinds.get(record["key"].rpartition("_")[2], constants.POINT_IN_TIME), record["key"]


def test_the_cache_is_called_cleared_only_if_it_was(path):
    MLPerfLog(path).init_start(cache_cleared=True)
    assert of(path, "cache_clear")[0]["value"] is True


def test_samples_are_counted_in_integers_from_zero(path, facts):
    whole_run(path, facts)
    counts = [(record["key"], record["metadata"]["samples_count"]) for record in records(path) if "samples_count" in record["metadata"]]
    assert counts[0] == ("block_start", 0) and counts[-1] == ("run_stop", FIRST + INTERVAL)
    assert all(type(count) is int and count >= 0 for _, count in counts)
    accuracies = [(record["value"], record["metadata"]["samples_count"]) for record in of(path, "eval_accuracy")]
    assert accuracies == [(0.7, FIRST), (0.7512, FIRST + INTERVAL)]
    stop = of(path, "run_stop")[0]["metadata"]
    assert stop["status"] == "success" and stop["epoch_num"] == (FIRST + INTERVAL) / facts.train_samples
    loss = of(path, "train_loss")[0]
    assert loss["value"] == 0.1386 and loss["metadata"]["lr"] == 2e-9 and loss["metadata"]["samples_count"] == 409_600


def test_numpy_numbers_become_plain_ones(path, facts):
    log = MLPerfLog(path)
    start(log, facts)
    log.train_loss(np.float32(0.5), np.int64(8192), np.float64(1e-9))
    evaluate(log, np.float64(0.5), np.int64(FIRST))
    assert type(of(path, "eval_accuracy")[0]["metadata"]["samples_count"]) is int


def test_the_official_readers_find_the_run(path, facts):
    whole_run(path, facts)
    not_converged, samples, batch, benchmark = rcp_checker.read_submission_file(str(path), "6.1.0", False)
    assert (not_converged, samples, batch, benchmark) == (0, FIRST + INTERVAL, 8192, "dlrmv4")


def test_the_official_seed_check_finds_a_repeat(tmp_path, facts):
    for number, seed in enumerate((1, 2, 1)):
        whole_run(tmp_path / f"result_{number}.txt", facts, seed=seed)
    places = [
        (record["metadata"]["file"], record["metadata"]["lineno"]) for n in range(3) for record in of(tmp_path / f"result_{n}.txt", "seed")
    ]
    assert len(places) == 3 and len(set(places)) == 1 and places[0][0] == os.path.join("dlrm_hstu", "mlperf", "log.py")
    checker = seed_checker.SeedChecker("6.1.0")
    assert checker.check_seeds([str(tmp_path / f"result_{n}.txt") for n in (0, 1)])
    assert not checker.check_seeds([str(tmp_path / f"result_{n}.txt") for n in (0, 1, 2)])


def test_a_small_run_differs_only_in_its_scale(path, facts):
    small = {"train_samples": 5000, "eval_samples": 100, "eval_interval_samples": 80, "first_eval_samples": 80}
    rate = 1e-6 * 16 / 8192
    rates = {"opt_base_learning_rate": rate, "opt_sparse_base_learning_rate": rate}
    whole_run(path, facts, (0.4, 0.6), global_batch_size=16, micro_batch_size=8, auc_threshold=0.6, **small, **rates)
    assert objected_keys(path) == {"train_samples", "eval_samples", "eval_accuracy"}


# Spoilt logs


@pytest.mark.parametrize("key", CHECKED_KEYS)
def test_the_checker_misses_each_of_its_keys(path, facts, key):
    whole_run(path, facts)
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(line for line in lines if f'"key": "{key}"' not in line))
    assert complaints(path) != ""


@pytest.mark.parametrize(
    "key", [key for key in CHECKED_KEYS if key not in ("cache_clear", "init_start", "block_start", "block_stop", "eval_accuracy")]
)
def test_the_checker_finds_each_repeated_key(path, facts, key):
    whole_run(path, facts)
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(line * (2 if f'"key": "{key}"' in line else 1) for line in lines))
    assert complaints(path) != ""


@pytest.mark.parametrize(
    "changes",
    [
        {"opt_base_learning_rate": 2e-6, "opt_sparse_base_learning_rate": 2e-6},
        {"opt_sparse_base_learning_rate": 1.1e-6},
        {"opt_name": "adam"},
        {"train_samples": 2_290_835_422},
        {"first_eval_samples": FIRST + INTERVAL},
        {"eval_interval_samples": 8192, "first_eval_samples": FIRST},
        {"auc_threshold": 0.7},
    ],
)
def test_the_checker_finds_other_settings(path, facts, changes):
    aucs = (0.6, 0.7) if "auc_threshold" in changes else (0.7, 0.7512)
    whole_run(path, facts, aucs, **changes)
    assert complaints(path) != ""


def until(log, facts, key):
    """Write a run up to and with the first record of `key`."""
    steps = [
        ("run_start", lambda: (log.init_start(), log.header(facts), log.init_stop_run_start())),
        ("block_start", lambda: log.block_start(0)),
        ("block_stop", lambda: log.block_stop(FIRST)),
        ("eval_start", lambda: log.eval_start(FIRST)),
        ("eval_accuracy", lambda: log.eval_accuracy(0.7, FIRST)),
        ("eval_stop", lambda: log.eval_stop(FIRST)),
    ]
    for name, write in steps:
        write()
        if name == key:
            return


CALLS = {
    "init_start": lambda log, facts: log.init_start(),
    "header": lambda log, facts: log.header(facts),
    "run_start": lambda log, facts: log.init_stop_run_start(),
    "block_start": lambda log, facts: log.block_start(log._position.samples),
    "train_loss": lambda log, facts: log.train_loss(0.1, log._position.samples, 0.0),
    "block_stop": lambda log, facts: log.block_stop(FIRST),
    "eval_start": lambda log, facts: log.eval_start(FIRST),
    "eval_accuracy": lambda log, facts: log.eval_accuracy(0.7, FIRST),
    "eval_stop": lambda log, facts: log.eval_stop(FIRST),
    "run_stop": lambda log, facts: log.run_stop("aborted", log._position.samples),
}
FOLLOWERS = {
    "run_start": {"block_start"},
    "block_start": {"block_stop", "train_loss"},
    "block_stop": {"eval_start", "run_stop"},
    "eval_start": {"eval_accuracy"},
    "eval_accuracy": {"eval_stop"},
    "eval_stop": {"block_start", "run_stop"},
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("after", FOLLOWERS)
def test_only_the_right_record_may_follow(path, facts, after, call):
    log = MLPerfLog(path)
    until(log, facts, after)
    size = path.stat().st_size
    if call in FOLLOWERS[after]:
        CALLS[call](log, facts)
        assert path.stat().st_size > size
    else:
        with pytest.raises(RuntimeError, match="MLPerf log: "):
            CALLS[call](log, facts)
        assert path.stat().st_size == size


def test_set_up_is_in_order_too(path, facts):
    log = MLPerfLog(path)
    for call in set(CALLS) - {"init_start"}:
        with pytest.raises(RuntimeError, match="after nothing"):
            CALLS[call](log, facts)
    log.init_start()
    with pytest.raises(RuntimeError, match="init_stop after init_start, where submission_benchmark must follow"):
        log.init_stop_run_start()


def test_nothing_follows_the_end(path, facts):
    whole_run(path, facts)
    log = MLPerfLog(path)
    start(log, facts)
    log.block_stop(0)
    log.run_stop("aborted", 0)
    for call in CALLS:
        with pytest.raises(RuntimeError):
            CALLS[call](log, facts)


@pytest.mark.parametrize(
    "samples, message",
    [
        (INTERVAL, "the grid has 57344000 next"),
        (FIRST - 8192, "the grid has 57344000 next"),
        (FIRST + INTERVAL, "past the evaluation due at 57344000"),
        (-8192, "at -8192 samples"),
    ],
)
def test_an_evaluation_off_the_grid_is_refused(path, facts, samples, message):
    log = MLPerfLog(path)
    start(log, facts)
    with pytest.raises(RuntimeError, match=message):
        evaluate(log, 0.7, samples)


def test_a_gap_in_the_grid_is_refused(path, facts):
    log = MLPerfLog(path)
    start(log, facts)
    evaluate(log, 0.7, FIRST)
    log.block_start(FIRST)
    with pytest.raises(RuntimeError, match=f"due at {FIRST + INTERVAL}"):
        log.block_stop(FIRST + 2 * INTERVAL)


def test_samples_do_not_jump_or_run_backwards(path, facts):
    log = MLPerfLog(path)
    until(log, facts, "run_start")
    with pytest.raises(RuntimeError, match="block_start at 8192 samples; the log stands at 0"):
        log.block_start(8192)
    log = MLPerfLog(path)
    start(log, facts)
    evaluate(log, 0.7, FIRST)
    log.block_start(FIRST)
    with pytest.raises(RuntimeError, match="a block from"):
        log.block_stop(FIRST - 8192)


@pytest.mark.parametrize("samples", [8192.0, "8192", None])
def test_samples_must_be_integers(path, facts, samples):
    log = MLPerfLog(path)
    start(log, facts)
    with pytest.raises(TypeError):
        log.block_stop(samples)


@pytest.mark.parametrize("auc, status", [(0.7, "success"), (0.75, "aborted"), (0.75, "done")])
def test_the_status_must_be_true(path, facts, auc, status):
    log = MLPerfLog(path)
    start(log, facts)
    evaluate(log, auc, FIRST)
    with pytest.raises(RuntimeError, match="target reached"):
        log.run_stop(status, FIRST)


def test_training_ends_with_the_evaluation_that_reaches_the_target(path, facts):
    log = MLPerfLog(path)
    start(log, facts)
    evaluate(log, 0.75, FIRST)
    with pytest.raises(RuntimeError, match="reached the target"):
        log.block_start(FIRST)


def test_data_that_ends_between_two_grid_points(path, facts):
    log = MLPerfLog(path)
    start(log, facts)
    evaluate(log, 0.7, FIRST)
    log.block_start(FIRST)
    log.block_stop(FIRST + 8192)
    log.run_stop("aborted", FIRST + 8192)
    assert keys(path)[-4:] == ["eval_stop", "block_start", "block_stop", "run_stop"]
    assert of(path, "run_stop")[0]["metadata"]["status"] == "aborted"


# Undefined values


@pytest.mark.parametrize("auc", [math.nan, None, np.float32("nan")])
def test_an_undefined_auc_is_valid_json_and_reaches_no_target(path, facts, auc):
    log = MLPerfLog(path)
    start(log, replace(facts, auc_threshold=0.0))
    evaluate(log, auc, FIRST)
    (record,) = of(path, "eval_accuracy")
    assert record["value"] == 0.0 and record["metadata"]["undefined"] is True
    with pytest.raises(RuntimeError, match="target reached: False"):
        log.run_stop("success", FIRST)
    log.run_stop("aborted", FIRST)
    assert "Failed checks for eval_accuracy" in complaints(path)


def test_an_undefined_auc_early_on_does_not_spoil_a_run(path, facts):
    whole_run(path, facts, aucs=(math.nan, 0.76))
    assert complaints(path) == ""


@pytest.mark.parametrize("auc", [-0.1, 1.1, math.inf])
def test_an_auc_outside_its_range_is_refused(path, facts, auc):
    log = MLPerfLog(path)
    start(log, facts)
    log.block_stop(FIRST)
    log.eval_start(FIRST)
    with pytest.raises(RuntimeError, match="must be in"):
        log.eval_accuracy(auc, FIRST)


def test_numbers_that_are_not_finite_become_null(path, facts):
    log = MLPerfLog(path)
    start(log, facts)
    log.train_loss(math.nan, 8192, 1e-9)
    log.custom("tracked_stats", {"ne": math.nan, "list": [1.0, -math.inf]}, {"step": 1, "x": math.inf})
    assert of(path, "train_loss")[0]["value"] is None
    record = of(path, "tracked_stats")[0]
    assert record["value"] == {"ne": None, "list": [1.0, None]} and record["metadata"]["x"] is None


# Records of our own


@pytest.mark.parametrize("key", ["seed", "run_start", "epoch_start", "global_batch_size", "eval_accuracy_smoothed", "x:::MLLOG ", ""])
def test_own_records_keep_away_from_official_names(path, facts, key):
    log = MLPerfLog(path)
    start(log, facts)
    with pytest.raises(ValueError, match="MLPerf"):
        log.custom(key, 1)


def test_words_that_the_readers_take_for_records_are_refused_everywhere(path, facts):
    log = MLPerfLog(path)
    start(log, facts)
    for value, metadata in (({"eval_accuracy": 0.8}, None), (1, {"note": "global_batch_size"})):
        with pytest.raises(ValueError, match="misread"):
            log.custom("tracked_stats", value, metadata)


def test_a_value_that_json_does_not_know_is_an_error(path, facts):
    log = MLPerfLog(path)
    start(log, facts)
    with pytest.raises(TypeError):
        log.custom("tracked_stats", object())


# Facts


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"lowest_numerical_precision_in_attn": "bf16"}, "bf16.*bfloat16"),
        ({"seed": -1}, "seed=-1"),
        ({"seed": "7"}, "seed='7'"),
        ({"seed": 7.0}, "seed=7.0"),
        ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps=0"),
        ({"global_batch_size": 8192.0}, "global_batch_size=8192.0"),
        ({"tensor_parallelism": 0}, "tensor_parallelism=0"),
        ({"micro_batch_size": 1000}, "global_batch_size=8192: must be a multiple of .*1000"),
        ({"opt_base_learning_rate": math.nan}, "opt_base_learning_rate=nan"),
        ({"opt_base_learning_rate": math.inf}, "opt_base_learning_rate=inf"),
        ({"opt_weight_decay": -0.1}, "opt_weight_decay=-0.1"),
        ({"submission_division": "Closed"}, "Closed"),
        ({"submission_status": "laptop"}, "laptop"),
        ({"submission_platform": ""}, "submission_platform"),
        ({"config_filename": "configs/global_batch_size_8192.gin"}, "must not contain 'global_batch_size'"),
        ({"submission_org": "eval_accuracy"}, "must not contain"),
        ({"auc_threshold": 1.5}, "auc_threshold=1.5"),
        ({"eval_interval_samples": INTERVAL + 1}, "eval_interval_samples"),
        ({"first_eval_samples": FIRST + 8192}, "first_eval_samples"),
    ],
)
def test_facts_are_checked(facts, changes, message):
    with pytest.raises(ValueError, match=message):
        replace(facts, **changes)


# Set-up time, clock, disk


def test_set_up_beyond_the_limit_is_refused(path, facts, monkeypatch):
    for division, limit in (("closed", 30), ("open", 240)):
        clock = iter([0] * 100)
        monkeypatch.setattr(log_module.time, "time", lambda: next(clock))  # noqa: B023
        log = MLPerfLog(path)
        log.init_start()
        log.header(replace(facts, submission_division=division))
        monkeypatch.setattr(log_module.time, "time", lambda: limit * 60)  # noqa: B023
        with pytest.raises(ValueError, match=f"less than {limit}"):
            log.init_stop_run_start()
        monkeypatch.setattr(log_module.time, "time", lambda: limit * 60 - 1)  # noqa: B023
        log.init_stop_run_start()


def test_time_never_decreases(path, facts, monkeypatch):
    log = MLPerfLog(path)
    until(log, facts, "run_start")
    monkeypatch.setattr(log_module.time, "time", lambda: 1.0)  # someone sets the clock back
    log.block_start(0)
    log.close()
    log = MLPerfLog(path, resume=True)
    log.resume_run(facts, 0)
    times = [record["time_ms"] for record in records(path)]
    assert times == sorted(times) and times[-1] > 1000


def test_a_full_disk_is_an_error():
    log = MLPerfLog("/dev/full")
    with pytest.raises(RuntimeError):
        log.init_start()


def test_an_impossible_path_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"file/mlperf.log.*log_path"):
        MLPerfLog(tmp_path / "file" / "mlperf.log")


def test_records_are_on_disk_where_it_matters(path, facts, monkeypatch):
    synced = []
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda number: (fsync(number), synced.append(keys(path)[-1])))
    whole_run(path, facts)
    assert {"init_stop", "run_start", "block_start", "eval_accuracy", "run_stop"} <= set(synced)
    assert "train_loss" not in synced and "opt_name" not in synced


# Logs that write nothing


@pytest.mark.parametrize(
    "make", [lambda path: MLPerfLog(None), lambda path: MLPerfLog(path, rank=1), lambda path: MLPerfLog(path, 1, True)]
)
def test_a_log_that_is_off_does_nothing_in_any_order(path, facts, make):
    log = make(path)
    assert not log.enabled
    log.resume_run(facts, 0)
    log.run_stop("success", 5)
    log.eval_accuracy(None, 0)
    log.train_loss(0.1, 0, 0.0)
    log.custom("seed", 1)
    start(log, facts)
    evaluate(log, 0.8, 8)
    log.close()
    assert not path.parent.exists()


# Resuming


def stopped(path, facts, aucs=(0.7,)):
    """A log of a run that was killed in the block after its evaluations."""
    log = MLPerfLog(path)
    start(log, facts)
    for number, auc in enumerate(aucs):
        evaluate(log, auc, FIRST + number * INTERVAL)
        log.block_start(FIRST + number * INTERVAL)
    log.close()


def test_a_cold_start_empties_the_file(path, facts):
    whole_run(path, facts)
    whole_run(path, facts)
    assert keys(path).count("run_start") == keys(path).count("seed") == 1


@pytest.mark.parametrize("at", [0, 8192, FIRST, FIRST + 8192])
def test_a_resumed_run_passes_the_official_checker(path, facts, at):
    stopped(path, facts)
    log = MLPerfLog(path, resume=True)
    log.resume_run(facts, at)
    log.block_start(at)
    if at < FIRST:
        evaluate(log, 0.71, FIRST)
        log.block_start(FIRST)
    evaluate(log, 0.76, FIRST + INTERVAL)
    log.run_stop("success", FIRST + INTERVAL)
    assert complaints(path) == ""
    assert keys(path).count("run_start") == 1 and of(path, "run_resumed")[0]["metadata"]["samples_count"] == at


def test_a_run_may_be_resumed_again_and_again(path, facts):
    stopped(path, facts)
    for _ in range(2):
        MLPerfLog(path, resume=True).resume_run(facts, FIRST)
    log = MLPerfLog(path, resume=True)
    log.resume_run(facts, FIRST)
    log.block_start(FIRST)
    with pytest.raises(RuntimeError, match="must follow"):
        log.init_start()


def test_a_run_stopped_between_reaching_the_target_and_its_end_can_go_on(path, facts):
    log = MLPerfLog(path)
    until(log, replace(facts, auc_threshold=0.7), "eval_accuracy")
    log.close()
    log = MLPerfLog(path, resume=True)
    log.resume_run(replace(facts, auc_threshold=0.7), 0)
    log.block_start(0)
    evaluate(log, 0.7, FIRST)
    log.run_stop("success", FIRST)


def test_a_torn_last_line_is_cut_off(path, facts):
    stopped(path, facts)
    whole = path.read_bytes()
    path.write_bytes(whole + b':::MLLOG {"namespace": "", "time_ms": 17')
    log = MLPerfLog(path, resume=True)
    assert path.read_bytes() == whole
    log.resume_run(facts, FIRST)
    log.block_start(FIRST)
    evaluate(log, 0.76, FIRST + INTERVAL)
    log.run_stop("success", FIRST + INTERVAL)
    assert complaints(path) == ""


def test_a_resumed_run_must_be_the_same_run(path, facts):
    stopped(path, facts)
    log = MLPerfLog(path, resume=True)
    with pytest.raises(ValueError, match="seed is 7 there and 8 in the resumed run"):
        log.resume_run(replace(facts, seed=8), FIRST)


def test_a_checkpoint_past_an_evaluation_that_is_not_in_the_log_is_refused(path, facts):
    stopped(path, facts)
    log = MLPerfLog(path, resume=True)
    with pytest.raises(ValueError, match=f"the evaluation at {FIRST + INTERVAL} is not in the log"):
        log.resume_run(facts, FIRST + INTERVAL + 8192)


def test_logs_that_cannot_be_resumed(path, facts, tmp_path):
    with pytest.raises(ValueError, match="left no log.*logging = False"):
        MLPerfLog(tmp_path / "absent.log", resume=True)
    log = MLPerfLog(path)
    log.init_start()
    log.close()
    with pytest.raises(ValueError, match="no running run"):
        MLPerfLog(path, resume=True)
    whole_run(path, facts)
    with pytest.raises(ValueError, match="no running run"):
        MLPerfLog(path, resume=True)
    stopped(path, facts)
    path.write_text(path.read_text().replace('"value": 8192', '"value": 8192,,'))
    with pytest.raises(ValueError, match="line 9"):
        MLPerfLog(path, resume=True)


# The package


def absent(name):
    raise importlib.metadata.PackageNotFoundError(name)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    "version, message",
    [(absent, "not installed"), (lambda name: "4.1.31", "mlperf-logging 4.1.31: need .*4.1.68"), (lambda name: "3.9.99", "3.9.99")],
)
def test_a_missing_or_old_package_is_named_on_every_rank(path, monkeypatch, version, message, rank):
    monkeypatch.setattr(importlib.metadata, "version", version)
    with pytest.raises(ValueError, match=message):
        MLPerfLog(path, rank)
    MLPerfLog(None, rank)


def test_a_package_without_the_rules_is_refused(path, monkeypatch):
    monkeypatch.setattr(log_module.rules, "RULESET", "9.9.9")
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "6.0.0rc6")
    with pytest.raises(ValueError, match="6.0.0rc6 without the rules 9.9.9 of dlrmv4"):
        MLPerfLog(path)
