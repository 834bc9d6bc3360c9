"""The public MLPerf trainer's results on a small data set, field by field."""

import numpy as np
import pytest

from data.history import HistoryConfig
from data.index import user_hash
from data.loader import YambdaDataset

HISTORY_FEATURES = 15


def test_split_boundaries_and_counts(golden, expected):
    assert golden.store.manifest["split"] == expected["split_meta"]


def test_flat_store(golden, expected):
    columns = golden.store.reference_columns()
    assert columns.keys() == expected["flat_store"].keys()
    for name, values in expected["flat_store"].items():
        np.testing.assert_array_equal(columns[name], values, err_msg=name)
    types = {"flat_played_ratio": "f4", "flat_is_listen_plus": "?", "flat_is_like": "?", "flat_is_skip": "?", "flat_is_organic": "i1"}
    assert {name: values.dtype for name, values in columns.items()} == {name: np.dtype(types.get(name, "i8")) for name in columns}


def test_anchors(golden, expected):
    positions = np.sort(golden.index.positions)
    np.testing.assert_array_equal(positions, expected["anchor_positions"])
    np.testing.assert_array_equal(golden.store.time[positions], expected["anchor_timestamps"])
    assert [golden.dataset.position_of(anchor) for anchor in (0, 1, 464)] == [
        expected["anchor_positions"][anchor] for anchor in (0, 1, 464)
    ]


def test_windows(golden, expected):
    positions = np.array(expected["anchor_positions"])
    assert golden.index.num_windows == expected["num_windows"]
    for window in range(golden.index.num_windows):
        found = golden.index.train(window)
        np.testing.assert_array_equal(found, positions[expected["windows"].get(str(window), [])], err_msg=str(window))
        assert golden.index.counts[window] == len(found)


@pytest.mark.parametrize("salt", ["0", "7"])
def test_user_hash(expected, salt):
    assert user_hash(np.arange(len(expected["holdout_hash"][salt])), int(salt)).tolist() == expected["holdout_hash"][salt]


@pytest.mark.parametrize("strategy", ["interleaved", "last_n"])
def test_samples(golden, expected, strategy):
    dataset = YambdaDataset(golden.store, HistoryConfig(length=expected["history_length"], strategy=strategy), expected["min_history"])
    samples = [sample for sample in expected["samples"] if sample["strategy"] == strategy]
    assert len(samples) > 20
    for wanted in samples:
        found = dataset.sample(wanted["anchor_index"])
        features = wanted["uih"] | wanted["candidate"]
        assert list(found) == list(features) and len(wanted["uih"]) == HISTORY_FEATURES
        for name, values in features.items():
            assert found[name].dtype == np.int64
            np.testing.assert_array_equal(found[name], values, err_msg=f"anchor {wanted['anchor_index']}, {name}")
        at_position = dataset.sample_at(wanted["flat_position"])
        assert all(np.array_equal(at_position[name], found[name]) for name in found)
