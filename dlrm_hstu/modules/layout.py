"""Where every token of a jagged batch comes from and stands.

A sequence is [contextual tokens | history | candidates]. B samples, C contextual tokens, T tokens in all, S candidates in all.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from dlrm_hstu.batch import Batch


@dataclass(frozen=True)
class SequenceLayout:
    """offsets: int64 [B + 1]. sample, position: int64 [T], sequence a token belongs to and its place there. history_end: int64 [B], length
    without candidates. num_targets: int64 [B]. age: int64 [T], seconds to the sequence's last token. candidate_rows: int64 [S].
    source: int64 [T], row of the token in [contextual, sample-major | distinct events | candidates].
    max_length, max_num_targets: host numbers.
    """

    offsets: Tensor
    sample: Tensor
    position: Tensor
    history_end: Tensor
    num_targets: Tensor
    age: Tensor
    candidate_rows: Tensor
    source: Tensor
    max_length: int
    max_num_targets: int


def sequence_layout(batch: Batch, num_contextual: int) -> SequenceLayout:
    """The layout of `batch` with `num_contextual` leading tokens a sequence. Moves nothing between host and device."""
    device = batch.history_lengths.device
    batch_size, num_history, num_candidates = batch.batch_size, batch.token_event.shape[0], batch.candidate_item.shape[0]
    total = batch_size * num_contextual + num_history + num_candidates
    history_offsets = _offsets(batch.history_lengths)
    candidate_offsets = _offsets(batch.num_candidates)
    history_end = batch.history_lengths.long() + num_contextual
    offsets = _offsets(history_end + batch.num_candidates)
    sample = torch.repeat_interleave(torch.arange(batch_size, device=device), offsets.diff(), output_size=total)
    position = torch.arange(total, device=device) - offsets[sample]

    is_contextual = position < num_contextual
    is_candidate = position >= history_end[sample]
    history_index = (history_offsets[sample] + position - num_contextual).clamp(0, max(num_history - 1, 0))
    candidate_index = (candidate_offsets[sample] + position - history_end[sample]).clamp(0, max(num_candidates - 1, 0))
    event = batch.token_event.long()[history_index] if num_history else torch.zeros_like(position)
    first_event = batch_size * num_contextual
    source = torch.where(is_candidate, first_event + batch.event_item.shape[0] + candidate_index, first_event + event)
    source = torch.where(is_contextual, sample * num_contextual + position, source)

    time = batch.event_time.long()[event] if num_history else torch.zeros_like(position)
    time = torch.where(is_candidate, batch.candidate_time.long()[candidate_index], time) if num_candidates else time
    time = torch.where(is_contextual, 0, time)
    last_time = time[(offsets[1:] - 1).clamp(min=0)]
    candidate_sample = torch.repeat_interleave(torch.arange(batch_size, device=device), batch.num_candidates, output_size=num_candidates)
    candidate_rows = offsets[candidate_sample] + history_end[candidate_sample]
    candidate_rows = candidate_rows + torch.arange(num_candidates, device=device) - candidate_offsets[candidate_sample]
    return SequenceLayout(
        offsets=offsets,
        sample=sample,
        position=position,
        history_end=history_end,
        num_targets=batch.num_candidates.long(),
        age=last_time[sample] - time,
        candidate_rows=candidate_rows,
        source=source,
        max_length=batch.max_history_length + batch.max_num_candidates + num_contextual,
        max_num_targets=batch.max_num_candidates,
    )


def _offsets(lengths: Tensor) -> Tensor:
    """int64 [B + 1], running sum of integer [B] from 0."""
    return torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int64), (1, 0))
