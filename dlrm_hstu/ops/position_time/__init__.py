"""Position and time encoding of the transducer's input."""

import math

import torch
from torch import Tensor


def add_position_time(
    z: Tensor,
    position_table: Tensor,
    time_table: Tensor,
    *,
    position: Tensor,
    history_end: Tensor,
    age: Tensor,
    contextual_seq_len: int,
) -> Tensor:
    """x = sqrt(D) * z + (P[place] + S[bucket]), the sum of the two rows in fp32.

    z: [T, D]. position_table P: fp32 [positions, D]. time_table S: fp32 [buckets + 1, D]. position: integer [T], place in the sequence
    from 0. history_end: integer [T], length of the token's sequence without targets. age: integer [T], seconds from the token to its
    sequence's last token. Places count from the newest history token, so that it has place C + 1 and the candidates place C; contextual
    tokens keep their own. Returns [T, D] in z's dtype.
    """
    place = history_end - torch.minimum(position, history_end) + contextual_seq_len
    place = torch.where(position < contextual_seq_len, position, place).clamp(max=position_table.shape[0] - 1)
    bucket = torch.sqrt(age.float().clamp(min=1e-6) / 60).long().clamp(max=time_table.shape[0] - 1)
    encoding = position_table.index_select(0, place) + time_table.index_select(0, bucket)
    return z * math.sqrt(z.shape[1]) + encoding.to(z.dtype)
