"""What a sample's score and its gradient may not depend on: who shares the batch, padding, ranks, how events are listed."""

from dataclasses import replace

import pytest
import torch

from dlrm_hstu.model import DlrmHSTU
from tests.batches import make_batch, random_samples, relative_error, small_config

LENGTHS = [7, 0, 23, 12, 1, 30]
DROPOUT = {"input_dropout": 0.3, "layer_dropout": 0.2, "attention_scale": "max_seq_len"}


def gradients(model, *batches, step: int = 0) -> dict[str, torch.Tensor]:
    """Mean over the batches' losses, as data-parallel ranks take it."""
    model.zero_grad()
    for batch in batches:
        (model(batch, step).loss / len(batches)).backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def assert_equal_gradients(actual: dict, expected: dict, tolerance: float = 1e-5) -> None:
    errors = {name: relative_error(actual[name], expected[name]) for name in expected}
    assert all(expected[name].any() for name in expected)
    assert max(errors.values()) < tolerance, max(errors.items(), key=lambda pair: pair[1])


@pytest.fixture(scope="module")
def samples():
    return random_samples(small_config(), LENGTHS, seed=4)


def test_score_is_the_same_in_any_batch_with_dropout(samples):
    model = DlrmHSTU(small_config(**DROPOUT), seed=3)
    first = model(make_batch(samples[:4]), step=5).logits
    second = model(make_batch([samples[5], samples[2], samples[4], samples[0]]), step=5).logits
    torch.testing.assert_close(second[[3, 1]], first[[0, 2]], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(model(make_batch(samples[2:3]), step=5).logits, first[2:3], rtol=1e-5, atol=1e-6)


def test_score_depends_on_the_samples_own_key(samples):
    """Guards the test above: another index, or another step, draws another mask."""
    model = DlrmHSTU(small_config(**DROPOUT), seed=3)
    first = model(make_batch(samples[2:3]), step=5).logits
    for batch, step in ((make_batch([replace(samples[2], index=9)]), 5), (make_batch(samples[2:3]), 6)):
        assert not torch.allclose(model(batch, step).logits, first, rtol=1e-3)


def test_batch_maximum_ties_a_score_to_its_batch(samples):
    """The benchmark's default: the longest sequence of the batch divides everyone's scores."""
    model = DlrmHSTU(small_config(), seed=3)
    assert not torch.allclose(model(make_batch(samples[:2])).logits, model(make_batch(samples[:3])).logits[:2], rtol=1e-4)


@pytest.mark.parametrize("scale", ["batch_max", "max_seq_len"])
def test_distinct_events_are_exact(samples, scale):
    """Listing every token as an event and an item of its own changes no output and no gradient, tables included."""
    model = DlrmHSTU(small_config(attention_scale=scale, input_dropout=0.2, layer_dropout=0.1), seed=3)
    merged, listed = make_batch(samples), make_batch(samples, merge=False)
    assert len(merged.event_item) < len(listed.event_item) == len(listed.token_event)
    assert len(merged.item_ids) < len(listed.item_ids) == len(listed.token_event) + len(listed.candidate_item)
    torch.testing.assert_close(model(listed).logits, model(merged).logits, rtol=1e-5, atol=1e-6)
    assert_equal_gradients(gradients(model, listed), gradients(model, merged))


def test_padding_adds_nothing(samples):
    model = DlrmHSTU(small_config(**DROPOUT), seed=3)
    padded = make_batch([*samples[:4], replace(samples[5], weight=0.0), replace(samples[4], weight=0.0)])
    assert padded.real_samples == 4 and padded.batch_size == 6
    plain, output = model(make_batch(samples[:4])), model(padded)
    torch.testing.assert_close(output.loss, plain.loss, rtol=1e-6, atol=0)
    assert output.weights.tolist() == [1, 1, 1, 1, 0, 0]
    assert_equal_gradients(gradients(model, padded), gradients(model, make_batch(samples[:4])))


def test_padding_gets_no_gradient_of_its_own(samples):
    """Table rows that only the padding sample reads stay without gradient."""
    model = DlrmHSTU(small_config(), seed=3)
    padding = replace(samples[1], contextual=samples[0].contextual + 1, weight=0.0)
    padding = replace(padding, contextual=padding.contextual % 40)
    gradient = gradients(model, make_batch([samples[0], padding]))["embeddings.collection.embeddings.uid.weight"]
    assert gradient[samples[0].contextual[0]].any() and not gradient[padding.contextual[0]].any()


def test_batch_of_padding_only_has_zero_loss(samples):
    model = DlrmHSTU(small_config(), seed=3)
    batch = make_batch([replace(sample, weight=0.0) for sample in samples[:2]], global_real_samples=3, world_size=2)
    output = model(batch)
    output.loss.backward()
    assert output.loss.item() == 0 and not any(parameter.grad.any() for parameter in model.parameters())


@pytest.mark.parametrize("split", [3, 2, 1])
def test_mean_over_unequal_ranks_is_the_mean_over_samples(samples, split):
    """Two ranks with `split` and 4 - `split` real samples, padded to equal size, against one rank with all four."""
    model = DlrmHSTU(small_config(**DROPOUT), seed=3)
    whole = make_batch(samples[:4])
    size = max(split, 4 - split)
    ranks = []
    for real in (samples[:split], samples[split:4]):
        padding = [replace(samples[5], weight=0.0)] * (size - len(real))
        ranks.append(make_batch([*real, *padding], global_real_samples=4, world_size=2))
    assert [batch.real_samples for batch in ranks] == [split, 4 - split]
    mean = sum(model(batch).loss for batch in ranks) / 2
    torch.testing.assert_close(mean, model(whole).loss, rtol=1e-6, atol=0)
    assert_equal_gradients(gradients(model, *ranks), gradients(model, whole))


def test_poison_in_one_history_stays_there(samples):
    """A NaN row of a table that one sample reads leaves the other scores as they are."""
    model = DlrmHSTU(small_config(**DROPOUT), seed=3).eval()
    batch = make_batch(samples)
    clean = model(batch).logits
    uids = [int(sample.contextual[0]) for sample in samples]
    assert uids.count(uids[2]) == 1
    with torch.no_grad():
        model.embeddings.collection.embeddings["uid"].weight[uids[2]] = torch.nan
    dirty = model(batch).logits
    others = [0, 1, 3, 4, 5]
    assert dirty[2].isnan() and torch.equal(dirty[others], clean[others])
