"""What is written in Python of the operators: fake kernels, and the second derivative.

Schemas, kernels and the first derivative come from C++ (csrc/ops.cpp, csrc/autograd.cpp).
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import reference

# Arguments that the schemas of forward and backward share, in order.
OPTIONS = (
    "scale", "softcap", "causal", "window_left", "window_right", "alibi_slopes", "bias", "mask", "sink",
    "dropout_p", "seed", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "seqused_q",
    "seqused_k", "deterministic", "batch_invariant",
)
DECODE_OPTIONS = (
    "cache_seqlens", "page_table", "cache_batch_idx", "leftpad", "rotary_cos", "rotary_sin",
    "rotary_interleaved", "v_head_dim", "num_splits", "batch_invariant", "causal", "window_left",
    "window_right", "softcap", "alibi_slopes", "sink", "scale", "cu_seqlens_q", "max_seqlen_q",
)
DECODE_TENSOR_OPTIONS = (
    "cache_seqlens", "page_table", "cache_batch_idx", "leftpad", "rotary_cos", "rotary_sin", "alibi_slopes",
    "sink", "cu_seqlens_q",
)
TENSOR_OPTIONS = (
    "alibi_slopes", "bias", "mask", "sink", "seed", "cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k",
)


def register(namespace: str) -> None:
    """Attach what is written in Python to the operators of ``torch.ops.<namespace>``; once a namespace."""
    for name, fake in (("forward", _fake_forward), ("forward_out", _fake_forward_out),
                       ("backward", _fake_backward), ("decode", _fake_decode),
                       ("decode_", _fake_decode_in_place)):
        torch.library.register_fake(f"{namespace}::{name}", fake)
    torch.library.impl(f"{namespace}::double_backward", "CompositeImplicitAutograd", _double_backward)


def _double_backward(ddq, ddk, ddv, ddbias, ddsink, dout, q, k, v, dlse, *options):
    """Gradient of the backward operator by autograd through plain torch, in S^2 memory: right and slow.

    It is differentiated as a function of (dout, q, k, v, dlse, bias, sink), with out and lse as the functions
    of the rest that they are; so all of the gradient arrives there and none at out and lse.
    """
    options = dict(zip(OPTIONS, options, strict=True))
    create_graph = torch.is_grad_enabled()
    with torch.enable_grad():
        tensors = [_differentiable(t) for t in (dout, q, k, v, dlse, options["bias"], options["sink"])]
        dout, q, k, v, dlse, bias, sink = tensors
        window = options.pop("window_left"), options.pop("window_right")
        del options["deterministic"], options["batch_invariant"]
        out, lse, _ = reference.forward(q, k, v, **options | {"bias": bias, "sink": sink, "window": window})
        inputs = [t for t in (q, k, v, bias, sink) if t is not None]
        seeds = (dout.to(out.dtype), torch.zeros_like(lse) if dlse is None else dlse.to(lse.dtype))
        first = iter(torch.autograd.grad((out, lse), inputs, seeds, create_graph=True,
                                         materialize_grads=True))
        first = [None if t is None else next(first) for t in (q, k, v, bias, sink)]
    pairs = [(grad, seed.to(grad.dtype)) for grad, seed in zip(first, (ddq, ddk, ddv, ddbias, ddsink))
             if grad is not None and seed is not None]
    second = iter(torch.autograd.grad([grad for grad, _ in pairs], [t for t in tensors if t is not None],
                                      [seed for _, seed in pairs], create_graph=create_graph,
                                      materialize_grads=True))
    return tuple(None if t is None else next(second) for t in tensors)


def _differentiable(t: Tensor | None) -> Tensor | None:
    """An alias of its own, so that a gradient with respect to it leaves out how t depends on the others."""
    return t if t is None else t.view_as(t) if t.requires_grad else t.detach().requires_grad_()


# ---- fake kernels: shapes and dtypes of the results ----------------------------------------------------

def _one_device(q: Tensor, **tensors: Tensor | None) -> None:
    for name, tensor in tensors.items():
        if tensor is not None and tensor.device != q.device:
            raise ValueError(f"{name} is on {tensor.device}: expected the device of q, {q.device}")


def _statistic(q: Tensor) -> Tensor:
    """An LSE for these queries: (B, Hq, Sq), or (Hq, total_q) of packed ones."""
    shape = (q.shape[1], q.shape[0]) if q.dim() == 3 else (q.shape[0], q.shape[2], q.shape[1])
    return q.new_empty(shape, dtype=_sum_dtype(q))


def _sum_dtype(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def _fake_forward(q, k, v, *rest):
    out = q.new_empty((*q.shape[:-1], v.shape[-1]))
    return out, *_fake_forward_out(q, k, v, out, *rest)


def _fake_forward_out(q, k, v, out, *rest):
    *options, return_max_logit = rest
    named = dict(zip(OPTIONS, options, strict=True))
    _one_device(q, k=k, v=v, out=out, **{name: named[name] for name in TENSOR_OPTIONS})
    return _statistic(q), q.new_empty((q.shape[-2] if return_max_logit else 0,), dtype=_sum_dtype(q))


def _fake_backward(dout, q, k, v, out, lse, dlse, *rest):
    *options, bias_grad = rest
    named = dict(zip(OPTIONS, options, strict=True))
    _one_device(q, dout=dout, k=k, v=v, out=out, lse=lse, dlse=dlse,
                **{name: named[name] for name in TENSOR_OPTIONS})
    nothing = q.new_empty((0,), dtype=_sum_dtype(q))
    dbias = _contiguous_like(named["bias"]) if bias_grad and named["bias"] is not None else nothing
    dsink = _contiguous_like(named["sink"]) if named["sink"] is not None else nothing.clone()
    return _contiguous_like(q), _contiguous_like(k), _contiguous_like(v), dbias, dsink


def _contiguous_like(t: Tensor) -> Tensor:
    return t.new_empty(t.shape)


def _fake_decode(q, k_cache, v_cache, *options):
    named = dict(zip(DECODE_OPTIONS, options, strict=True))
    _one_device(q, k_cache=k_cache, v_cache=v_cache, **{name: named[name] for name in DECODE_TENSOR_OPTIONS})
    width = named["v_head_dim"] if v_cache is None else v_cache.shape[-1]
    return q.new_empty((*q.shape[:-1], width)), _statistic(q)


def _fake_decode_in_place(q, k_cache, v_cache, k_new, v_new, out, *options):
    _one_device(q, k_new=k_new, v_new=v_new, out=out)
    return _fake_decode(q, k_cache, v_cache, *options)[1]
