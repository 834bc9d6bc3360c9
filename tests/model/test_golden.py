"""One training step against values of the public MLPerf reference trainer: all intermediates, the loss and every gradient."""

from pathlib import Path

import numpy as np
import pytest

from dlrm_hstu import interop
from dlrm_hstu.batch import Batch
from dlrm_hstu.config import ModelConfig
from dlrm_hstu.model import DlrmHSTU
from dlrm_hstu.modules.layout import sequence_layout
from tests.batches import relative_error

GOLDEN = np.load(Path(__file__).parents[1] / "golden" / "dlrm_hstu_tiny.npz")
TOLERANCE = 1e-5  # relative to the tensor's own scale


def section(prefix: str) -> dict[str, np.ndarray]:
    return {name.removeprefix(prefix): GOLDEN[name] for name in GOLDEN.files if name.startswith(prefix)}


def golden_config(**changes) -> ModelConfig:
    rows = {name.split(".")[-2]: array.shape[0] for name, array in section("param/").items() if name.startswith("_embedding")}
    settings = dict(
        table_dim=16,
        embedding_dim=32,
        num_heads=2,
        attention_dim=16,
        hidden_dim=16,
        num_layers=3,
        preprocessor_hidden_dim=24,
        max_seq_len=64,
        input_dropout=0.0,
        layer_dropout=0.0,
        table_rows=rows,
    )
    return ModelConfig(**(settings | changes))


def golden_model(**changes) -> DlrmHSTU:
    model = DlrmHSTU(golden_config(**changes), seed=5)
    interop.load_reference_state(model, section("param/"))
    return model


def golden_batch() -> Batch:
    return interop.batch_from_reference(section("in/uih/"), section("in/uih_lengths/"), section("in/candidate/"))


@pytest.fixture(scope="module")
def step():
    """(values by golden name, gradients by reference name) of one forward and backward."""
    model, batch, values = golden_model(), golden_batch(), {}
    model.preprocessor.register_forward_hook(lambda module, inputs, output: values.update({"act/preprocessor": output}))
    model.transducer.layers[0].register_forward_pre_hook(lambda module, inputs: values.update({"act/positional_encoder": inputs[0]}))
    for i, layer in enumerate(model.transducer.layers):
        layer.register_forward_hook(lambda module, inputs, output, i=i: values.update({f"act/stu_layer_{i}": output}))
    towers = ("act/candidate_user_embeddings", "act/candidate_item_embeddings")
    model.head.register_forward_pre_hook(lambda module, inputs: values.update(zip(towers, inputs, strict=True)))
    output = model(batch)
    output.loss.backward()
    values |= {"out/loss": output.loss, "out/preds": output.predictions[None], "out/labels": output.labels[None]}
    return {name: value.detach().numpy() for name, value in values.items()}, interop.reference_gradients(model)


FLOATS = [name for name in GOLDEN.files if name.startswith(("act/", "out/")) and GOLDEN[name].dtype == np.float32]


def test_every_float_of_the_golden_step_is_compared():
    assert len(FLOATS) == 10


@pytest.mark.parametrize("name", FLOATS)
def test_forward(step, name):
    assert relative_error(step[0][name], GOLDEN[name]) < TOLERANCE


@pytest.mark.parametrize("name", section("grad/"))
def test_gradient(step, name):
    assert np.abs(GOLDEN[f"grad/{name}"]).max() > 0
    assert relative_error(step[1][name], GOLDEN[f"grad/{name}"]) < TOLERANCE


def test_no_gradient_is_missing_or_surplus(step):
    assert step[1].keys() == section("grad/").keys()


def test_layout():
    layout = sequence_layout(golden_batch(), num_contextual=8)
    offsets, timestamps = GOLDEN["act/seq_offsets"], GOLDEN["act/seq_timestamps"]
    query_time = np.repeat(timestamps[offsets[1:] - 1], np.diff(offsets))
    np.testing.assert_array_equal(layout.offsets.numpy(), offsets)
    np.testing.assert_array_equal(layout.age.numpy(), query_time - timestamps)
    np.testing.assert_array_equal(layout.candidate_rows.numpy(), offsets[1:] - 1)
    assert layout.max_length == GOLDEN["act/max_seq_len"]


def test_scores_are_divided_by_the_batch_maximum_and_not_by_the_budget():
    """The golden step tells the two apart: with max_seq_len as divisor the first layer differs."""
    values, model = {}, golden_model(attention_scale="max_seq_len")
    model.transducer.layers[0].register_forward_hook(lambda module, inputs, output: values.update(out=output.detach().numpy()))
    model(golden_batch())
    assert relative_error(values["out"], GOLDEN["act/stu_layer_0"]) > 1e-3
