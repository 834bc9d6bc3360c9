"""Initial weights: their distributions, and that they are a function of (seed, name, row, column) alone."""

import math

import pytest
import torch

from dlrm_hstu import initialize
from dlrm_hstu.config import ModelConfig
from dlrm_hstu.initialize import fill_table_shard
from dlrm_hstu.model import DlrmHSTU
from tests.batches import small_config

ROWS, COLUMNS = 1000, 16
PREPROCESSOR_MLPS = ("preprocessor.content", "preprocessor.additional", "preprocessor.action")
XAVIER_NORMAL = [f"{mlp}.{part}.weight" for mlp in PREPROCESSOR_MLPS for part in ("inner", "outer")] + [
    "postprocessor.time_combiner.weight"
]
XAVIER_UNIFORM = [f"transducer.layers.{i}.{part}" for i in range(3) for part in ("uvqk_weight", "output_weight")]
XAVIER_UNIFORM += [f"{tower}.{part}.weight" for tower in ("item_tower", "head") for part in ("inner", "outer")]


@pytest.fixture(scope="module")
def benchmark_parameters():
    """Dense parameters by name at the benchmark's shape."""
    model = DlrmHSTU(ModelConfig(), seed=3, table_device="meta")
    return {name: parameter.detach() for name, parameter in model.named_parameters() if not name.startswith("embeddings.")}


def table(rows=ROWS, columns=COLUMNS, *, seed=1, name="uid", **first) -> torch.Tensor:
    shard = torch.full((rows, columns), torch.nan)
    fill_table_shard(shard, seed, name, ROWS, **first)
    return shard


def is_uniform(values: torch.Tensor, bound: float) -> bool:
    """Within +-bound, reaching out to it, with a uniform's deviation."""
    tolerance = 4 / math.sqrt(values.numel())
    reach = 1 - 20 / values.numel()
    std_fits = abs(values.std().item() / (bound / math.sqrt(3)) - 1) < tolerance
    mean_fits = abs(values.mean().item()) < tolerance * bound
    return std_fits and mean_fits and bound * reach <= values.abs().max().item() <= bound * (1 + 1e-6)


def is_normal(values: torch.Tensor, std: float) -> bool:
    """A normal's deviation, and its 68.3 and 95.4 percent."""
    tolerance = 4 / math.sqrt(values.numel())
    within = [(values.abs() < k * std).float().mean().item() for k in (1, 2)]
    shape_fits = abs(within[0] - 0.6827) < tolerance and abs(within[1] - 0.9545) < tolerance
    return shape_fits and abs(values.std().item() / std - 1) < tolerance and abs(values.mean().item()) < tolerance * std


def test_count_of_dense_parameters(benchmark_parameters):
    assert sum(parameter.numel() for parameter in benchmark_parameters.values()) == 15_243_057


def test_whole_model_builds_on_the_meta_device():
    model = DlrmHSTU(ModelConfig(), device="meta")
    assert all(parameter.is_meta for parameter in model.parameters())
    tables = [parameter for name, parameter in model.named_parameters() if name.startswith("embeddings.")]
    assert sum(parameter.numel() for parameter in tables) == 293_051_712 * 512
    assert sum(parameter.numel() for parameter in model.parameters()) == 293_051_712 * 512 + 15_243_057


@pytest.mark.parametrize("name", XAVIER_NORMAL)
def test_xavier_normal(benchmark_parameters, name):
    weight = benchmark_parameters[name]
    assert is_normal(weight, math.sqrt(2 / sum(weight.shape)))


@pytest.mark.parametrize("name", XAVIER_UNIFORM)
def test_xavier_uniform(benchmark_parameters, name):
    weight = benchmark_parameters[name]
    assert is_uniform(weight, math.sqrt(6 / sum(weight.shape)))


def test_other_dense_weights(benchmark_parameters):
    assert is_normal(benchmark_parameters["preprocessor.contextual_weight"], math.sqrt(2 / 1024))
    assert is_uniform(benchmark_parameters["transducer.position_table"], math.sqrt(1 / 8192))
    assert is_uniform(benchmark_parameters["transducer.time_table"], math.sqrt(1 / 2048))


@pytest.mark.parametrize("name", ["action_table", "target_action"])
def test_action_rows(name):
    """At a width that shows the deviation; the benchmark's 24 numbers do not."""
    assert is_normal(getattr(DlrmHSTU(small_config(action_dim=2048)).preprocessor, name).detach(), 0.1)


def test_biases_are_zero_and_norm_weights_one(benchmark_parameters):
    biases = {name: parameter for name, parameter in benchmark_parameters.items() if name.endswith("bias")}
    norms = {name: parameter for name, parameter in benchmark_parameters.items() if name.endswith(("norm.weight", "gate.weight"))}
    assert len(biases) == 31 and len(norms) == 16
    assert [name for name, parameter in biases.items() if parameter.any()] == []
    assert [name for name, parameter in norms.items() if not (parameter == 1).all()] == []


def test_every_dense_weight_is_covered_by_a_check(benchmark_parameters):
    checked = {*XAVIER_NORMAL, *XAVIER_UNIFORM, "preprocessor.contextual_weight", "preprocessor.action_table", "preprocessor.target_action"}
    checked |= {"transducer.position_table", "transducer.time_table"}
    rest = {name for name in benchmark_parameters if not name.endswith(("bias", "norm.weight", "gate.weight"))}
    assert rest == checked


def test_weights_depend_on_the_seed_alone():
    """Not on torch's global generator, nor on where the tables are."""
    torch.manual_seed(0)
    first = dict(DlrmHSTU(small_config(), seed=1).named_parameters())
    torch.manual_seed(1)
    again = dict(DlrmHSTU(small_config(), seed=1).named_parameters())
    without_tables = dict(DlrmHSTU(small_config(), seed=1, table_device="meta").named_parameters())
    other = dict(DlrmHSTU(small_config(), seed=2).named_parameters())
    assert [name for name in first if not torch.equal(first[name], again[name])] == []
    dense = [name for name in first if not name.startswith("embeddings.")]
    assert [name for name in dense if not torch.equal(first[name], without_tables[name])] == []
    random = [name for name in first if first[name].dim() >= 2 and first[name].any()]
    assert len(random) > 20 and [name for name in random if torch.equal(first[name], other[name])] == []


def test_equal_shapes_get_different_weights():
    layers = DlrmHSTU(small_config()).transducer.layers
    assert not torch.equal(layers[0].uvqk_weight, layers[1].uvqk_weight)


def test_model_tables_are_the_shards_function():
    model = DlrmHSTU(small_config(), seed=7)
    for name, rows in model.config.table_rows.items():
        whole = torch.empty(rows, 16)
        fill_table_shard(whole, 7, name, rows)
        assert torch.equal(model.embeddings.collection.embeddings[name].weight, whole)


def test_table_is_independent_of_the_sharding_plan():
    whole = table()
    assert torch.equal(torch.cat([table(n, first_row=start) for start, n in ((0, 333), (333, 1), (334, 666))]), whole)
    assert torch.equal(torch.cat([table(columns=n, first_column=start) for start, n in ((0, 4), (4, 12))], dim=1), whole)
    assert torch.equal(table(10, 3, first_row=500, first_column=8), whole[500:510, 8:11])


def test_table_is_independent_of_the_chunk_size(monkeypatch):
    whole = table()
    monkeypatch.setattr(initialize, "_CHUNK_ELEMENTS", 7 * COLUMNS)
    assert torch.equal(table(), whole)


def test_shard_without_rows():
    assert table(0, first_row=ROWS).shape == (0, COLUMNS)


def test_table_is_uniform_and_no_row_repeats():
    values = table()
    assert is_uniform(values, ROWS**-0.5)
    counts = torch.histc(values, bins=32, min=-(ROWS**-0.5), max=ROWS**-0.5)
    expected = values.numel() / 32
    assert ((counts - expected) ** 2 / expected).sum() < 31 + 5 * math.sqrt(2 * 31)
    assert len(torch.unique(values, dim=0)) == ROWS
    assert len(torch.unique(values)) > 0.99 * values.numel()


@pytest.mark.parametrize("other", [{"seed": 2}, {"seed": -1}, {"name": "user_x_hour"}])
def test_seeds_and_tables_are_independent(other):
    pair = torch.stack([table().flatten(), table(**other).flatten()])
    assert abs(torch.corrcoef(pair)[0, 1]) < 4 / math.sqrt(ROWS * COLUMNS)


def test_far_rows_of_a_large_table():
    """Row numbers past 2^31 elements and past 2^31 rows are rows of their own."""
    shards = [torch.empty(4, 8) for _ in range(3)]
    for shard, first in zip(shards, (0, 100_000_000, 2**32), strict=True):
        fill_table_shard(shard, 1, "user_x_artist", 100_000_000, first_row=first)
    assert len(torch.unique(torch.cat(shards), dim=0)) == 12
