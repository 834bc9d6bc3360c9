"""The random bits behind dropout and table initialization: the specification.

A row has two 32-bit keys, made by splitmix64 from what names the row; an element hashes its column between them with the finalizer of
MurmurHash3. 64-bit keys keep two rows from sharing a mask; the hash costs a third of Philox.
"""

import torch
from torch import Tensor

_GOLDEN = 0x9E3779B97F4A7C15
_M1, _M2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def mix64(value: int) -> int:
    """splitmix64 of a host integer, in [0, 2^64). Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014."""
    z = (value + _GOLDEN) % 2**64
    z = ((z ^ z >> 30) * _M1) % 2**64
    z = ((z ^ z >> 27) * _M2) % 2**64
    return z ^ z >> 31


def row_keys(key: int, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Two int32 [T] keys for rows named by two integers each: mix64(mix64(key + first) + second), low and high half."""
    z = _mix64_tensor(_mix64_tensor(first.long() + _signed(key)) + second.long())
    return z.to(torch.int32), (z >> 32).to(torch.int32)


def random_bits(keys: tuple[Tensor, Tensor], columns: int, first_column: int = 0) -> Tensor:
    """int32 [T, columns], uniform over the whole signed range. keys: int32 [T] each."""
    low, high = keys[0][:, None], keys[1][:, None]
    column = torch.arange(first_column, first_column + columns, device=low.device, dtype=torch.int64)
    h = _low32(column * 0x9E3779B9) + low
    h = (h ^ (h >> 16 & 0xFFFF)) * _signed32(0x85EBCA6B)
    h = h ^ high
    h = (h ^ (h >> 13 & 0x7FFFF)) * _signed32(0xC2B2AE35)
    return h ^ (h >> 16 & 0xFFFF)


def _mix64_tensor(value: Tensor) -> Tensor:
    z = value + _signed(_GOLDEN)
    z = (z ^ (z >> 30 & (1 << 34) - 1)) * _signed(_M1)
    z = (z ^ (z >> 27 & (1 << 37) - 1)) * _signed(_M2)
    return z ^ (z >> 31 & (1 << 33) - 1)


def _signed(value: int) -> int:
    return (value + 2**63) % 2**64 - 2**63


def _signed32(value: int) -> int:
    return (value + 2**31) % 2**32 - 2**31


def _low32(value: Tensor) -> Tensor:
    return value.to(torch.int32)
