"""Calls of flashattn.decode that several test files share."""

from __future__ import annotations

import math

import torch

import flashattn
from cases import ints


def cached(device, lengths, *, rows=1, new=0, heads=(4, 2), dims=(16, 16), dtype=torch.float32,
           page_size=None, leftpad=None, capacity=None, fill=math.nan):
    """Arguments of a decode call.  The caches hold random keys [leftpad, length) and ``fill`` elsewhere.

    Pages are shuffled, two of them belong to nobody, and table entries that no key needs are not page ids.
    """
    (heads_q, heads_k), (dim, dim_v), batch = heads, dims, len(lengths)
    capacity = max(lengths, default=0) + new + 2 if capacity is None else capacity
    if page_size is None:
        shape, table = (batch, capacity), None
    else:
        width = -(-capacity // page_size)
        shape = (batch * width + 2, page_size)
        table = torch.randperm(shape[0])[: batch * width].view(batch, width).to(torch.int32)
    k_cache = torch.full((*shape, heads_k, dim), fill, dtype=dtype)
    v_cache = torch.full((*shape, heads_k, dim_v), fill, dtype=dtype)
    for b, length in enumerate(lengths):
        keys = torch.arange(leftpad[b] if leftpad else 0, length)
        at = torch.full_like(keys, b), keys
        if table is not None:
            at = table[b, keys // page_size].long(), keys % page_size
        k_cache[at] = torch.randn(len(keys), heads_k, dim, dtype=dtype)
        v_cache[at] = torch.randn(len(keys), heads_k, dim_v, dtype=dtype)
        if table is not None:
            table[b, -(-(length + new) // page_size):] = (-1, 2**31 - 1)[b % 2]
    arguments = {"q": torch.randn(batch, rows, heads_q, dim, dtype=dtype), "k_cache": k_cache,
                 "v_cache": v_cache, "cache_seqlens": ints("cpu", *lengths)}
    if new:
        arguments |= {"k_new": torch.randn(batch, new, heads_k, dim, dtype=dtype),
                      "v_new": torch.randn(batch, new, heads_k, dim_v, dtype=dtype)}
    if table is not None:
        arguments["page_table"] = table
    if leftpad is not None:
        arguments["leftpad"] = ints("cpu", *leftpad)
    return {name: t.to(device) for name, t in arguments.items()}


def run(arguments, **options):
    """(out, lse) of flashattn.decode on copies of the caches."""
    arguments = {name: t.clone() if name in ("k_cache", "v_cache") and t is not None else t
                 for name, t in arguments.items()}
    return flashattn.decode(**arguments, **options, return_lse=True)


def packed(arguments, cu):
    """The call with q, k_new and v_new packed: the first cu[b + 1] - cu[b] rows of sequence b, NaN around."""
    total = cu[-1] + 2
    result = arguments | {"cu_seqlens_q": ints(arguments["q"].device, *cu)}
    if arguments["q"].is_cuda:                                           # on the CPU it may be left out
        result["max_seqlen_q"] = max(last - first for first, last in zip(cu, cu[1:]))
    for name in ("q", "k_new", "v_new"):
        if arguments.get(name) is not None:
            dense = arguments[name]
            result[name] = dense.new_full((total, *dense.shape[2:]), math.nan)
            for b, (first, last) in enumerate(zip(cu, cu[1:])):
                result[name][first:last] = dense[b, : last - first]
    return result
