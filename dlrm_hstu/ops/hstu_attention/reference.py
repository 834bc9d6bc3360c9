"""HSTU attention, dense: the specification.

B sequences, N longest length, H heads, T tokens.
"""

import torch
from torch import Tensor
from torch.nn.functional import silu


def hstu_attention_reference(
    q, k, v, offsets, *, max_seq_len, alpha, num_targets=None, contextual_seq_len=0, max_attn_len=0, min_full_attn_seq_len=0
) -> Tensor:
    """See `dlrm_hstu.ops.hstu_attention`; scores in fp32."""
    lengths_B = offsets[1:] - offsets[:-1]
    longest = int(lengths_B.max()) if lengths_B.numel() else 0
    position_N = torch.arange(longest, device=q.device)
    valid_BN = position_N < lengths_B[:, None]

    def pad(jagged_THD: Tensor) -> Tensor:
        padded_BNHD = jagged_THD.new_zeros(*valid_BN.shape, *jagged_THD.shape[1:], dtype=torch.float32)
        padded_BNHD[valid_BN] = jagged_THD.float()
        return padded_BNHD

    mask_BNN = hstu_mask(lengths_B, longest, num_targets, contextual_seq_len, max_attn_len, min_full_attn_seq_len)
    scores_BHNN = torch.einsum("bnhd,bmhd->bhnm", pad(q), pad(k)) * alpha
    weights_BHNN = silu(scores_BHNN) / max_seq_len * mask_BNN[:, None]
    return torch.einsum("bhnm,bmhd->bnhd", weights_BHNN, pad(v))[valid_BN].to(v.dtype)


def hstu_mask(lengths_B, longest, num_targets=None, contextual_seq_len=0, max_attn_len=0, min_full_attn_seq_len=0) -> Tensor:
    """bool [B, N, N]: which key j (last axis) a query i sees. Rows and columns past a length are False."""
    position_N = torch.arange(longest, device=lengths_B.device)
    valid_BN = position_N < lengths_B[:, None]
    history_B = lengths_B if num_targets is None else lengths_B - num_targets
    rank_N = position_N
    if contextual_seq_len > 0:  # the contextual tokens share rank 0
        history_B = history_B - (contextual_seq_len - 1)
        rank_N = (position_N - contextual_seq_len + 1).clamp(min=0)
    rank_BN = rank_N.expand_as(valid_BN)
    if num_targets is not None:  # the targets share the rank after the newest history token
        rank_BN = torch.minimum(rank_BN, history_B[:, None])
    query_BN1, key_B1N = rank_BN[:, :, None], rank_BN[:, None, :]
    mask = query_BN1 > key_B1N
    if max_attn_len > 0:
        near = query_BN1 - key_B1N <= max_attn_len
        if min_full_attn_seq_len > 0:
            near |= query_BN1 >= (history_B - min_full_attn_seq_len)[:, None, None]
        mask &= near
    mask |= torch.eye(longest, dtype=torch.bool, device=mask.device)
    if contextual_seq_len > 0:
        mask |= (query_BN1 == 0) & (key_B1N < history_B[:, None, None])
    return mask & valid_BN[:, :, None] & valid_BN[:, None, :]
