"""What torch knows of the operators besides their kernels: fake kernels and autograd.

``register(namespace)`` attaches both to ``torch.ops.<namespace>``, whose schemas and kernels come from C++.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import reference

# Arguments that the schemas of forward and backward share, in order.
OPTIONS = (
    "scale", "softcap", "causal", "window_left", "window_right", "alibi_slopes", "bias", "mask", "sink", "dropout_p",
    "seed", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "seqused_q", "seqused_k", "deterministic",
    "batch_invariant",
)
TENSOR_OPTIONS = (
    "alibi_slopes", "bias", "mask", "sink", "seed", "cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k",
)


def register(namespace: str) -> None:
    """Attach fake kernels and autograd to the operators of ``torch.ops.<namespace>``; once a namespace."""
    ops = getattr(torch.ops, namespace)
    for name, fake in (("forward", _fake_forward), ("forward_out", _fake_forward_out), ("backward", _fake_backward),
                       ("decode", _fake_decode), ("decode_", _fake_decode_in_place)):
        torch.library.register_fake(f"{namespace}::{name}", fake)

    def backward(ctx, dout: Tensor | None, dlse: Tensor | None, _):
        q, k, v, out, lse, options = _saved(ctx)
        dout = torch.zeros_like(out) if dout is None else dout
        bias_grad = ctx.needs_input_grad[3 + OPTIONS.index("bias")]
        options["deterministic"] |= torch.are_deterministic_algorithms_enabled()
        dq, dk, dv, dbias, dsink = ops.backward(dout, q, k, v, out, lse, dlse, *options.values(), bias_grad)
        grads = dict.fromkeys(OPTIONS)
        grads["bias"] = dbias if bias_grad else None
        grads["sink"] = dsink if options["sink"] is not None else None
        return dq, dk, dv, *grads.values(), None

    torch.library.register_autograd(f"{namespace}::forward", backward, setup_context=_save_forward)
    torch.library.register_autograd(f"{namespace}::backward", _double_backward, setup_context=_save_backward)


def _save(ctx, tensors: tuple[Tensor | None, ...], options: tuple) -> None:
    options = dict(zip(OPTIONS, options, strict=True))
    if options["alibi_slopes"] is not None and options["alibi_slopes"].requires_grad:
        raise NotImplementedError("alibi_slopes requires a gradient: expected slopes without one; pass them as a bias")
    ctx.tensor_count = len(tensors)
    ctx.save_for_backward(*tensors, *(options.pop(name) for name in TENSOR_OPTIONS))
    ctx.options = options
    ctx.set_materialize_grads(False)


def _saved(ctx) -> tuple:
    """The saved tensors, then the options of the call in the order of OPTIONS."""
    tensors, rest = ctx.saved_tensors[:ctx.tensor_count], ctx.saved_tensors[ctx.tensor_count:]
    options = ctx.options | dict(zip(TENSOR_OPTIONS, rest, strict=True))
    return *tensors, {name: options[name] for name in OPTIONS}


def _save_forward(ctx, inputs, output) -> None:
    q, k, v, *options, _ = inputs
    out, lse, max_logit = output
    ctx.mark_non_differentiable(max_logit)
    _save(ctx, (q, k, v, out, lse), options)


def _save_backward(ctx, inputs, output) -> None:
    dout, q, k, v, _, _, dlse, *options, _ = inputs
    _save(ctx, (dout, q, k, v, dlse), options)


def _double_backward(ctx, *grads: Tensor | None):
    """Second derivatives by autograd through plain torch, in S^2 memory: right and slow.

    backward(dout, q, k, v, out, lse, dlse) is differentiated as a function of (dout, q, k, v, dlse, bias, sink), with out
    and lse as the functions of the rest that they are; so all of the gradient arrives there and none at out and lse.
    """
    *tensors, options = _saved(ctx)
    create_graph = torch.is_grad_enabled()
    with torch.enable_grad():
        tensors = [_differentiable(t) for t in (*tensors, options["bias"], options["sink"])]
        dout, q, k, v, dlse, bias, sink = tensors
        semantic = {name: options[name] for name in OPTIONS
                    if name not in ("window_left", "window_right", "deterministic", "batch_invariant")}
        semantic |= {"bias": bias, "sink": sink, "window": (options["window_left"], options["window_right"])}
        out, lse, _ = reference.forward(q, k, v, **semantic)
        wrt = [t for t in (q, k, v, bias, sink) if t is not None]
        seeds = (dout.to(out.dtype), torch.zeros_like(lse) if dlse is None else dlse.to(out.dtype))
        first = iter(torch.autograd.grad((out, lse), wrt, seeds, create_graph=True, materialize_grads=True))
        first = [None if t is None else next(first) for t in (q, k, v, bias, sink)]
    pairs = [(g, seed.to(g.dtype)) for g, seed in zip(first, grads) if g is not None and seed is not None]
    inputs = [t for t in tensors if t is not None]
    second = iter(torch.autograd.grad([g for g, _ in pairs], inputs, [seed for _, seed in pairs],
                                      create_graph=create_graph, materialize_grads=True))
    ddout, dq, dk, dv, ddlse, dbias, dsink = (None if t is None else next(second) for t in tensors)
    option_grads = dict.fromkeys(OPTIONS) | {"bias": dbias, "sink": dsink}
    return ddout, dq, dk, dv, None, None, ddlse, *option_grads.values(), None


def _differentiable(t: Tensor | None) -> Tensor | None:
    return t if t is None or t.requires_grad else t.detach().requires_grad_()


# ---- fake kernels: shapes and dtypes of the results ------------------------------------------------------------------

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
    _one_device(q, dout=dout, k=k, v=v, out=out, lse=lse, dlse=dlse, **{name: named[name] for name in TENSOR_OPTIONS})
    nothing = q.new_empty((0,), dtype=_sum_dtype(q))
    dbias = _contiguous_like(named["bias"]) if bias_grad and named["bias"] is not None else nothing
    dsink = _contiguous_like(named["sink"]) if named["sink"] is not None else nothing.clone()
    return _contiguous_like(q), _contiguous_like(k), _contiguous_like(v), dbias, dsink


def _contiguous_like(t: Tensor) -> Tensor:
    return t.new_empty(t.shape)


def _fake_decode(q, k_cache, v_cache, *options):
    width = options[7] if v_cache is None else v_cache.shape[-1]
    _one_device(q, k_cache=k_cache, v_cache=v_cache)
    return q.new_empty((*q.shape[:-1], width)), _statistic(q)


def _fake_decode_in_place(q, k_cache, v_cache, k_new, v_new, out, *options):
    _one_device(q, k_cache=k_cache, v_cache=v_cache, k_new=k_new, v_new=v_new, out=out)
    return _statistic(q)
