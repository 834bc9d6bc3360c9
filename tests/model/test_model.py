"""The model as a whole: order of settings, precision, empty histories, widths, and that it learns."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from dlrm_hstu import interop
from dlrm_hstu.batch import LIKE, LISTEN_PLUS
from dlrm_hstu.model import DlrmHSTU
from tests.batches import make_batch, random_batch, random_samples, relative_error, small_config
from tests.model.test_golden import golden_batch, golden_config, golden_model, section

LN_2 = math.log(2)


def backward(model, batch):
    output = model(batch)
    output.loss.backward()
    return output


def test_order_of_tables_and_features_does_not_matter():
    """Weights and inputs go by name; history lengths come from the item ids, whatever key is first."""
    expected = golden_model()(golden_batch()).logits
    config = golden_config()
    model = DlrmHSTU(replace(config, table_rows=dict(reversed(config.table_rows.items()))), seed=1)
    interop.load_reference_state(model, dict(reversed(section("param/").items())))
    inputs = [dict(reversed(section(prefix).items())) for prefix in ("in/uih/", "in/uih_lengths/", "in/candidate/")]
    assert next(iter(inputs[1])) != next(iter(section("in/uih_lengths/")))
    assert torch.equal(model(interop.batch_from_reference(*inputs)).logits, expected)


def test_order_of_tables_does_not_matter_to_fresh_rows():
    config = small_config()
    permuted = replace(config, table_rows=dict(reversed(config.table_rows.items())))
    first, second = (dict(DlrmHSTU(c, seed=1).embeddings.named_parameters()) for c in (config, permuted))
    assert [name for name in first if not torch.equal(first[name], second[name])] == []


def test_bfloat16_step_stays_near_fp32_and_keeps_fp32_where_due():
    wide = backward(golden_model(), golden_batch())
    model = golden_model(dtype="bfloat16")
    dtypes = {}
    model.transducer.layers[0].register_forward_hook(lambda module, inputs, output: dtypes.update(layer=output.dtype))
    model.item_tower.register_forward_hook(lambda module, inputs, output: dtypes.update(item=output.dtype))
    model.head.register_forward_pre_hook(lambda module, inputs: dtypes.update(user=inputs[0].dtype))
    output = backward(model, golden_batch())
    assert dtypes == {"layer": torch.bfloat16, "item": torch.float32, "user": torch.float32}
    for name in ("loss", "logits", "predictions", "labels", "weights"):
        assert getattr(output, name).dtype == torch.float32, name
    assert torch.equal(output.labels, wide.labels)
    assert 0 < abs(output.loss.item() - wide.loss.item()) < 1e-2 * wide.loss.item()
    for name, parameter in model.named_parameters():
        assert parameter.dtype == parameter.grad.dtype == torch.float32, name
        assert parameter.grad.isfinite().all(), name


def test_bfloat16_gradients_point_where_fp32_ones_do():
    models = [golden_model(dtype=dtype) for dtype in ("float32", "bfloat16")]
    for model in models:
        backward(model, golden_batch())
    pairs = zip(*(model.named_parameters() for model in models), strict=True)
    cosines = {name: torch.cosine_similarity(a.grad.flatten(), b.grad.flatten(), dim=0).item() for (name, a), (_, b) in pairs}
    assert min(cosines.values()) > 0.98, min(cosines.items(), key=lambda pair: pair[1])


def test_bfloat16_leaves_tables_and_lookups_fp32():
    model = DlrmHSTU(small_config(dtype="bfloat16"))
    embedded = model.embeddings(random_batch(model.config, [3, 5]))
    assert {weight.dtype for weight in model.embeddings.parameters()} == {torch.float32}
    assert {getattr(embedded, name).dtype for name in ("item", "artist", "album", "contextual")} == {torch.float32}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("num_contextual", [8, 0])
@pytest.mark.parametrize("size", [1, 4])
def test_all_histories_empty(dtype, num_contextual, size):
    features = small_config().contextual_features[:num_contextual]
    model = DlrmHSTU(small_config(dtype=dtype, contextual_features=features, input_dropout=0.2, layer_dropout=0.1))
    batch = random_batch(model.config, [0] * size)
    assert len(batch.token_event) == len(batch.event_item) == 0
    output = backward(model, batch)
    assert output.logits.isfinite().all() and output.loss.isfinite()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


@pytest.mark.parametrize("action", [0, LISTEN_PLUS, 7 - LIKE])
def test_no_likes_in_any_history(action):
    model = DlrmHSTU(small_config())
    samples = random_samples(model.config, [5, 0, 9])
    for sample in samples:
        sample.history[:, 3] = action
        sample.candidates[:, 3] = 0
    output = backward(model, make_batch(samples))
    assert output.loss.isfinite() and not output.labels.any()
    assert not model.preprocessor.action_table.grad[1].any()
    assert model.preprocessor.action_table.grad[0].any() == bool(action & LISTEN_PLUS)


def test_labels_are_the_listen_bit_and_loss_is_the_weighted_mean():
    model = DlrmHSTU(small_config(loss_weight=0.3))
    samples = random_samples(model.config, [5, 0, 9, 3, 4, 8, 2, 1])
    for bits, sample in enumerate(samples):
        sample.candidates[:, 3] = bits
    output = model(make_batch(samples))
    labels = [float(bits % 2) for bits in range(8)]
    p = output.predictions.detach().double()
    assert output.labels.tolist() == labels
    terms = [-math.log(value) if label else -math.log(1 - value) for value, label in zip(p.tolist(), labels, strict=True)]
    assert output.loss.item() == pytest.approx(0.3 * sum(terms) / 8, rel=1e-6)
    assert torch.equal(output.predictions, torch.sigmoid(output.logits))


def test_untrained_loss_is_near_the_coins():
    model = DlrmHSTU(small_config())
    loss = model(random_batch(model.config, [8] * 64)).loss.item()
    assert loss == pytest.approx(0.2 * LN_2, rel=0.15)


def test_several_candidates_are_scored_as_if_each_were_alone():
    """Candidates do not see each other; with a fixed divisor only the other one's presence differs."""
    model = DlrmHSTU(small_config(attention_scale="max_seq_len"))
    (sample,) = random_samples(model.config, [9], num_candidates=3)
    together = model(make_batch([sample])).logits
    alone = [model(make_batch([replace(sample, candidates=sample.candidates[i : i + 1])])).logits for i in range(3)]
    assert relative_error(together.detach(), torch.cat(alone).detach()) < 1e-5


def test_no_width_is_hard_coded():
    width = 32
    features = ("uid", "user_x_hour")
    config = small_config(
        table_dim=width,
        embedding_dim=width,
        num_heads=1,
        attention_dim=width,
        hidden_dim=width,
        preprocessor_hidden_dim=width,
        item_hidden_dim=width,
        head_hidden_dim=width,
        action_dim=width,
        contextual_features=features,
    )
    model = DlrmHSTU(config)
    sizes = {size for parameter in model.parameters() for size in parameter.shape}
    assert not sizes & {256, 512}
    multiples = {1, 2, 3, *(width * k for k in (1, 2, 3, 4))}
    dense = {size for name, p in model.named_parameters() if not name.startswith("embeddings.") for size in p.shape}
    assert dense <= multiples | {width + 4, config.position_buckets, config.time_buckets + 1}
    assert model(random_batch(config, [3, 5])).loss.isfinite()


def test_overfits_a_rule_on_the_last_item():
    """100 users, label = a function of the last history item alone: the loss falls far below a coin's and every layer moves."""
    config = small_config(contextual_features=("uid",))
    rng = np.random.default_rng(0)
    samples = random_samples(config, rng.integers(1, 9, size=100), seed=1)
    for sample in samples:
        sample.candidates[:, 3] = sample.history[-1, 0] % 3 == 0
    batch, model = make_batch(samples), DlrmHSTU(config, seed=2)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for step in range(200):
        optimizer.zero_grad()
        output = backward(model, batch)
        if step == 0:
            first_loss = output.loss.item()
            assert [name for name, parameter in model.named_parameters() if not parameter.grad.any()] == []
        optimizer.step()
    positive, negative = (output.logits[output.labels == label].detach() for label in (1, 0))
    assert len(positive) > 20 and len(negative) > 20
    auc = (positive[:, None] > negative).double().mean()
    assert first_loss > 0.8 * 0.2 * LN_2
    assert output.loss.item() < 0.25 * 0.2 * LN_2 and auc > 0.9
