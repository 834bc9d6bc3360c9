"""Stores made from small raw files."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
from raw_files import GOLDEN, random_rows, write_raw

from data.history import HistoryConfig
from data.index import AnchorIndex, IndexConfig
from data.loader import YambdaDataset
from data.prepare import SplitConfig, prepare


@pytest.fixture(scope="session")
def expected() -> dict:
    return json.loads((GOLDEN / "expected.json").read_text())


@pytest.fixture(scope="session")
def golden(tmp_path_factory, expected) -> SimpleNamespace:
    """The golden raw files as a store with its index."""
    config = IndexConfig(min_history=expected["min_history"], window_seconds=expected["window_seconds"])
    out = tmp_path_factory.mktemp("golden") / "store"
    store = prepare(GOLDEN / "raw", out, dataset="yambda-50m", index=config, log=lambda line: None)
    index = AnchorIndex.open(store, config)
    return SimpleNamespace(store=store, index=index, dataset=YambdaDataset(store, HistoryConfig(length=30), 4), path=out)


@pytest.fixture
def make_store(tmp_path):
    """make_store(rows, ...) -> store of these rows; with `min_history`, its index is there too."""
    made = []

    def make(rows, min_history: int = 1, num_items: int = 100, window_seconds: int = 86400):
        made.append(0)
        raw = write_raw(tmp_path / f"raw{len(made)}", rows, num_items)
        index = IndexConfig(min_history=min_history, window_seconds=window_seconds)
        return prepare(raw, tmp_path / f"store{len(made)}", split=SplitConfig(), index=index, log=lambda line: None)

    return make


@pytest.fixture(scope="session")
def random_store(tmp_path_factory):
    """12 users of 150 events in 20 windows, items 100 to 119 outside the maps."""
    folder = tmp_path_factory.mktemp("random")
    raw = write_raw(folder / "raw", random_rows(np.random.default_rng(5), 12, 150))
    return prepare(raw, folder / "store", index=IndexConfig(min_history=3), log=lambda line: None)
