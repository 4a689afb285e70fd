"""As ``flash_attn.bert_padding``: padded batches to packed ones and back, differentiable."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def index_first_axis(input: Tensor, indices: Tensor) -> Tensor:
    """Rows ``indices`` (n) of input (rows, ...): (n, ...)."""
    return input.index_select(0, indices)


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """The inverse of :func:`index_first_axis`: (first_axis_dim, ...), zero in the rows of no index."""
    return values.new_zeros((first_axis_dim, *values.shape[1:])).index_copy(0, indices, values)


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """The tokens of a padded batch, packed.

    Args:
        hidden_states: (B, S, ...).
        attention_mask: (B, S) bool or int, 1 for a token, 0 for padding.
        unused_mask: (B, S) bool or int, 1 for a place that is kept although attention_mask is 0 there.

    Returns:
        ``(packed, indices, cu_seqlens, max_seqlen, seqused)``: packed (total, ...) are the rows ``indices``
        of the flattened batch; cu_seqlens (B + 1) int32; max_seqlen is an int (read from the device); seqused
        (B) int32 counts the tokens of attention_mask.
    """
    kept = attention_mask if unused_mask is None else attention_mask + unused_mask
    lengths = kept.sum(-1, dtype=torch.int32)
    indices = kept.flatten().nonzero().flatten()
    cu_seqlens = functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    return (index_first_axis(hidden_states.flatten(0, 1), indices), indices, cu_seqlens, int(lengths.max()),
            attention_mask.sum(-1, dtype=torch.int32))


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """The inverse of :func:`unpad_input`: (batch, seqlen, ...), zero where there is no token."""
    return index_put_first_axis(hidden_states, indices, batch * seqlen).unflatten(0, (batch, seqlen))
