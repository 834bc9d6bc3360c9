"""Tokens of the preprocessor against the formula, one token at a time and from its own event."""

import pytest
import torch

from dlrm_hstu.modules.embeddings import Embeddings
from dlrm_hstu.modules.layout import sequence_layout
from dlrm_hstu.modules.preprocessor import Preprocessor
from tests.batches import make_batch, random_samples, relative_error, small_config


def build(config) -> tuple[Embeddings, Preprocessor]:
    torch.manual_seed(0)
    embeddings, preprocessor = Embeddings(config, torch.device("cpu")), Preprocessor(config)
    with torch.no_grad():
        for parameter in [*embeddings.parameters(), *preprocessor.parameters()]:
            parameter.normal_()
    return embeddings, preprocessor


def tokens_of(sample, config, embeddings, preprocessor) -> list[torch.Tensor]:
    """z of one sample's tokens: contextual, history, candidates."""

    def look_up(table: str, index: int) -> torch.Tensor:
        return embeddings.collection.embeddings[table].weight[index]

    def z(event, action: torch.Tensor) -> torch.Tensor:
        item, artist, album = (look_up(table, int(i)) for table, i in zip(("item_id", "artist_id", "album_id"), event[:3], strict=True))
        additional = preprocessor.additional(torch.cat([artist, album])[None])
        return (preprocessor.content(item[None]) + additional + preprocessor.action(action[None]))[0]

    def action_of(bits: int) -> torch.Tensor:
        return torch.cat([row * bool(bits & bit) for row, bit in zip(preprocessor.action_table, (1, 2, 4), strict=True)])

    contextual = [
        look_up(name, int(sample.contextual[c])) @ preprocessor.contextual_weight[c] + preprocessor.contextual_bias[c]
        for c, name in enumerate(config.contextual_features)
    ]
    history = [z(event, action_of(int(event[3]))) for event in sample.history]
    return contextual + history + [z(event, preprocessor.target_action[0]) for event in sample.candidates]


@pytest.mark.parametrize("num_contextual", [0, 3, 8])
@pytest.mark.parametrize("merge", [True, False])
def test_every_token_equals_the_formula(num_contextual, merge):
    config = small_config(contextual_features=small_config().contextual_features[:num_contextual])
    embeddings, preprocessor = build(config)
    samples = random_samples(config, [6, 0, 9, 4], num_candidates=[1, 2, 1, 3])
    batch = make_batch(samples, merge=merge)
    z = preprocessor(embeddings(batch), batch, sequence_layout(batch, num_contextual), torch.float32)
    expected = torch.stack([token for sample in samples for token in tokens_of(sample, config, embeddings, preprocessor)])
    assert {int(event[3]) for sample in samples for event in sample.history} >= {0, 3, 7}
    assert relative_error(z.detach(), expected.detach()) < 1e-6


def test_label_of_the_candidate_never_enters():
    config = small_config()
    embeddings, preprocessor = build(config)
    samples = random_samples(config, [6, 3])
    batch = make_batch(samples)
    layout = sequence_layout(batch, 8)
    first = preprocessor(embeddings(batch), batch, layout, torch.float32)
    batch.candidate_action.bitwise_xor_(7)
    assert torch.equal(first, preprocessor(embeddings(batch), batch, layout, torch.float32))


def test_lookups_are_fp32_and_one_a_distinct_row():
    config = small_config()
    embeddings, _ = build(config)
    batch = make_batch(random_samples(config, [6, 3, 8]))
    rows = embeddings(batch)
    assert rows.item.shape == rows.artist.shape == rows.album.shape == (len(batch.item_ids), 16)
    assert len(batch.item_ids) < len(batch.token_event) + len(batch.candidate_item)
    assert rows.contextual.shape == (8, 3, 16)
    for name, ids in (("item", batch.item_ids), ("artist", batch.artist_ids), ("album", batch.album_ids)):
        assert getattr(rows, name).dtype == torch.float32
        assert torch.equal(getattr(rows, name), embeddings.collection.embeddings[f"{name}_id"].weight[ids.long()])
