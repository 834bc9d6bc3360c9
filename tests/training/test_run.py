"""Whole runs of train.py on a small store: what they log, where they stop, how they fail."""

import numpy as np
import pytest

from data.history import HistoryConfig
from data.index import AnchorIndex, IndexConfig
from data.loader import StreamConfig
from data.store import EventStore
from tests.official_checker import objected_keys

UNREACHABLE = "AUC_THRESHOLD = 1.0"
WHOLE_WINDOWS = "NUM_TRAIN_BATCHES = 0"


def keys(records):
    return [record["key"] for record in records]


def of(records, key):
    return [record for record in records if record["key"] == key]


def test_first_evaluation_at_the_target_ends_the_run(run_train):
    run = run_train("AUC_THRESHOLD = 0.0")
    assert run.code == 0
    assert keys(run.records)[-5:] == ["block_stop", "eval_start", "eval_accuracy", "eval_stop", "run_stop"]
    assert run.records[-1]["metadata"]["status"] == "success"
    assert len(of(run.records, "eval_accuracy")) == 1
    times = [record["time_ms"] for record in run.records]
    assert times == sorted(times)
    assert [row["kind"] for row in run.rows][-1] == "eval"


def test_samples_count_is_steps_times_global_batch(run_train):
    run = run_train(UNREACHABLE, "EVAL_EVERY_DATA_PCT = 0.25")
    steps = [row["step"] for row in run.rows if row["kind"] == "eval"]
    counts = [record["metadata"]["samples_count"] for record in of(run.records, "eval_accuracy")]
    assert len(steps) >= 2
    assert counts == [step * 16 for step in steps]
    assert all(isinstance(count, int) for count in counts)
    assert of(run.records, "block_start")[0]["metadata"]["samples_count"] == 0


def test_the_official_checker_objects_to_nothing_but_the_scale(run_train):
    closed = (
        "MLPerfConfig.division = 'closed'",
        "DENSE_LR = 0.0",
        "SPARSE_LR = 0.0",
        "LR_WARMUP_STEPS = 24000",
        "EVAL_EVERY_DATA_PCT = 0.001",
    )
    run = run_train("AUC_THRESHOLD = 0.0", *closed)
    assert run.code == 0
    scale = {"train_samples", "eval_samples", "max_sequence_length", "eval_accuracy"}
    assert objected_keys(run.folder / "mlperf.log") == scale


def test_data_that_ends_below_the_target(run_train):
    run = run_train(UNREACHABLE, "EVAL_EVERY_DATA_PCT = 0.35")
    interval = 3  # steps: 0.35 of 2 windows of 4 batches, rounded up
    assert run.code == 3
    assert keys(run.records)[-2:] == ["block_stop", "run_stop"]
    assert run.records[-1]["metadata"]["status"] == "aborted"
    assert [row["step"] for row in run.rows if row["kind"] == "eval"] == [interval, 2 * interval]
    assert "before AUC 1 was reached" in run.out


def test_the_target_stops_a_run_without_an_mlperf_log(run_train):
    run = run_train("AUC_THRESHOLD = 0.0", "MLPERF_LOGGING = False")
    assert run.code == 0
    assert run.records == []
    assert [row["kind"] for row in run.rows].count("eval") == 1


@pytest.mark.parametrize("bindings", [["EVAL_EVERY_DATA_PCT = 0.0"], ["EVAL_EVERY_DATA_PCT = 0.35", "SKIP_EVAL_EPOCH_PCT = 1.0"]])
def test_a_log_without_an_evaluation_is_refused_at_the_start(run_train, bindings):
    run = run_train(*bindings)
    assert run.code == 2
    assert run.records == []
    assert len(run.err.strip().splitlines()) == 1
    assert "evaluation" in run.err


def test_evaluation_can_be_off_without_a_log(run_train):
    run = run_train("EVAL_EVERY_DATA_PCT = 0.0", "MLPERF_LOGGING = False")
    assert run.code == 0
    assert "evaluation was off" in run.out
    assert {row["kind"] for row in run.rows} == {"train"}


def test_the_log_says_what_ran(run_train):
    run = run_train(
        "AUC_THRESHOLD = 0.0",
        "GRAD_CLIP_NORM = 2.0",
        "OptimizerConfig.beta_1 = 0.8",
        "OptimizerConfig.weight_decay = 0.5",
        "ModelConfig.dtype = 'bfloat16'",
        "NUM_EVAL_BATCHES = 1",
        "MAX_SEQ_LEN = 30",
        "EVAL_HOLDOUT_NUM_WINDOWS = 2",
    )
    assert run.code == 0
    values = {record["key"]: record["value"] for record in run.records}
    expected = {
        "opt_name": "Adam",
        "opt_sparse_name": "RowWiseAdagrad",
        "opt_gradient_clip_norm": 2.0,
        "opt_adam_beta_1": 0.8,
        "opt_weight_decay": 0.5,
        "lowest_numerical_precision_in_linear": "bfloat16",
        "lowest_numerical_precision_in_attn": "bfloat16",
        "eval_samples": 16,
        "global_batch_size": 16,
        "max_sequence_length": 30,
        "auc_threshold": 0.0,
        "eval_set": "holdout windows 2 to 3",
        "config_filename": "smoke.gin",
    }
    assert {key: values[key] for key in expected} == expected
    assert [row["eval_samples"] for row in run.rows if row["kind"] == "eval"] == [16]
    assert "holdout windows 2 to 3" in run.out


def test_a_folder_with_a_run_is_not_written_to(run_train):
    first = run_train("AUC_THRESHOLD = 0.0")
    files = {path: path.read_bytes() for path in first.folder.rglob("*") if path.is_file()}
    again = run_train("AUC_THRESHOLD = 0.0", f"RUN_NAME = '{first.folder.name}'")
    assert again.code == 2
    assert "RUN_NAME" in again.err
    assert {path: path.read_bytes() for path in first.folder.rglob("*") if path.is_file()} == files


@pytest.mark.parametrize(
    "binding", ["MLPerfConfig.status = 'x'", "MLPerfConfig.platform = 'eval_accuracy'", "RUN_NAME = '../x'", f"SEED = {2**64}"]
)
def test_a_bad_setting_writes_nothing(run_train, binding):
    run = run_train(binding)
    assert run.code == 2
    assert not run.folder.exists()


def test_every_sample_of_the_holdout_is_scored_at_every_evaluation(run_train, store_path):
    run = run_train(UNREACHABLE, "NUM_EVAL_BATCHES = 0", "EVAL_EVERY_DATA_PCT = 0.25")
    index = AnchorIndex.open(EventStore.open(store_path), IndexConfig(min_history=10))
    stream = StreamConfig(path=str(store_path), num_windows=2, holdout_window=2)
    expected = len(index.holdout(stream.resolve(index).holdout.start))
    assert expected % 16  # there is a tail
    scored = [row["eval_samples"] for row in run.rows if row["kind"] == "eval"]
    assert len(scored) >= 2
    assert set(scored) == {expected}
    assert of(run.records, "eval_samples")[0]["value"] == expected


def test_every_window_trains_all_its_samples(run_train, store_path):
    run = run_train(UNREACHABLE, WHOLE_WINDOWS, "NUM_TRAIN_TS = 3", "NUM_EVAL_BATCHES = 1", "EVAL_EVERY_DATA_PCT = 0.3")
    index = AnchorIndex.open(EventStore.open(store_path), IndexConfig(min_history=10))
    counts = index.counts[:3]
    assert of(run.records, "train_samples")[0]["value"] == counts.sum()
    last_step = {row["window"]: row["step"] for row in run.rows if row["kind"] == "train"}
    assert list(last_step.values()) == np.cumsum(-(-counts // 16)).tolist()


def test_seeds(run_train):
    drawn = [of(run_train("SEED = -1", "AUC_THRESHOLD = 0.0").records, "seed") for _ in range(2)]
    assert all(len(seeds) == 1 for seeds in drawn)
    assert drawn[0][0]["value"] != drawn[1][0]["value"]
    assert of(run_train("SEED = 7", "AUC_THRESHOLD = 0.0").records, "seed")[0]["value"] == 7


def test_equal_seeds_give_equal_runs_and_others_do_not(run_train):
    losses = [[row.get("loss") or row["auc"] for row in run_train(UNREACHABLE, f"SEED = {seed}").rows] for seed in (3, 3, 4)]
    assert losses[0] == losses[1]
    assert losses[0] != losses[2]


def test_what_a_run_leaves(run_train):
    run = run_train("AUC_THRESHOLD = 0.0")
    assert {path.name for path in run.folder.iterdir()} == {"mlperf.log", "metrics.jsonl", "config.gin", "tensorboard"}
    assert list((run.folder / "tensorboard").iterdir())
    assert "TrainConfig.batch_size = 16" in (run.folder / "config.gin").read_text().replace("%BATCH_SIZE", "16")


def test_no_data_is_one_line(run_train, tmp_path):
    for binding, word in (("DLRM_DATA_PATH = ''", "DLRM_DATA_PATH"), (f"DLRM_DATA_PATH = '{tmp_path}/nothing'", "nothing")):
        run = run_train(binding)
        assert run.code == 2
        assert len(run.err.strip().splitlines()) == 1
        assert word in run.err


def test_a_damaged_store_is_not_trained_on(run_train, store_path, tmp_path):
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    for path in store_path.rglob("*"):
        target = damaged / path.relative_to(store_path)
        target.mkdir(exist_ok=True) if path.is_dir() else target.write_bytes(path.read_bytes())
    column = damaged / "time.npy"
    column.write_bytes(column.read_bytes()[:-1])
    run = run_train(f"DLRM_DATA_PATH = '{damaged}'")
    assert run.code == 2
    assert "time.npy" in run.err


def test_a_history_for_another_length_needs_no_new_store(run_train):
    assert HistoryConfig().length != 24
    assert run_train("HISTORY_LENGTH = 24", "MAX_SEQ_LEN = 33", "AUC_THRESHOLD = 0.0").code == 0


@pytest.mark.gpu
@pytest.mark.parametrize("dtype, tolerance", [("float32", 1e-3), ("bfloat16", 2e-2)])
def test_a_gpu_trains_as_the_cpu_does(run_train, dtype, tolerance):
    cpu = run_train(UNREACHABLE, "TrainConfig.device = 'cpu'")
    gpu = run_train(UNREACHABLE, "TrainConfig.device = 'cuda'", f"ModelConfig.dtype = '{dtype}'")
    assert (cpu.code, gpu.code) == (3, 3)
    losses = [[row["loss"] for row in run.rows if row["kind"] == "train"] for run in (cpu, gpu)]
    assert len(losses[0]) == 8
    np.testing.assert_allclose(losses[1], losses[0], rtol=tolerance)
