"""torch's own attention, served by these kernels: ``torch.nn.functional.scaled_dot_product_attention``.

    from flashattn.integrations import sdpa

    with sdpa.register():          # or handle = sdpa.register(); handle.remove() ends it
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)

Every caller is served, in the whole process: torch.nn.MultiheadAttention, models that know nothing of
flashattn, torch.compile and torch.export.  What :func:`serves` does not take goes to torch, unchanged.
"""

from __future__ import annotations

import math
from types import TracebackType

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

from .. import functional

NAME = "flashattn"
OPERATOR = torch.ops.aten.scaled_dot_product_attention.default
KEYS = ("CPU", "CUDA", "AutogradCPU", "AutogradCUDA")
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
PLAIN = (Tensor, torch.nn.Parameter, FakeTensor, FunctionalTensor)  # the last two stand for the first


class Registration:
    """Lasts until :meth:`remove`, or to the end of a ``with`` block.  The last of several restores torch."""

    _library: torch.library.Library | None = None
    _active: set[Registration] = set()

    def __init__(self) -> None:
        if Registration._library is None:
            library = torch.library.Library("aten", "IMPL")
            for key in KEYS:
                library.impl(OPERATOR, attention, key)
            Registration._library = library
        Registration._active.add(self)

    def remove(self) -> None:
        """End it; once is enough."""
        Registration._active.discard(self)
        if not Registration._active and Registration._library is not None:
            Registration._library._destroy()
            Registration._library = None

    def __enter__(self) -> Registration:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.remove()


def register() -> Registration:
    """Serve torch's scaled_dot_product_attention from now on, on the CPU and on CUDA.

    torch 2.13 and newer list it too: ``torch.nn.attention.activate_flash_attention_impl("flashattn")`` does
    the same once this module is imported.

    Returns:
        A handle: ``remove()`` ends it, and so does the end of ``with register():``.
    """
    return Registration()


def serves(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> bool:
    """Whether a call is served here rather than by torch.

    Served: (B, H, S, D) or (B, S, D) float32, bfloat16, float16 and float64 with equal batches and heads, or
    GQA where it is asked for; any strides; a mask or a bias that broadcasts over all but the keys, with
    gradient; is_causal, top-left; dropout below 1.  Left to torch: shapes that broadcast, empty tensors,
    nested, sparse and distributed tensors, forward-mode AD, torch.func, and everything while
    ``torch.backends.cuda.enable_flash_sdp(False)`` or ``torch.nn.attention.sdpa_kernel`` rules
    FLASH_ATTENTION out.
    """
    device, dtype = query.device, query.dtype
    for t in (query, key, value, *(() if attn_mask is None else (attn_mask,))):
        if type(t) not in PLAIN or t.layout is not torch.strided or t.device != device:
            return False
    if not torch.backends.cuda.flash_sdp_enabled() or _transformed():
        return False
    if dtype not in DTYPES or key.dtype != dtype or value.dtype != dtype:
        return False
    if not 0 <= dropout_p < 1 or (scale is not None and not math.isfinite(scale)):
        return False
    of_q, of_k, of_v = query.shape, key.shape, value.shape
    if len(of_q) not in (3, 4) or len(of_k) != len(of_q) or 0 in of_q or 0 in of_k or 0 in of_v:
        return False
    if of_q[0] != of_k[0] or of_q[-1] != of_k[-1] or of_k[:-1] != of_v[:-1]:
        return False
    if len(of_q) == 4 and of_q[1] != of_k[1] and (not enable_gqa or of_q[1] % of_k[1] != 0):
        return False
    return attn_mask is None or not is_causal and _serves_mask(attn_mask, query, key)


def _transformed() -> bool:
    """Inside forward-mode AD or torch.func, which have rules for torch's own operators."""
    return torch.autograd.forward_ad._current_level >= 0 or bool(torch._C._functorch.peek_interpreter_stack())


def _serves_mask(mask: Tensor, query: Tensor, key: Tensor) -> bool:
    """A mask that the kernels read as it lies, up to dimensions that are missing in front."""
    if mask.dtype not in (torch.bool, torch.float32, query.dtype) or not 2 <= mask.dim() <= query.dim():
        return False
    if mask.shape[-1] != key.shape[-2]:
        return False
    full = query.shape[:-1]
    return all(size in (1, whole) for size, whole in zip(reversed(mask.shape[:-1]), reversed(full)))


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """What torch calls in place of its own: arguments and result of scaled_dot_product_attention."""
    if not serves(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa):
        return OPERATOR.decompose(query, key, value, attn_mask, dropout_p, is_causal, scale=scale,
                                  enable_gqa=enable_gqa)
    one_head = query.dim() == 3
    if one_head:
        query, key, value = query.unsqueeze(1), key.unsqueeze(1), value.unsqueeze(1)
    window = None
    if is_causal:  # top-left: query i sees the keys up to i
        len_q, len_k = query.shape[2], key.shape[2]
        if len_q < len_k:
            key, value = key[:, :, :len_q], value[:, :, :len_q]
        window = (None, max(len_q - len_k, 0))
    options = {} if attn_mask is None else _mask(attn_mask, one_head)
    out = functional.forward(_rows_first(query), _rows_first(key), _rows_first(value), window=window,
                             scale=scale, dropout_p=dropout_p, **options).transpose(1, 2)
    return out.squeeze(1) if one_head else out


def _mask(mask: Tensor, one_head: bool) -> dict[str, Tensor]:
    """The option that a mask becomes, in four dimensions."""
    if one_head and mask.dim() == 3:
        mask = mask.unsqueeze(1)
    mask = mask[(None,) * (4 - mask.dim())]
    if mask.stride(-1) != 1:
        mask = mask.contiguous()
    return {"mask" if mask.dtype == torch.bool else "bias": mask}


def _rows_first(t: Tensor) -> Tensor:
    """(B, S, H, D) of (B, H, S, D), copied only where the last dimension is not contiguous."""
    return (t if t.stride(-1) == 1 else t.contiguous()).transpose(1, 2)


if hasattr(torch.nn.attention, "register_flash_attention_impl"):
    torch.nn.attention.register_flash_attention_impl(NAME, register_fn=register)
