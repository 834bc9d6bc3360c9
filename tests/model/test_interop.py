"""Exchange with the reference's names: round trips and errors."""

import numpy as np
import pytest
import torch

from dlrm_hstu import interop
from dlrm_hstu.model import DlrmHSTU
from tests.batches import random_batch, small_config


@pytest.fixture(scope="module")
def model():
    return DlrmHSTU(small_config(), seed=1)


def reference_inputs() -> tuple[dict, dict, dict]:
    """Two samples with histories of 3 and 0 events."""
    uih = {
        "item_id": np.array([4, 5, 4]),
        "artist_id": np.array([1, 2, 1]),
        "album_id": np.array([7, 8, 7]),
        "action_weight": np.array([1, 2, 1]),
        "action_timestamp": np.array([10, 20, 10]),
        "uid": np.array([3, 9]),
    }
    lengths = {"item_id": np.array([3, 0])}
    candidate = {
        "item_candidate_id": np.array([5, 6]),
        "item_candidate_artist_id": np.array([2, 3]),
        "item_candidate_album_id": np.array([8, 9]),
        "item_query_time": np.array([30, 40]),
        "item_action_weight": np.array([1, 4]),
    }
    return uih, lengths, candidate


def test_state_round_trip(model):
    state = interop.reference_state(model)
    other = DlrmHSTU(small_config(), seed=2)
    before = interop.reference_state(other)
    interop.load_reference_state(other, state)
    after = interop.reference_state(other)
    assert len(state) == len(list(model.parameters()))
    assert all(np.array_equal(after[name], state[name]) for name in state)
    random = [name for name in state if state[name].ndim >= 2 and np.any(state[name])]
    assert len(random) > 20 and not any(np.array_equal(before[name], state[name]) for name in random)


def test_state_is_a_copy(model):
    state = interop.reference_state(model)
    name = next(iter(state))
    state[name][:] = np.nan
    assert not np.isnan(interop.reference_state(model)[name]).any()


def test_missing_surplus_and_shape_are_named(model):
    state = interop.reference_state(model)
    name = "_hstu_transducer._stu_module._stu_layers.1._uvqk_weight"
    with pytest.raises(ValueError, match=rf"missing \['{name}'\], surplus nothing"):
        interop.load_reference_state(model, {key: value for key, value in state.items() if key != name})
    with pytest.raises(ValueError, match=r"missing nothing, surplus \['no_such_weight'\]"):
        interop.load_reference_state(model, state | {"no_such_weight": np.zeros(3)})
    with pytest.raises(ValueError, match=rf"{name} has shape \(128, 32\), the model needs \(32, 128\)"):
        interop.load_reference_state(model, state | {name: state[name].T})


def test_gradients_leave_out_parameters_without_one():
    model = DlrmHSTU(small_config())
    assert interop.reference_gradients(model) == {}
    model.head.requires_grad_(False)
    model(random_batch(model.config, [3, 5])).loss.backward()
    gradients = interop.reference_gradients(model)
    assert not any(name.startswith("_multitask_module") for name in gradients)
    assert len(gradients) == len(list(model.parameters())) - len(list(model.head.parameters()))


def test_unknown_parameter_name_raises():
    with pytest.raises(KeyError, match="nonsense"):
        interop.reference_name("nonsense.weight")


def test_batch_merges_equal_events_and_items():
    batch = interop.batch_from_reference(*reference_inputs(), contextual_features=("uid",))
    assert batch.item_ids.tolist() == [4, 5, 6] and batch.artist_ids.tolist() == [1, 2, 3] and batch.album_ids.tolist() == [7, 8, 9]
    assert batch.event_time.shape == (2,)
    events = [(int(batch.item_ids[batch.event_item[e]]), int(batch.event_action[e]), int(batch.event_time[e])) for e in batch.token_event]
    assert events == [(4, 1, 10), (5, 2, 20), (4, 1, 10)]
    assert batch.item_ids[batch.candidate_item].tolist() == [5, 6]
    assert batch.history_lengths.tolist() == [3, 0] and batch.contextual_ids.tolist() == [[3, 9]]
    assert (batch.max_history_length, batch.max_num_candidates, batch.real_samples, batch.loss_share) == (3, 1, 2, 1.0)


def test_batch_without_contextual_features():
    uih, lengths, candidate = reference_inputs()
    batch = interop.batch_from_reference(uih, lengths, candidate, contextual_features=())
    assert batch.contextual_ids.shape == (0, 2) and batch.contextual_ids.dtype == torch.int32


def test_batch_errors_name_the_counts():
    uih, lengths, candidate = reference_inputs()
    with pytest.raises(ValueError, match="3 values, its lengths sum to 4"):
        interop.batch_from_reference(uih, {"item_id": np.array([3, 1])}, candidate, ("uid",))
    with pytest.raises(ValueError, match="2 candidates for 3 samples"):
        interop.batch_from_reference(uih, {"item_id": np.array([3, 0, 0])}, candidate, ("uid",))
    with pytest.raises(ValueError, match="uid has 1 values for 2 samples"):
        interop.batch_from_reference(uih | {"uid": np.array([3])}, lengths, candidate, ("uid",))
    with pytest.raises(ValueError, match="does not fit 32 bits"):
        interop.batch_from_reference(uih | {"uid": np.array([3, 2**31])}, lengths, candidate, ("uid",))
