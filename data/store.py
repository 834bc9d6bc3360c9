"""The event store: all training events, user-major and time-sorted, 9 bytes each for training, memory-mapped."""

import hashlib
import json
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np

from data import schema
from data.arrays import MANIFEST, open_arrays, read_manifest
from data.checks import require

KIND = "event store"


@dataclass(frozen=True, eq=False)
class EventStore:
    """N events of U users; a flat position is an event's place in the columns.

    item: uint32 [N]. time: uint32 [N] seconds. code: uint8 [N], see data.schema. played_ratio: uint16 or float32 [N] percent, not read
    by training. user_offsets: int64 [U + 1], every user has an event. uids: uint32 [U], ascending.
    item_artist, item_album: uint32 [num_items], 0 where an item has none. manifest: its "split" holds the split's boundaries and counts,
    its "largest" the largest id of each kind.
    """

    path: Path
    manifest: dict
    item: np.ndarray
    time: np.ndarray
    code: np.ndarray
    played_ratio: np.ndarray
    user_offsets: np.ndarray
    uids: np.ndarray
    item_artist: np.ndarray
    item_album: np.ndarray

    @classmethod
    def open(cls, path: str | Path) -> "EventStore":
        """Map a prepared folder. Reads the manifest and the files' headers, no column.

        Raises ValueError that names the first file that is missing or has another size, dtype or shape than the manifest's.
        """
        folder = Path(path)
        manifest = read_manifest(folder, KIND)
        listed, needed = set(manifest["files"]), {f"{field.name}.npy" for field in fields(cls)[2:]}
        require(listed == needed, f"{folder / MANIFEST}: differs in {sorted(listed ^ needed)} from a store's files; prepare the data again")
        return cls(folder, manifest, **open_arrays(folder, manifest))

    def __reduce__(self):
        return EventStore.open, (self.path,)  # a worker process maps the files again instead of copying them

    @property
    def num_events(self) -> int:
        return len(self.item)

    @property
    def num_users(self) -> int:
        return len(self.uids)

    @property
    def num_items(self) -> int:
        """Length of the artist and album maps: 1 + the largest item id that has an artist or an album."""
        return len(self.item_artist)

    @property
    def fingerprint(self) -> str:
        """A hash of the store's content; what is derived from a store carries it."""
        return hashlib.sha256(json.dumps(self.manifest["files"], sort_keys=True).encode()).hexdigest()

    def user_of(self, positions: np.ndarray) -> np.ndarray:
        """The place in `uids`, int64, of the users of flat positions."""
        return np.searchsorted(self.user_offsets, positions, side="right") - 1

    def reference_columns(self) -> dict[str, np.ndarray]:
        """All columns of the public MLPerf trainer's event cache by their names there, in memory: for small stores."""
        code, uids = np.asarray(self.code), self.uids.astype(np.int64)
        event_type, action = schema.event_type_of(code), schema.action_of(code)
        bounds = np.full((2, int(uids[-1]) + 1), -1, dtype=np.int64)
        bounds[0, uids], bounds[1, uids] = self.user_offsets[:-1], self.user_offsets[1:]
        return {
            "flat_uid": np.repeat(uids, np.diff(self.user_offsets)),
            "flat_item_ids": self.item.astype(np.int64),
            "flat_timestamps": self.time.astype(np.int64),
            "flat_event_types": event_type.astype(np.int64),
            "flat_played_ratio": self.played_ratio.astype(np.float32),
            "flat_is_listen_plus": action == schema.LISTEN_PLUS_ACTION,
            "flat_is_like": action == schema.LIKE_ACTION,
            "flat_is_skip": action == schema.SKIP_ACTION,
            "flat_is_organic": schema.organic_of(code).astype(np.int8),
            "user_start": bounds[0],
            "user_end": bounds[1],
            "unique_uids": uids,
        }
