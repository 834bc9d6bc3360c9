import re
from pathlib import Path

import pytest

from dlrm_hstu import knobs
from dlrm_hstu.bindings import setting_defaults
from dlrm_hstu.knobs import FOREIGN_KNOBS, KNOBS, check_foreign_knobs, knobs_from_environment

ROOT = Path(__file__).parent.parent
# Every environment name of the public reference's Yambda configuration and code, apart from torchrun's and the launchers' own.
REFERENCE_NAMES = """
BATCH_SIZE NUM_WORKERS PREFETCH_FACTOR SEED DECORRELATE_DROPOUT DENSE_LR SPARSE_LR GRAD_CLIP_NORM LR_WARMUP_STEPS LR_WARMUP_START_LR
DLRM_DATA_PATH TRAIN_SPLIT_PERCENTAGE HBM_CAP_GB EMB_PLACEMENT EMB_PLACEMENT_OVERRIDES EMB_SHARDING_OVERRIDES SPARSE_A2A_FWD
SPARSE_A2A_BWD QCOMM_LOWMEM_CODEC EC_INDEX_DEDUP HISTORY_LENGTH HISTORY_STRATEGY MIN_HISTORY MAX_SEQ_LEN HSTU_NUM_LAYERS
STREAMING_SHUFFLE_FRACTION STREAMING_SHUFFLE_SEED SPLIT_SALT NUM_TRAIN_TS START_TS METRIC_LOG_FREQ EVAL_INTERIM_LOG
MLPERF_TRAIN_LOSS_LOG_FREQ DIAG_UNIQUE_EMB OUTPUT_TRACE PERSISTENT_LOADER DOUBLE_BUFFER EVAL_EVERY_N_WINDOWS EVAL_EVERY_DATA_PCT
TRITON_HSTU_LAST_LAYER_TARGETS_ONLY TRITON_HSTU_TARGETS_ONLY_EVAL
SKIP_EVAL_EPOCH_PCT EVAL_HOLDOUT_TS EVAL_HOLDOUT_NUM_WINDOWS NUM_TRAIN_BATCHES NUM_EVAL_BATCHES DIE_AT_STEP IN_WINDOW_CKPT_FREQ
CKPT_STEP_FREQ CKPT_TIME_INTERVAL_S CKPT_PATH KEEP_LAST_N RUN_NAME TENSORBOARD_LOG_PATH AUC_THRESHOLD TRAIN_LIFETIME_AUC_MODE
EVAL_LIFETIME_AUC_MODE CUMULATIVE_AUC_BINS LIFETIME_AUC_WINDOW WINDOW_BARRIER_DEBUG HSTU_HAMMER_KERNEL INIT_CHECKSUM ALLOW_SPLIT_MISMATCH
MLPERF_LOGGING MLPERF_LOG_PATH MLPERF_SUBMISSION_PLATFORM TRITON_FULL_AUTOTUNE EMBEDDING_ROW_SCALE GPUS_PER_NODE NNODES NODE_RANK
""".split()


def test_every_name_of_the_reference_is_known():
    assert set(REFERENCE_NAMES) == KNOBS.keys() | FOREIGN_KNOBS.keys()
    assert not KNOBS.keys() & FOREIGN_KNOBS.keys()


def test_every_knob_names_a_setting_of_its_own():
    bindings = [knob.binding for knob in KNOBS.values()]
    assert len(set(bindings)) == len(bindings)
    assert set(bindings) <= setting_defaults().keys()
    for knob in KNOBS.values():
        assert knob.type in (int, float, bool, str) and isinstance(knob.default, knob.type), knob.name


@pytest.mark.parametrize("text", ["1", "true", "YES", " on ", "0", "False", "no", "OFF"])
def test_truth_values(text):
    expected = text.strip().lower() in ("1", "true", "yes", "on")
    assert knobs_from_environment({"MLPERF_LOGGING": text}) == {"MLPERF_LOGGING": expected}


def test_values_take_the_type_of_their_field():
    environment = {"BATCH_SIZE": "7", "DENSE_LR": "1e-4", "RUN_NAME": "7", "SEED": "-3"}
    values = knobs_from_environment(environment)
    assert values == {"BATCH_SIZE": 7, "DENSE_LR": 1e-4, "RUN_NAME": "7", "SEED": -3}
    assert {name: type(value) for name, value in values.items()} == {"BATCH_SIZE": int, "DENSE_LR": float, "RUN_NAME": str, "SEED": int}


@pytest.mark.parametrize("text", ["", " "])
def test_empty_counts_as_unset(text):
    assert knobs_from_environment(dict.fromkeys(KNOBS, text)) == {}
    assert check_foreign_knobs(dict.fromkeys(FOREIGN_KNOBS, text)) == []


@pytest.mark.parametrize(
    ("name", "text", "rule"),
    [
        ("BATCH_SIZE", "abc", "an integer"),
        ("BATCH_SIZE", "1.5", "an integer"),
        ("DENSE_LR", "fast", "a number"),
        ("MLPERF_LOGGING", "maybe", "one of 1, true, yes, on, 0, false, no, off"),
    ],
)
def test_malformed_value_names_variable_value_and_type(name, text, rule):
    with pytest.raises(ValueError, match=re.escape(f"environment variable {name}={text!r}: must be {rule}")):
        knobs_from_environment({name: text})


@pytest.mark.parametrize("name", sorted(FOREIGN_KNOBS))
def test_foreign_knob_is_refused_or_warned_of_and_its_off_values_pass(name):
    knob = FOREIGN_KNOBS[name]
    if knob.refused:
        with pytest.raises(ValueError, match=f"{name}='7' is not supported: {re.escape(knob.reason)}"):
            check_foreign_knobs({name: "7"})
    else:
        assert check_foreign_knobs({name: "7"}) == [f"environment variable {name}='7' has no effect: {knob.reason}"]
    for text in knob.off:
        assert check_foreign_knobs({name: text}) == []


@pytest.mark.parametrize(
    "name",
    ["CKPT_PATH", "CKPT_STEP_FREQ", "IN_WINDOW_CKPT_FREQ", "EVAL_EVERY_N_WINDOWS", "EMB_PLACEMENT", "DIE_AT_STEP", "EMBEDDING_ROW_SCALE"],
)
def test_knobs_whose_loss_would_change_a_run_are_refused(name):
    assert FOREIGN_KNOBS[name].refused


@pytest.mark.parametrize("name, like", [("BATCHSIZE", "BATCH_SIZE"), ("LR_WARUP_STEPS", "LR_WARMUP_STEPS")])
def test_near_miss_of_a_knob_is_an_error_and_other_variables_are_not(name, like):
    others = {"PATH": "/bin", "SEEDS": "1", "BATCH_SIZE": "64", "MLPERF_LOG_DIR": "x"}
    assert check_foreign_knobs(others) == []
    with pytest.raises(ValueError, match=f"{name}='64'.*did you mean {like}"):
        check_foreign_knobs(others | {name: "64"})


def test_tables_in_the_docs_are_the_registry():
    docs = (ROOT / "docs" / "knobs.md").read_text(encoding="utf-8")
    assert knobs.knob_table() in docs and knobs.foreign_knob_table() in docs
    readme = ROOT / "README.md"
    if readme.exists():
        text = readme.read_text(encoding="utf-8")
        assert knobs.renew_tables(text) == text, "run: python -m dlrm_hstu.knobs README.md docs/knobs.md"


def test_renewing_fills_both_blocks_and_leaves_the_rest(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("a\n<!-- knobs:begin -->\nold\n<!-- knobs:end -->\nb\n<!-- foreign-knobs:begin -->\n<!-- foreign-knobs:end -->\nc\n")
    knobs.main([str(page)])
    expected = f"a\n<!-- knobs:begin -->\n{knobs.knob_table()}\n<!-- knobs:end -->\nb\n<!-- foreign-knobs:begin -->\n"
    assert page.read_text() == expected + f"{knobs.foreign_knob_table()}\n<!-- foreign-knobs:end -->\nc\n"
    assert "| `BATCH_SIZE` | `TrainConfig.batch_size` | int | `1024` |" in knobs.knob_table()
