"""Six training steps against values of the public MLPerf reference trainer: losses, norms, parameters and accumulators."""

from pathlib import Path

import numpy as np
import pytest
import torch

from dlrm_hstu import interop
from dlrm_hstu.config import ModelConfig, OptimizerConfig
from dlrm_hstu.model import DlrmHSTU
from dlrm_hstu.parallel.process_group import process_group
from dlrm_hstu.parallel.sharding import build_sharded_model, unwrap
from dlrm_hstu.training.optimizers import Optimizers

GOLDEN = Path(__file__).parents[1] / "golden"
TABLES = "_embedding_collection.embeddings."


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def ranks(request):
    with process_group(request.param) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def trained(ranks):
    """(golden step arrays, golden training arrays, losses, norms, rates, final dense parameters, final tables, accumulators)."""
    step, run = np.load(GOLDEN / "dlrm_hstu_tiny.npz"), np.load(GOLDEN / "train_tiny.npz")
    initial = {name.removeprefix("param/"): step[name] for name in step.files if name.startswith("param/")}
    config = ModelConfig(
        table_dim=16,
        embedding_dim=32,
        num_heads=2,
        attention_dim=16,
        hidden_dim=16,
        preprocessor_hidden_dim=24,
        input_dropout=0.0,
        layer_dropout=0.0,
        table_rows={name.split(".")[2]: array.shape[0] for name, array in initial.items() if name.startswith(TABLES)},
    )
    rate = float(run["meta/base_lr"])
    optimizer_config = OptimizerConfig(
        dense_lr=rate, sparse_lr=rate, warmup_steps=int(run["meta/warmup_steps"]), grad_clip_norm=float(run["meta/grad_clip_norm"])
    )
    plain = DlrmHSTU(config)
    interop.load_reference_state(plain, initial)
    model = build_sharded_model(config, optimizer_config, seed=0, device=ranks.device)
    dense = dict(unwrap(model).named_parameters())
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            if name.startswith("embeddings."):
                table_shard(model, name).copy_(parameter)
            else:
                dense[name].copy_(parameter)
    batch = interop.batch_from_reference(*(group(step, f"in/{part}/") for part in ("uih", "uih_lengths", "candidate"))).to(ranks.device)

    optimizers = Optimizers(model, optimizer_config)
    losses, norms, rates = [], [], []
    for index in range(len(run["out/losses"])):
        optimizers.set_learning_rate(index)
        optimizers.zero_grad()
        loss = model(batch, index).loss
        loss.backward()
        norms.append(optimizers.step(index).item())
        losses.append(loss.item())
        rates.append(optimizers.learning_rate)
    final = {interop.reference_name(name): parameter.detach().cpu().numpy() for name, parameter in optimizers.dense_parameters.items()}
    tables = {
        interop.reference_name(name): table_shard(model, name).cpu().numpy()
        for name, _ in plain.named_parameters()
        if "embeddings." in name
    }
    states = model.fused_optimizer.state_dict()["state"]
    accumulators = {
        interop.reference_name(name): next(iter(state.values())).local_shards()[0].tensor.cpu().numpy().ravel()
        for name, state in states.items()
    }
    return step, run, losses, norms, rates, final, tables, accumulators


def table_shard(model, name):
    """The only shard of a table on one rank."""
    return unwrap(model).embeddings.collection.state_dict()[name.removeprefix("embeddings.collection.")].local_shards()[0].tensor


def group(arrays, prefix):
    return {name.removeprefix(prefix): arrays[name] for name in arrays.files if name.startswith(prefix)}


def test_losses_norms_and_rates(trained):
    _, run, losses, norms, rates, *_ = trained
    np.testing.assert_allclose(losses, run["out/losses"], rtol=1e-4)
    np.testing.assert_allclose(norms, run["out/dense_grad_norms"], rtol=1e-4)
    np.testing.assert_allclose(rates, run["out/lrs"], rtol=1e-12)


def test_clipping_was_put_to_the_test(trained):
    assert max(trained[3]) > 1.0 > min(trained[3])


def test_parameters_move_as_the_reference_moves_them(trained):
    step, run, _, _, _, final, tables, _ = trained
    for name, expected in group(run, "final/").items():
        initial = step[f"param/{name}"]
        actual = {**final, **tables}[name]
        change = np.abs(expected - initial).max()
        assert change > 0, name
        assert np.abs(actual - expected).max() <= 1e-3 * change, name


def test_touched_rows_of_the_encoders(trained):
    _, run, _, _, _, final, *_ = trained
    for name, rows in group(run, "rows/").items():
        expected = run[f"final_rows/{name}"]
        scale = np.abs(expected - trained[0][f"param/{name}"][rows]).max()
        assert np.abs(final[name][rows] - expected).max() <= 1e-3 * scale, name


def test_accumulators(trained):
    _, run, *_, accumulators = trained
    expected = group(run, "accumulator/")
    assert accumulators.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_allclose(accumulators[name], values, rtol=1e-3, atol=1e-3 * values.max(), err_msg=name)


def test_untouched_table_rows_stay(trained):
    step, run, *_, tables, accumulators = trained
    for name, accumulator in accumulators.items():
        untouched = accumulator == 0
        np.testing.assert_array_equal(tables[name][untouched], step[f"param/{name}"][untouched], err_msg=name)
