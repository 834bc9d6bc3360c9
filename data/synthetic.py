"""Seeded synthetic listening logs in Yambda's raw format: `python -m data.synthetic --out DIR --users N --days D --seed S`.

Writes multi_event.parquet (user-major, time-sorted, ties in event order), artist_item_mapping.parquet and album_item_mapping.parquet.
Whether a listen is a listen+ (played ratio >= 50) is drawn from a logistic model, so there is something to learn: docs/synthetic.md.
"""

import shutil
import sys
import tempfile
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from data.checks import check_fields, require
from data.cli import Parser, run_command
from data.schema import EVENT_TYPES, EVENTS_FILE, LIKE, LISTEN, MAX_ID

SECONDS_PER_DAY = 86_400
TICK_S = 5  # Yambda's clock
DISLIKE, UNLIKE, UNDISLIKE = 2, 3, 4  # places in EVENT_TYPES
# Shares of all events, as published for Yambda-5b; "other" is split among the last three types by us.
LISTEN_PLUS_SHARE, SKIP_SHARE, LIKE_SHARE = 0.613, 0.359, 0.019
DISLIKE_SHARE, UNLIKE_SHARE, UNDISLIKE_SHARE = 0.006, 0.003, 0.001
LISTEN_SHARE = LISTEN_PLUS_SHARE + SKIP_SHARE
# Log-normal cut off at the top that meets Yambda-5b's median 2,695, mean 4,763, max 27,738 events a user, in units of the mean.
ACTIVITY_MU, ACTIVITY_SIGMA, ACTIVITY_MAX = -0.48922, 1.34812, 27_738 / 4_763

GENRES = 8
POPULARITY_EXPONENT = 0.7  # an item's share of plays falls as rank ** -0.7
SESSION_LISTENS = 12  # mean listens a session
MOOD_DAYS = 5  # a user's mood towards an artist is redrawn this often
# Standard deviations of the terms of the listen+ logit.
ARTIST_STD, ITEM_STD, TASTE_STD, USER_STD, MOOD_STD, ORGANIC_EFFECT = 2.0, 1.0, 1.2, 0.7, 1.0, 0.5

CHUNK_EVENTS = 500_000  # mean events simulated at once: bounds memory at about 300 MB
ROW_GROUP_ROWS = 131_072

FLAG_HELP = {
    "users": "uids 1..n",
    "days": "length of the log",
    "seed": "of all randomness",
    "items": "item ids 1..n",
    "artists": "artist ids 1..n; None is a tenth of the items",
    "albums": "album ids 1..n; None is a fifth of the items",
    "events_per_user": "mean, all event types",
}
EVENT_SCHEMA = pa.schema(
    [
        ("uid", pa.uint32()),
        ("timestamp", pa.uint32()),
        ("item_id", pa.uint32()),
        ("is_organic", pa.uint8()),
        ("played_ratio_pct", pa.uint16()),
        ("track_length_seconds", pa.uint32()),
        ("event_type", pa.dictionary(pa.int32(), pa.string())),
    ]
)


@dataclass(frozen=True)
class SyntheticConfig:
    """Size and seed of a synthetic data set.

    users: uids 1..users. days: length of the log; timestamps lie in [0, days * 86,400) s. seed: all randomness.
    items: item ids 1..items. artists, albums: ids 1..n; None means items // 10 and items // 5.
    events_per_user: mean over users, all event types; the median is 0.57 of it, the maximum 5.8 times it.
    """

    users: int = 1000
    days: int = 30
    seed: int = 1
    items: int = 3000
    artists: int | None = None
    albums: int | None = None
    events_per_user: int = 300

    def __post_init__(self):
        check_fields(self)
        object.__setattr__(self, "artists", max(1, self.items // 10) if self.artists is None else self.artists)
        object.__setattr__(self, "albums", max(self.artists, self.items // 5) if self.albums is None else self.albums)
        for name in ("users", "items", "artists", "albums", "events_per_user"):
            value = getattr(self, name)
            require(1 <= value <= MAX_ID, f"{name}={value}: must lie in 1..{MAX_ID}; give a number in that range")
        require(self.seed >= 0, f"seed={self.seed}: must not be negative; give 0 or more")
        # The split takes the last 88,200 s off, and a train window and a holdout window must remain.
        require(3 <= self.days <= MAX_ID // SECONDS_PER_DAY, f"days={self.days}: must lie in 3..24855; give a number in that range")
        require(self.artists <= self.items, f"artists={self.artists}: must be at most items={self.items}; give fewer artists or more items")
        require(
            self.artists <= self.albums <= self.items,
            f"albums={self.albums}: must lie between artists={self.artists} and items={self.items}; give a number in that range",
        )


@dataclass(frozen=True)
class Catalog:
    """Items in (genre, artist) order, [items] each, so that a genre or an artist is a contiguous range of popularity mass.

    item_id, artist_id, album_id, genre, track_length_s: integers. quality: logit. cumulative: popularity mass up to and with the item.
    artist_begin, artist_end [artists + 1], genre_begin, genre_end [GENRES]: ranges of items.
    """

    item_id: np.ndarray
    artist_id: np.ndarray
    album_id: np.ndarray
    genre: np.ndarray
    track_length_s: np.ndarray
    quality: np.ndarray
    cumulative: np.ndarray
    artist_begin: np.ndarray
    artist_end: np.ndarray
    genre_begin: np.ndarray
    genre_end: np.ndarray

    def draw(self, rng: np.random.Generator, begin: np.ndarray, end: np.ndarray) -> np.ndarray:
        """One item by popularity out of each range [begin, end), none of them empty: int64, as long as `begin`."""
        low = np.where(begin > 0, self.cumulative[begin - 1], 0.0)
        mass = low + rng.random(len(begin)) * (self.cumulative[end - 1] - low)
        return np.minimum(np.searchsorted(self.cumulative, mass, side="right"), end - 1)


@dataclass(frozen=True)
class Listens:
    """Listens of a chunk of users, one array entry each: user (from 0 in the chunk), session (user-major), start of the session
    in seconds, item (index into the catalog), organic (bool), and the logit of listen+ up to the intercept."""

    user: np.ndarray
    session: np.ndarray
    session_start_s: np.ndarray
    item: np.ndarray
    organic: np.ndarray
    logit: np.ndarray


@dataclass(frozen=True)
class Calibration:
    """What makes the event mix the published one: the logit's intercept and the factors of the like and dislike probabilities."""

    intercept: float
    like: float
    dislike: float


def make_catalog(config: SyntheticConfig) -> Catalog:
    """The items of a seed, with power-law popularity; an album belongs to one artist, an artist to one genre."""
    rng = np.random.default_rng([config.seed, 0])
    n = config.items
    album_weight = rng.permutation(np.arange(1, config.albums + 1) ** -0.5)
    album_artist = np.concatenate([np.arange(1, config.artists + 1), rng.integers(1, config.artists + 1, config.albums - config.artists)])
    artist_genre = rng.integers(0, GENRES, config.artists + 1)
    artist_quality = rng.normal(0, ARTIST_STD, config.artists + 1)
    album = 1 + rng.choice(config.albums, n, p=album_weight / album_weight.sum())
    artist = album_artist[album - 1]
    order = np.lexsort((artist, artist_genre[artist]))
    album, artist, genre = album[order], artist[order], artist_genre[artist[order]]
    popularity = rng.permutation(np.arange(1, n + 1) ** -POPULARITY_EXPONENT)
    artist_begin, artist_end = _ranges(artist, config.artists + 1)
    genre_begin, genre_end = _ranges(genre, GENRES)
    return Catalog(
        item_id=1 + rng.permutation(n),
        artist_id=artist,
        album_id=album,
        genre=genre,
        track_length_s=np.clip(rng.normal(210, 60, n), 60, 600).astype(np.int64),
        quality=artist_quality[artist] + rng.normal(0, ITEM_STD, n),
        cumulative=np.cumsum(popularity),
        artist_begin=artist_begin,
        artist_end=artist_end,
        genre_begin=genre_begin,
        genre_end=genre_end,
    )


def _ranges(keys: np.ndarray, bound: int) -> tuple[np.ndarray, np.ndarray]:
    """Begin and end of each key of 0..bound-1 in an array that holds equal keys next to each other; empty ranges where absent."""
    begin, end = np.zeros(bound, np.int64), np.zeros(bound, np.int64)
    first = np.flatnonzero(np.r_[True, keys[1:] != keys[:-1]])
    begin[keys[first]], end[keys[first]] = first, np.r_[first[1:], len(keys)]
    return begin, end


def simulate_listens(config: SyntheticConfig, catalog: Catalog, users: int, rng: np.random.Generator) -> Listens:
    """Who listens to what, when, and how willingly, for `users` new users."""
    listens = np.maximum(1, np.rint(_activity(rng, users) * config.events_per_user * LISTEN_SHARE)).astype(np.int64)
    user = np.repeat(np.arange(users), listens)
    n = len(user)
    opens = rng.random(n) < 1 / SESSION_LISTENS
    opens[np.cumsum(listens) - listens] = True
    session = np.cumsum(opens) - 1
    sessions = session[-1] + 1
    start = rng.integers(0, config.days, sessions) * SECONDS_PER_DAY + _second_of_day(rng, sessions)
    organic = rng.random(sessions)[session] < 0.6

    taste = rng.normal(0, 1, (users, GENRES))
    item = _choose_items(catalog, rng, user, session, opens, organic, taste)
    artist, genre = catalog.artist_id[item], catalog.genre[item]
    mood_key = (user * (config.artists + 1) + artist) * config.days + start[session] // SECONDS_PER_DAY // MOOD_DAYS
    moods, mood = np.unique(mood_key, return_inverse=True)
    logit = catalog.quality[item] + TASTE_STD * taste[user, genre] + rng.normal(0, USER_STD, users)[user]
    logit += rng.normal(0, MOOD_STD, len(moods))[mood] + ORGANIC_EFFECT * organic
    return Listens(user, session, start[session], item, organic, logit)


def _activity(rng: np.random.Generator, users: int) -> np.ndarray:
    """Activity of each user, heavy-tailed, mean 1: float64 [users]."""
    activity = rng.lognormal(ACTIVITY_MU, ACTIVITY_SIGMA, users)
    while (above := np.flatnonzero(activity > ACTIVITY_MAX)).size:
        activity[above] = rng.lognormal(ACTIVITY_MU, ACTIVITY_SIGMA, above.size)
    return activity


def _second_of_day(rng: np.random.Generator, n: int) -> np.ndarray:
    """Seconds into the day: a daily wave that peaks in the 19th hour and bottoms in the 7th, 1 : 6."""
    hours = np.arange(25)
    rate = 1 + 0.7 * np.cos(2 * np.pi * (hours[:-1] - 18.5) / 24)
    return np.interp(rng.random(n), np.r_[0, np.cumsum(rate)] / rate.sum(), hours * 3600.0)


def _choose_items(catalog, rng, user, session, opens, organic, taste) -> np.ndarray:
    """Item of each listen: half of them by the session's first artist, the rest by genre after the user's taste, or by popularity alone."""
    genre_mass = np.bincount(catalog.genre, np.diff(catalog.cumulative, prepend=0.0), GENRES)
    preference = genre_mass * np.exp(0.7 * taste)
    preference = np.cumsum(preference, axis=1)
    preference /= preference[:, -1:]
    genre = (rng.random(len(user))[:, None] >= preference[user]).sum(axis=1)
    by_taste = rng.random(len(user)) < np.where(organic, 0.8, 0.4)
    begin = np.where(by_taste, catalog.genre_begin[genre], 0)
    end = np.where(by_taste, catalog.genre_end[genre], len(catalog.item_id))
    item = catalog.draw(rng, begin, end)
    focus = catalog.artist_id[item[opens]][session]
    focused = rng.random(len(user)) < 0.5
    item[focused] = catalog.draw(rng, catalog.artist_begin[focus[focused]], catalog.artist_end[focus[focused]])
    return item


def listen_plus_probability(listens: Listens, calibration: Calibration) -> np.ndarray:
    """The true probability that each listen is a listen+: float64."""
    return 1 / (1 + np.exp(-(listens.logit + calibration.intercept)))


def calibrate(listens: Listens) -> Calibration:
    """The calibration with which these listens give the published event mix."""
    low, high = -50.0, 50.0
    for _ in range(60):
        middle = (low + high) / 2
        share = listen_plus_probability(listens, Calibration(middle, 0, 0)).mean()
        low, high = (middle, high) if share < LISTEN_PLUS_SHARE / LISTEN_SHARE else (low, middle)
    p = listen_plus_probability(listens, Calibration(low, 0, 0))
    return Calibration(low, LIKE_SHARE / LISTEN_SHARE / (p**3).mean(), DISLIKE_SHARE / LISTEN_SHARE / ((1 - p) ** 3).mean())


def simulate_events(config: SyntheticConfig, catalog: Catalog, listens: Listens, calibration: Calibration, first_uid: int, rng) -> pa.Table:
    """Raw rows of the listens and of the reactions that follow them, sorted by (uid, timestamp), ties in event order: EVENT_SCHEMA."""
    n = len(listens.user)
    p = listen_plus_probability(listens, calibration)
    plus = rng.random(n) < p
    ratio, ratio_is_null = _played_ratio(rng, plus)
    length = catalog.track_length_s[listens.item]
    seconds = np.maximum(1.0, length * np.where(ratio_is_null, 2, ratio) / 100) + rng.exponential(2.0, n)
    begin = _session_clock(listens, seconds, config.days * SECONDS_PER_DAY)
    reaction = _reactions(rng, plus, p, calibration)

    row = np.repeat(np.arange(n), 1 + (reaction != LISTEN))  # a listen, then its reaction if it has one
    is_reaction = np.r_[False, row[1:] == row[:-1]]
    time = begin[row] + np.where(is_reaction, rng.random(len(row)) * seconds[row], 0)
    tick = (time // TICK_S).astype(np.int64)
    order = np.argsort(listens.user[row] * (config.days * SECONDS_PER_DAY // TICK_S) + tick, kind="stable")
    row, is_reaction, tick = row[order], is_reaction[order], tick[order]
    codes = np.where(is_reaction, reaction[row], LISTEN).astype(np.int32)
    columns = [
        pa.array((first_uid + listens.user[row]).astype(np.uint32)),
        pa.array((tick * TICK_S).astype(np.uint32)),
        pa.array(catalog.item_id[listens.item[row]].astype(np.uint32)),
        pa.array(listens.organic[row].astype(np.uint8)),
        pa.array(ratio[row].astype(np.uint16), mask=is_reaction | ratio_is_null[row]),
        pa.array(length[row].astype(np.uint32), mask=is_reaction),
        pa.DictionaryArray.from_arrays(pa.array(codes), list(EVENT_TYPES)),
    ]
    return pa.Table.from_arrays(columns, schema=EVENT_SCHEMA)


def _played_ratio(rng: np.random.Generator, plus: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Played ratio in percent and whether it is null: 50 and more, mostly 100, where `plus`, else 0..49 or, rarely, null."""
    n = len(plus)
    kind = rng.random(n)
    finished = np.select([kind < 0.68, kind < 0.97], [100, rng.integers(50, 100, n)], rng.integers(101, 200, n))
    skipped = (50 * rng.beta(0.6, 2.0, n)).astype(np.int64)
    return np.where(plus, finished, np.minimum(skipped, 49)), ~plus & (kind < 0.02)


def _session_clock(listens: Listens, seconds: np.ndarray, end_s: int) -> np.ndarray:
    """Time at which each listen begins; a session that would outlast the log starts earlier instead: float64 seconds."""
    before = np.cumsum(seconds) - seconds
    first = np.flatnonzero(np.r_[True, np.diff(listens.session) > 0])
    total = np.add.reduceat(seconds, first)
    start = np.minimum(listens.session_start_s[first], end_s - 1 - total)
    return (start - before[first])[listens.session] + before


def _reactions(rng: np.random.Generator, plus: np.ndarray, p: np.ndarray, calibration: Calibration) -> np.ndarray:
    """Event code of what follows each listen, LISTEN for nothing: likes follow wanted listen+, dislikes unwanted skips."""
    draw = rng.random(len(p))
    rare = rng.random(len(p))
    reacts = draw < np.where(plus, calibration.like * p**2, calibration.dislike * (1 - p) ** 2)
    withdrawn = np.select([rare < UNLIKE_SHARE, rare < UNLIKE_SHARE + UNDISLIKE_SHARE], [UNLIKE, UNDISLIKE], LISTEN)
    return np.where(reacts, np.where(plus, LIKE, DISLIKE), withdrawn)


def mapping_table(name: str, item_id: np.ndarray, ids: np.ndarray, bound: int, rng: np.random.Generator) -> pa.Table:
    """Rows (`name`, item_id) sorted by item: 2 % of the items have none, 4 % have a guest's row before their own."""
    kind = rng.random(len(item_id))
    own, guest = np.flatnonzero(kind >= 0.02), np.flatnonzero(kind > 0.96)
    items = np.r_[item_id[guest], item_id[own]]
    values = np.r_[rng.integers(1, bound + 1, len(guest)), ids[own]]
    order = np.argsort(items, kind="stable")
    return pa.table({name: pa.array(values[order].astype(np.uint32)), "item_id": pa.array(items[order].astype(np.uint32))})


def generate(config: SyntheticConfig, out: Path, force: bool = False) -> int:
    """Write the three raw files of `config` into the folder `out`; the number of events.

    The files appear in `out` when all of them are complete. Raises ValueError if `out` is a file, or holds anything and not `force`;
    `force` replaces the three files and leaves others alone.
    """
    require(not out.exists() or out.is_dir(), f"out={out}: must be a folder; give another path")
    require(force or not out.exists() or not any(out.iterdir()), f"out={out}: must be empty; give another folder, or --force to replace")
    out.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=".synthetic-", dir=out))
    try:
        catalog = make_catalog(config)
        kinds = (("artist", catalog.artist_id, config.artists), ("album", catalog.album_id, config.albums))
        for stream, (kind, ids, bound) in enumerate(kinds):
            table = mapping_table(f"{kind}_id", catalog.item_id, ids, bound, np.random.default_rng([config.seed, 1, stream]))
            pq.write_table(table, scratch / f"{kind}_item_mapping.parquet")
        events = _write_events(config, catalog, scratch / EVENTS_FILE)
        # The events leave first and come last, so that an interrupted move never pairs them with another seed's mappings.
        (out / EVENTS_FILE).unlink(missing_ok=True)
        for path in sorted(scratch.iterdir()):
            path.replace(out / path.name)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return events


def _write_events(config: SyntheticConfig, catalog: Catalog, path: Path) -> int:
    """Simulate and write chunk by chunk, one generator a chunk; the number of events."""
    users_per_chunk = max(1, CHUNK_EVENTS // config.events_per_user)
    calibration, events = None, 0
    with pq.ParquetWriter(path, EVENT_SCHEMA) as writer:
        for chunk, first in enumerate(range(0, config.users, users_per_chunk)):
            rng = np.random.default_rng([config.seed, 2, chunk])
            listens = simulate_listens(config, catalog, min(users_per_chunk, config.users - first), rng)
            calibration = calibration or calibrate(listens)
            table = simulate_events(config, catalog, listens, calibration, 1 + first, rng)
            writer.write_table(table, row_group_size=ROW_GROUP_ROWS)
            events += table.num_rows
    return events


def main(arguments: list[str] | None = None) -> int:
    """Command line; the exit status: 0, or 2 after one line about what to fix."""
    parser = Parser(prog="python -m data.synthetic", description="Write a seeded synthetic listening log in Yambda's raw format.")
    parser.add_argument("--out", required=True, type=Path, help="folder for the raw files")
    parser.add_argument("--force", action="store_true", help="replace the raw files in a folder that is not empty")
    for f in fields(SyntheticConfig):
        parser.add_argument(f"--{f.name}", type=int, default=f.default, help=FLAG_HELP[f.name])
    options = parser.parse_args(arguments)

    def command() -> None:
        config = SyntheticConfig(**{f.name: getattr(options, f.name) for f in fields(SyntheticConfig)})
        events = generate(config, options.out, options.force)
        size = f"{events:,} events of {config.users:,} users in {config.days} days, {config.items:,} items, seed {config.seed}"
        print(f"{options.out}: {size}")

    return run_command(command)


if __name__ == "__main__":
    sys.exit(main())
