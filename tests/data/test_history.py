import numpy as np
import pytest

from data.history import HistoryConfig, gather, history_of
from data.index import AnchorIndex, IndexConfig
from data.schema import action_of

POOLS = {"interleaved": ([1], [2], [4]), "last_n": ([1, 2, 4],)}


def slow_history(store, position: int, config: HistoryConfig, max_history: int) -> list[int]:
    """From the definition, event by event."""
    user = store.user_of(position)
    scanned = [p for p in range(int(store.user_offsets[user]), position) if p >= position - config.scan_window]
    count = config.length if config.strategy == "last_n" else max(1, config.length // 3)
    kept = []
    for kinds in POOLS[config.strategy]:
        kept += [p for p in scanned if action_of(store.code[p]) in kinds][-count:]
    return sorted(kept)[-max_history:]


@pytest.mark.parametrize("strategy", ["interleaved", "last_n"])
@pytest.mark.parametrize(
    "length, scan_window, max_history", [(30, 20000, None), (30, 25, None), (2, 9, 1), (400, 20000, None), (60, 100, 17)]
)
def test_gather_equals_the_definition(random_store, strategy, length, scan_window, max_history):
    config = HistoryConfig(length, strategy, scan_window)
    anchors = np.random.default_rng(length).permutation(AnchorIndex.open(random_store, IndexConfig(0)).positions)[:300]
    found = gather(random_store, anchors, config, max_history)
    ends = np.cumsum(found.lengths)
    assert found.token_event.dtype == found.lengths.dtype == np.int32 and ends[-1] == len(found.token_event)
    assert (np.diff(found.events) > 0).all() and set(found.token_event) == set(range(len(found.events)))
    for anchor, end, length in zip(anchors, ends, found.lengths, strict=True):
        wanted = slow_history(random_store, int(anchor), config, max_history or 10**9)
        assert found.events[found.token_event[end - length : end]].tolist() == wanted
        assert history_of(random_store, int(anchor), config, max_history).tolist() == wanted


def pools_of_twenty(make_store):
    rows = [(1, 10 * place, place, *(("listen", 60), ("like", None), ("listen", 10))[place % 3]) for place in range(60)]
    store = make_store([*rows, (1, 600, 99, "listen", 60)])
    return store, history_of(store, 60, HistoryConfig(length=12)), np.array([60])


def test_newest_of_each_pool_in_time_order(make_store):
    store, history, anchors = pools_of_twenty(make_store)
    assert history.tolist() == list(range(48, 60))
    assert np.bincount(action_of(store.code[history])).tolist() == [0, 4, 4, 0, 4]
    uneven = [(1, place, place, *(("like", None) if place < 5 else ("listen", 60))) for place in range(50)]
    history = history_of(make_store(uneven), 49, HistoryConfig(length=12))
    assert history.tolist() == [1, 2, 3, 4, 45, 46, 47, 48]  # an under-filled pool's room is not given to another


def test_default_budget_fits_the_benchmarks_sequence():
    taken = sum(count for _, count in HistoryConfig().pools)
    assert taken == 3 * 1362 and taken + 8 + 1 == 4095


def test_truncation_keeps_the_newest(make_store):
    store, history, anchors = pools_of_twenty(make_store)
    for budget in (1, 5, 12, 63):  # 63: what is left of 64 without contextual features
        assert history_of(store, 60, HistoryConfig(length=12), budget).tolist() == history[-budget:].tolist()
        found = gather(store, anchors, HistoryConfig(length=12), budget)
        assert found.events.tolist() == history[-budget:].tolist() and found.lengths.tolist() == [min(budget, 12)]
    assert len(history_of(store, 60, HistoryConfig(length=4086), 63)) == 60


@pytest.mark.parametrize("budget", [0, -3])
def test_a_budget_without_room_is_refused(make_store, budget):
    store, _, anchors = pools_of_twenty(make_store)
    for function, argument in ((history_of, 60), (gather, anchors)):
        with pytest.raises(ValueError, match=f"max_history={budget}: must be positive"):
            function(store, argument, HistoryConfig(), budget)


@pytest.mark.parametrize("settings", [{"length": 0}, {"scan_window": -1}, {"strategy": "newest"}, {"length": "30"}])
def test_bad_settings_are_refused(settings):
    name, value = next(iter(settings.items()))
    with pytest.raises(ValueError, match=f"HistoryConfig.{name}={value!r}: must be"):
        HistoryConfig(**settings)
