"""What the data side hands to the model.

A batch is user-major, so its samples are overlapping subsets of few users' events. Its unit is therefore the *distinct event*: every
distinct item and event is listed once and a history token is one int32, the index of its event.

Legend: B samples, I distinct (item, artist, album) triples, E distinct events, T history tokens of all samples, S candidates of all
samples, C contextual features.
"""

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

LISTEN_PLUS, LIKE, SKIP = 1, 2, 4  # action bits


@dataclass(frozen=True)
class Batch:
    """One rank's share of one step. All tensors on one device; host numbers travel along so that the step needs no sync.

    item_ids, artist_ids, album_ids: int32 [I], the distinct triples of history and candidates.
    event_item: int32 [E] into the triples. event_action: uint8 [E] action bits. event_time: int32 [E] seconds.
    token_event: int32 [T] into the events, sample-major, oldest first. history_lengths: int32 [B].
    candidate_item: int32 [S] into the triples. candidate_time: int32 [S] query time in seconds.
    candidate_action: uint8 [S] action bits, the label's source. num_candidates: int32 [B].
    contextual_ids: int32 [C, B], one id a feature, in the model's feature order.
    sample_index: int32 [B], the sample's place in its window, whatever the rank: keys dropout.
    weight: float32 [B], 1 for a sample, 0 for padding.
    """

    item_ids: Tensor
    artist_ids: Tensor
    album_ids: Tensor
    event_item: Tensor
    event_action: Tensor
    event_time: Tensor
    token_event: Tensor
    history_lengths: Tensor
    candidate_item: Tensor
    candidate_time: Tensor
    candidate_action: Tensor
    num_candidates: Tensor
    contextual_ids: Tensor
    sample_index: Tensor
    weight: Tensor
    max_history_length: int  # host numbers from here on
    max_num_candidates: int
    real_samples: int  # samples of weight 1 on this rank
    global_real_samples: int  # and on all ranks
    world_size: int = 1

    @property
    def batch_size(self) -> int:
        """Samples on this rank, padding included."""
        return self.history_lengths.shape[0]

    @property
    def loss_share(self) -> float:
        """Factor on this rank's mean loss that makes the mean over ranks the mean over samples; 1 when every rank is full."""
        return self.real_samples * self.world_size / max(self.global_real_samples, 1)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "Batch":
        """The same batch with every tensor on `device`."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> "Batch":
        """The same batch in page-locked host memory."""
        return self._map(Tensor.pin_memory)

    def _map(self, function) -> "Batch":
        tensors = {f.name: getattr(self, f.name) for f in fields(self) if isinstance(getattr(self, f.name), Tensor)}
        return replace(self, **{name: function(tensor) for name, tensor in tensors.items()})
