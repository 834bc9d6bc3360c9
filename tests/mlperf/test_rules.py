import subprocess
import sys
from dataclasses import asdict, fields
from pathlib import Path

import pytest

from data.history import HistoryConfig
from data.index import IndexConfig
from data.loader import StreamConfig
from dlrm_hstu.config import EvalConfig, ModelConfig, OptimizerConfig
from dlrm_hstu.mlperf import rules
from dlrm_hstu.training.schedule import eval_interval_steps, first_eval_samples

DOCS = Path(__file__).parents[2] / "docs" / "mlperf.md"


@pytest.fixture
def values(facts):
    parts = (ModelConfig(), facts, HistoryConfig(), IndexConfig(), StreamConfig())
    return {name: value for part in parts for name, value in asdict(part).items()} | {"seed_was_drawn": True}


def test_the_benchmark_itself_does_not_deviate(values):
    assert rules.closed_deviations(values) == []


@pytest.mark.parametrize("name", [name for name, pinned in rules.PINNED.items() if isinstance(pinned, (int, float))])
def test_each_pinned_number_is_checked(values, name):
    values[name] += 1
    (line,) = rules.closed_deviations(values)
    assert name in line and str(values[name]) in line and str(rules.PINNED[name]) in line


@pytest.mark.parametrize(
    "name, other", [("opt_name", "adam"), ("opt_sparse_name", "SGD"), ("strategy", "last_n"), ("attention_scale", "max_seq_len")]
)
def test_each_pinned_name_is_checked(values, name, other):
    (line,) = rules.closed_deviations({**values, name: other})
    assert name in line and other in line


def test_a_seed_of_ones_own_is_named(values):
    (line,) = rules.closed_deviations(values | {"seed_was_drawn": False})
    assert "SEED" in line


def at_batch(values, global_batch, dense, sparse):
    interval, first = rules.eval_grid(global_batch)
    grid = {"global_batch_size": global_batch, "eval_interval_samples": interval, "first_eval_samples": first}
    return {**values, **grid, "opt_base_learning_rate": dense, "opt_sparse_base_learning_rate": sparse}


@pytest.mark.parametrize("rate", [1e-6 * (1 - 5e-10), 1e-6, 2e-6, 3e-6, 3e-6 * (1 + 5e-10)])  # the checker's tolerance is 1e-9
def test_learning_rates_in_the_band_pass(values, rate):
    assert rules.closed_deviations(at_batch(values, 16384, rate, rate)) == []


@pytest.mark.parametrize("rate", [0.999e-6, 3.001e-6, 4e-6, 0.0])
def test_a_learning_rate_outside_the_band_is_named_with_the_band(values, rate):
    (line,) = rules.closed_deviations(at_batch(values, 16384, rate, rate))
    assert f"{rate:g}" in line and "16384" in line and "1e-06 to 3e-06" in line


def test_the_sparse_rate_must_equal_the_dense_one(values):
    (line,) = rules.closed_deviations(at_batch(values, 16384, 2e-6, 2.1e-6))
    assert "2.1e-06" in line and "2e-06" in line


@pytest.mark.parametrize("name", ["eval_interval_samples", "first_eval_samples"])
def test_another_evaluation_grid_is_named(values, name):
    (line,) = rules.closed_deviations({**values, name: 8192})
    assert name in line and "8192" in line


def test_a_missing_value_is_no_pass(values):
    del values["num_layers"]
    with pytest.raises(KeyError, match="num_layers"):
        rules.closed_deviations(values)


def test_the_reference_rate_lies_in_its_band_and_scales_with_the_batch():
    assert rules.reference_learning_rate(8192) == 1e-6
    assert rules.reference_learning_rate(32768) == 4e-6
    assert rules.learning_rate_band(16384) == (1e-6, 3e-6)


def test_the_configuration_defaults_are_the_rules():
    optimizer, model = OptimizerConfig(), ModelConfig()
    assert EvalConfig().auc_threshold == rules.TARGET_AUC == 0.75
    assert EvalConfig().every_data_pct == rules.PINNED["eval_every_data_pct"]
    assert EvalConfig().skip_epoch_pct < 0 and EvalConfig().num_batches == 0
    assert model.max_seq_len == rules.MAX_SEQUENCE_LENGTH
    assert {name: getattr(model, name) for name in rules.PINNED if hasattr(model, name)} == {
        f.name: rules.PINNED[f.name] for f in fields(model) if f.name in rules.PINNED
    }
    assert (optimizer.beta_1, optimizer.beta_2, optimizer.epsilon) == (0.95, 0.999, 1e-8)
    assert (optimizer.weight_decay, optimizer.grad_clip_norm) == (0.0, 1.0)
    assert (optimizer.warmup_steps, optimizer.warmup_start_lr) == (24000, 0.0)


def test_the_page_names_the_same_benchmark_target_and_schedule():
    text = DOCS.read_text()
    assert "`dlrmv4`" in text and "`dlrm_v4_hstu`" in text and "AUC >= 0.75" in text
    assert f"{rules.TRAIN_SAMPLES:,}" in text and f"{rules.EVAL_SAMPLES:,}" in text
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("| ")]
    schedule = [row for row in rows if len(row) == 8 and row[0].replace(",", "").isdigit()]
    assert len(schedule) == 8
    for row in schedule:
        batch, steps, interval, first, step, rate, low, high = (float(cell.replace(",", "")) for cell in row)
        assert steps == eval_interval_steps(rules.TRAIN_SAMPLES, int(batch)) and interval == steps * batch
        assert first == first_eval_samples(int(batch), rules.TRAIN_SAMPLES) == step * batch
        assert rate == pytest.approx(rules.reference_learning_rate(int(batch)), rel=1e-12)
        assert (low, high) == pytest.approx(rules.learning_rate_band(int(batch)), rel=1e-12)


def test_the_package_imports_no_torch():
    code = "import sys, dlrm_hstu.mlperf.log, dlrm_hstu.mlperf.rules, dlrm_hstu.training.schedule; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=DOCS.parents[1])
