"""The synthetic log: Yambda's format, the published mix, determinism, the split's shape, and a signal that can be learned."""

import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data import synthetic
from data.synthetic import SyntheticConfig, generate, main

FILES = ("album_item_mapping.parquet", "artist_item_mapping.parquet", "multi_event.parquet")
CONFIG = SyntheticConfig(users=600, days=20, seed=5, items=1500, events_per_user=250)


def auc(scores: np.ndarray, labels: np.ndarray) -> float:
    """Area under the ROC curve by the rank sum, ties count half."""
    values, inverse, counts = np.unique(scores, return_inverse=True, return_counts=True)
    rank = (np.cumsum(counts) - (counts - 1) / 2)[inverse]
    positives = labels.sum()
    return (rank[labels].sum() - positives * (positives + 1) / 2) / (positives * (len(labels) - positives))


def exit_status(arguments: list[str]) -> int:
    try:
        return main(arguments)
    except SystemExit as exit:
        return exit.code


def smoothed_past_rate(key: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Rate of the earlier rows of the same key, for rows in time order, pulled to 0.63 by two virtual rows."""
    order = np.argsort(key, kind="stable")
    key, y = key[order], labels[order].astype(float)
    first = np.r_[True, key[1:] != key[:-1]]
    begin = np.flatnonzero(first)[np.cumsum(first) - 1]
    before = np.cumsum(y) - y
    rate = np.empty(len(y))
    rate[order] = (before - before[begin] + 1.26) / (np.arange(len(y)) - begin + 2)
    return rate


@pytest.fixture(scope="module")
def raw(tmp_path_factory):
    out = tmp_path_factory.mktemp("synthetic")
    generate(CONFIG, out)
    return out


@pytest.fixture(scope="module")
def events(raw):
    table = pq.read_table(raw / "multi_event.parquet")
    columns = {name: table[name].to_numpy() for name in ("uid", "timestamp", "item_id", "is_organic")}
    columns = {name: column.astype(np.int64) for name, column in columns.items()}
    columns["type"] = table["event_type"].cast(pa.string()).to_numpy(zero_copy_only=False)
    columns["ratio"] = table["played_ratio_pct"].cast(pa.float64()).to_numpy()  # null is NaN
    columns["length"] = table["track_length_seconds"].cast(pa.float64()).to_numpy()
    return columns


@pytest.fixture(scope="module")
def listens(raw, events):
    """Listens in time order with artist and label, and whether they are in the past or in the holdout window."""
    mapping = pq.read_table(raw / "artist_item_mapping.parquet")
    artist_of = np.zeros(CONFIG.items + 1, np.int64)
    artist_of[mapping["item_id"].to_numpy()] = mapping["artist_id"].to_numpy()
    keep = np.flatnonzero(events["type"] == "listen")
    keep = keep[np.argsort(events["timestamp"][keep], kind="stable")]
    result = {name: events[name][keep] for name in ("uid", "timestamp", "item_id")}
    result["artist"] = artist_of[result["item_id"]]
    result["plus"] = events["ratio"][keep] >= 50
    train_end = events["timestamp"].max() - 88_200
    origin = result["timestamp"].min()
    holdout_begin = origin + (train_end - 1 - origin) // 86_400 * 86_400
    result["past"] = result["timestamp"] < holdout_begin
    result["holdout"] = (result["timestamp"] >= holdout_begin) & (result["timestamp"] < train_end)
    result["holdout_s"] = train_end - holdout_begin
    return result


def test_files_and_schema_are_yambdas(raw):
    assert sorted(path.name for path in raw.iterdir()) == sorted(FILES)
    schema = pq.read_schema(raw / "multi_event.parquet")
    assert [(field.name, str(field.type)) for field in schema] == [
        ("uid", "uint32"),
        ("timestamp", "uint32"),
        ("item_id", "uint32"),
        ("is_organic", "uint8"),
        ("played_ratio_pct", "uint16"),
        ("track_length_seconds", "uint32"),
        ("event_type", "dictionary<values=string, indices=int32, ordered=0>"),
    ]
    for kind in ("artist", "album"):
        schema = pq.read_schema(raw / f"{kind}_item_mapping.parquet")
        assert [(field.name, str(field.type)) for field in schema] == [(f"{kind}_id", "uint32"), ("item_id", "uint32")]


def test_event_mix_is_the_published_one(events):
    listen = events["type"] == "listen"
    share = {name: np.mean(events["type"] == name) for name in ("like", "dislike", "unlike", "undislike")}
    plus = listen & (events["ratio"] >= 50)
    assert np.mean(plus) == pytest.approx(0.613, abs=0.01)
    assert np.mean(listen & ~plus) == pytest.approx(0.359, abs=0.01)
    assert share["like"] == pytest.approx(0.019, abs=0.002)
    assert share["dislike"] + share["unlike"] + share["undislike"] == pytest.approx(0.010, abs=0.002)
    assert all(value > 0 for value in share.values())


def test_nulls_and_ratios(events):
    listen = events["type"] == "listen"
    assert np.isnan(events["ratio"][~listen]).all() and np.isnan(events["length"][~listen]).all()
    assert not np.isnan(events["length"][listen]).any()
    assert 0.002 < np.isnan(events["ratio"][listen]).mean() < 0.02
    ratio = events["ratio"][listen]
    assert 0.005 < (ratio > 100).mean() < 0.05 and np.nanmin(ratio) == 0 and np.nanmax(ratio) < 200
    assert set(np.unique(events["is_organic"])) == {0, 1}


def test_rows_are_user_major_on_a_5s_clock_with_ties(events):
    uid, time = events["uid"], events["timestamp"]
    assert (np.unique(uid) == np.arange(1, CONFIG.users + 1)).all()
    assert (np.diff(uid) >= 0).all()
    same_user = np.diff(uid) == 0
    assert (np.diff(time)[same_user] >= 0).all()
    assert (time % 5 == 0).all() and time.min() >= 0 and time.max() < CONFIG.days * 86_400
    assert 0.01 < np.mean(np.diff(time)[same_user] == 0) < 0.1


def test_a_reaction_follows_its_listen_also_when_their_times_tie(events):
    reaction = np.flatnonzero(events["type"] != "listen")
    reaction = reaction[reaction < len(events["uid"]) - 1]

    def is_its_listen(row):
        same = (events["uid"][row] == events["uid"][reaction]) & (events["item_id"][row] == events["item_id"][reaction])
        return same & (events["type"][row] == "listen")

    before, after = is_its_listen(reaction - 1), is_its_listen(reaction + 1)
    tied_before = before & (events["timestamp"][reaction - 1] == events["timestamp"][reaction])
    tied_after = after & (events["timestamp"][reaction + 1] == events["timestamp"][reaction])
    assert tied_before.sum() > 50
    # The few others come from sessions that overlap.
    assert before.mean() > 0.95
    assert (tied_after & ~before).mean() < 0.002
    like = before & (events["type"][reaction] == "like")
    assert (events["ratio"][reaction - 1][like] >= 50).mean() > 0.98


def test_item_popularity_is_a_power_law(events):
    counts = np.sort(np.bincount(events["item_id"]))[::-1]
    rank = np.arange(5, 500)
    slope, _ = np.polyfit(np.log(rank), np.log(counts[rank - 1]), 1)
    assert -1.3 < slope < -0.5
    assert np.corrcoef(np.log(rank), np.log(counts[rank - 1]))[0, 1] < -0.97


def test_activity_has_the_published_tail(events):
    activity = np.bincount(events["uid"])[1:]
    assert activity.mean() == pytest.approx(CONFIG.events_per_user, rel=0.15)
    assert np.median(activity) / activity.mean() == pytest.approx(2695 / 4763, rel=0.15)
    assert 4 < activity.max() / CONFIG.events_per_user < 6.2


def test_daily_rhythm(events):
    by_hour = np.bincount(events["timestamp"] // 3600 % 24, minlength=24)
    assert by_hour[17:21].mean() > 3 * by_hour[5:9].mean()


def test_listens_come_in_sessions(events):
    gap = np.diff(events["timestamp"])[np.diff(events["uid"]) == 0]
    sessions = (gap > 1800).sum() + CONFIG.users
    assert 6 < len(events["uid"]) / sessions < 18


def test_a_session_dwells_on_an_artist(listens):
    order = np.lexsort((listens["timestamp"], listens["uid"]))
    artist = listens["artist"][order]
    by_chance = ((np.bincount(artist) / len(artist)) ** 2).sum()
    assert by_chance < 0.05
    assert (artist[1:] == artist[:-1]).mean() > 0.2


@pytest.mark.parametrize("kind,bound", [("artist", CONFIG.artists), ("album", CONFIG.albums)])
def test_mappings_miss_some_items_and_repeat_some(raw, kind, bound):
    table = pq.read_table(raw / f"{kind}_item_mapping.parquet")
    items, ids = table["item_id"].to_numpy(), table[f"{kind}_id"].to_numpy()
    rows_of = np.bincount(items, minlength=CONFIG.items + 1)[1:]
    assert len(rows_of) == CONFIG.items
    assert 0 < (rows_of == 0).mean() < 0.05
    assert 0.01 < (rows_of == 2).mean() < 0.1
    assert ids.min() >= 1 and ids.max() <= bound
    assert len(np.unique(ids)) > 0.9 * bound


def test_an_album_belongs_to_one_artist(raw):
    artist_of = {}
    single = {}
    for kind in ("artist", "album"):
        table = pq.read_table(raw / f"{kind}_item_mapping.parquet")
        items, ids = table["item_id"].to_numpy(), table[f"{kind}_id"].to_numpy()
        alone = np.bincount(items)[items] == 1
        single[kind] = dict(zip(items[alone].tolist(), ids[alone].tolist(), strict=True))
    for item, album in single["album"].items():
        if item in single["artist"]:
            assert artist_of.setdefault(album, single["artist"][item]) == single["artist"][item]
    assert len(artist_of) > len(set(artist_of.values()))


def test_the_holdout_window_is_most_of_a_day(listens):
    assert listens["holdout_s"] > 43_200
    share = listens["holdout"].sum() / listens["past"].sum()
    assert share > 0.5 / CONFIG.days


def test_true_probability_separates_but_not_perfectly():
    catalog = synthetic.make_catalog(CONFIG)
    rng = np.random.default_rng(0)
    listens = synthetic.simulate_listens(CONFIG, catalog, CONFIG.users, rng)
    p = synthetic.listen_plus_probability(listens, synthetic.calibrate(listens))
    assert 0.88 < auc(p, rng.random(len(p)) < p) < 0.93


def test_the_past_predicts_the_holdout(listens):
    holdout, plus = listens["holdout"], listens["plus"]
    for column, least in (("item_id", 0.68), ("artist", 0.68)):
        key = listens[column]
        shows = np.bincount(key[listens["past"]], minlength=key.max() + 1)
        rate = (np.bincount(key[listens["past"]], plus[listens["past"]], key.max() + 1) + 1.26) / (shows + 2)
        assert auc(rate[key[holdout]], plus[holdout]) > least, column
    own_artist_rate = smoothed_past_rate(listens["uid"] * (CONFIG.artists + 1) + listens["artist"], plus)
    assert auc(own_artist_rate[holdout], plus[holdout]) > 0.70


def test_recent_history_by_the_same_artist_says_more_than_old(listens):
    """What item and user explain taken away, outcomes of one user and artist agree, and the more so the closer in time."""
    plus = listens["plus"].astype(float)
    residual = plus - smoothed_past_rate(listens["item_id"], listens["plus"])
    residual -= (np.bincount(listens["uid"], residual) / np.maximum(1, np.bincount(listens["uid"])))[listens["uid"]]
    pair = listens["uid"] * (CONFIG.artists + 1) + listens["artist"]
    order = np.argsort(pair, kind="stable")
    adjacent = pair[order][1:] == pair[order][:-1]
    gap = np.diff(listens["timestamp"][order])
    product = residual[order][1:] * residual[order][:-1]
    recent, old = product[adjacent & (gap < 86_400)].mean(), product[adjacent & (gap > 6 * 86_400)].mean()
    assert old > 0.008  # taste
    assert recent > old + 0.005  # mood


def test_same_seed_same_bytes_and_another_seed_differs(tmp_path):
    small = {"users": 40, "days": 4, "items": 200, "events_per_user": 50}
    for folder, seed in (("a", 1), ("b", 1), ("c", 2)):
        generate(SyntheticConfig(seed=seed, **small), tmp_path / folder)
    for name in FILES:
        a, b, c = ((tmp_path / folder / name).read_bytes() for folder in "abc")
        assert a == b, name
        assert a != c, name
    listens = []
    for folder in "ac":
        table = pq.read_table(tmp_path / folder / "multi_event.parquet")
        listens.append(np.bincount(table["uid"].to_numpy()[~table["track_length_seconds"].is_null().to_numpy()]))
    assert not np.array_equal(*listens)  # the users differ, not only the items


def test_chunks_join_and_row_groups_are_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(synthetic, "CHUNK_EVENTS", 1000)
    monkeypatch.setattr(synthetic, "ROW_GROUP_ROWS", 400)
    count = generate(SyntheticConfig(users=95, days=5, items=300, events_per_user=100), tmp_path)
    file = pq.ParquetFile(tmp_path / "multi_event.parquet")
    groups = [file.metadata.row_group(i).num_rows for i in range(file.metadata.num_row_groups)]
    assert max(groups) <= 400 and sum(groups) == count
    table = file.read()
    uid = table["uid"].to_numpy().astype(np.int64)
    assert (np.unique(uid) == np.arange(1, 96)).all() and (np.diff(uid) >= 0).all()
    chunks = [table.filter(pa.array((uid - 1) // 10 == chunk)) for chunk in range(2)]
    assert not chunks[0]["item_id"].equals(chunks[1]["item_id"])  # each chunk has its own randomness


@pytest.mark.parametrize("users,items,events_per_user", [(1, 1, 1), (5, 3, 2), (2, 50, 2000)])
def test_smallest_sizes(tmp_path, users, items, events_per_user):
    count = generate(SyntheticConfig(users=users, days=3, items=items, events_per_user=events_per_user), tmp_path)
    table = pq.read_table(tmp_path / "multi_event.parquet")
    assert table.num_rows == count >= users
    assert 1 <= table["item_id"].to_numpy().min() and table["item_id"].to_numpy().max() <= items
    assert table["timestamp"].to_numpy().max() < 3 * 86_400


@pytest.mark.parametrize(
    "arguments,words",
    [
        (["--users", "0"], ["users=0", "1..", "give"]),
        (["--users", "many"], ["--users", "many"]),
        (["--days", "2"], ["days=2", "3..24855", "give"]),
        (["--seed", "-1"], ["seed=-1", "negative", "give"]),
        (["--events_per_user", "0"], ["events_per_user=0", "give"]),
        (["--items", "10", "--artists", "20"], ["artists=20", "items=10", "give"]),
        (["--artists", "30", "--albums", "20"], ["albums=20", "artists=30", "give"]),
        (["--user", "5"], ["--user:", "--users"]),
    ],
)
def test_bad_arguments_exit_2_with_one_line(tmp_path, capsys, arguments, words):
    assert exit_status(["--out", str(tmp_path / "out"), *arguments]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert all(word in error for word in words), error
    assert not (tmp_path / "out").exists()


def test_a_folder_that_is_not_empty_is_left_alone_unless_forced(tmp_path, capsys):
    out = tmp_path / "out"
    out.mkdir()
    (out / "notes.txt").write_text("mine")
    (out / "multi_event.parquet").write_text("old")
    arguments = ["--out", str(out), "--users", "5", "--days", "3", "--items", "20", "--events_per_user", "10"]
    assert exit_status(arguments) == 2 and "--force" in capsys.readouterr().err
    assert (out / "multi_event.parquet").read_text() == "old" and len(list(out.iterdir())) == 2
    assert main([*arguments, "--force"]) == 0
    assert (out / "notes.txt").read_text() == "mine"
    assert sorted(path.name for path in out.iterdir()) == sorted([*FILES, "notes.txt"])
    assert pq.read_table(out / "multi_event.parquet").num_rows > 0


def test_an_interrupted_run_leaves_no_raw_files(tmp_path, monkeypatch):
    def fail(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(synthetic, "simulate_events", fail)
    with pytest.raises(KeyboardInterrupt):
        generate(SyntheticConfig(users=5, days=3), tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


def test_command_line(tmp_path):
    command = [sys.executable, "-m", "data.synthetic", "--out", str(tmp_path / "out"), "--users", "5", "--days", "3", "--seed", "3"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "5 users in 3 days" in result.stdout
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == sorted(FILES)
