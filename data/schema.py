"""What an event is: Yambda's raw columns, and the code byte that packs what training needs of them."""

import numpy as np

DATASETS = {"yambda-50m": "50m", "yambda-500m": "500m", "yambda-5b": "5b"}  # name -> size, its folder's name
EVENTS_FILE = "multi_event.parquet"
EVENT_TYPES = ("listen", "like", "dislike", "unlike", "undislike")  # the place is the integer code
LISTEN, LIKE = 0, 1
LISTEN_PLUS_RATIO = 50  # percent played from which a listen counts as one of interest
MAX_ID = 2**31 - 1  # ids and times are int32 in a batch

# raw column -> what its values must be (see data.raw)
EVENT_COLUMNS = {
    "uid": "id",
    "timestamp": "id",
    "item_id": "id",
    "is_organic": "flag",
    "played_ratio_pct": "ratio",
    "track_length_seconds": "unread",
    "event_type": "event_type",
}

# Code byte: bits 0-2 event type, bit 3 organic, bits 4-6 the action bits LISTEN_PLUS 1, LIKE 2, SKIP 4.
LISTEN_PLUS_ACTION, LIKE_ACTION, SKIP_ACTION = 1, 2, 4
_TYPE_MASK, _ORGANIC_SHIFT, _ACTION_SHIFT = 0b111, 3, 4


def pack_code(event_type: np.ndarray, is_organic: np.ndarray, played_ratio: np.ndarray) -> np.ndarray:
    """The code bytes, uint8 [n], of event types (codes), organic flags (0 or 1) and played ratios (percent, missing as 0)."""
    listen, plus = event_type == LISTEN, played_ratio >= LISTEN_PLUS_RATIO
    action = (listen & plus) * LISTEN_PLUS_ACTION + (event_type == LIKE) * LIKE_ACTION + (listen & ~plus) * SKIP_ACTION
    return (event_type | (is_organic << _ORGANIC_SHIFT) | (action << _ACTION_SHIFT)).astype(np.uint8)


def event_type_of(code: np.ndarray) -> np.ndarray:
    """Event type codes, uint8, of code bytes."""
    return code & np.uint8(_TYPE_MASK)


def organic_of(code: np.ndarray) -> np.ndarray:
    """Organic flags, uint8 0 or 1, of code bytes."""
    return (code >> np.uint8(_ORGANIC_SHIFT)) & np.uint8(1)


def action_of(code: np.ndarray) -> np.ndarray:
    """Action bits, uint8, of code bytes: at most one is set, none for an event that is in no pool."""
    return code >> np.uint8(_ACTION_SHIFT)
