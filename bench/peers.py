"""What is compared.  A peer says whether it is here and whether it takes a shape, and prepares one call."""

import importlib
import importlib.util
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from .shapes import Shape

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class Peer:
    """One implementation of attention.  A subclass gives ``bind`` and, where it has limits, the reasons."""

    heads_first = False  # takes and returns (B, H, S, D) rather than (B, S, H, D)
    standard = False  # writes the score matrix to memory

    def __init__(self, name: str, text: str = ""):
        self.name = name
        self.text = text  # what it is, for readers of a table

    def missing(self) -> str:
        """Why it cannot run on this machine; empty if it can."""
        return ""

    def refuses(self, shape: Shape) -> str:
        """Why it does not compute this shape; empty if it does."""
        return ""

    def bind(self, shape: Shape, device: torch.device) -> Attend:
        """The function (q, k, v) -> out of this shape, with nothing between it and the implementation."""
        raise NotImplementedError

    def setting(self) -> AbstractContextManager:
        """Around calls, outside of their time."""
        return nullcontext()

    def kernel(self, shape: Shape, inputs: tuple[Tensor, ...]) -> str:
        """The name of the kernel that serves the shape, where it can be asked for."""
        return ""

    def layout(self, tensor: Tensor) -> Tensor:
        """A copy from (B, S, H, D) in the layout that the peer likes best, or back; never timed.

        Packed tensors are the same without B.
        """
        tensor = tensor.transpose(-3, -2) if self.heads_first else tensor
        return tensor.clone(memory_format=torch.contiguous_format)

    def results(self, returned: Tensor | tuple[Tensor, ...]) -> list[Tensor]:
        """What a prepared call returned, in (B, S, H, D)."""
        tensors = returned if isinstance(returned, tuple) else (returned,)
        return [self.layout(tensor.detach()) for tensor in tensors]

    def prepare(self, shape: Shape, inputs: tuple[Tensor, ...]) -> Callable[[], Tensor | tuple[Tensor, ...]]:
        """One timed call of the shape: out, or (dq, dk, dv), in the peer's layout."""
        q, k, v, dout = (self.layout(tensor) for tensor in inputs)
        attend = self.bind(shape, q.device)
        if not shape.differentiates:
            return lambda: attend(q, k, v)
        leaves = [tensor.requires_grad_() for tensor in (q, k, v)]
        if shape.op == "forward+backward":
            return lambda: torch.autograd.grad(attend(q, k, v), leaves, dout)
        out = attend(q, k, v)
        return lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True)


class Ours(Peer):
    def missing(self) -> str:
        try:
            from flashattn import _load
            _load.ops()
        except ImportError as error:
            return str(error)
        return ""

    def options(self, shape: Shape, device: torch.device) -> dict:
        chosen = {"causal": shape.causal, "window": shape.window}
        if shape.softcap:
            chosen["softcap"] = shape.softcap
        if shape.alibi:
            chosen["alibi_slopes"] = shape.slopes(device)
        if shape.deterministic:
            chosen["deterministic"] = True
        if shape.packed:
            chosen |= {"cu_seqlens_q": shape.bounds(device), "max_seqlen_q": shape.Sq,
                       "cu_seqlens_k": shape.bounds(device), "max_seqlen_k": shape.Sk}
        return chosen

    def bind(self, shape: Shape, device: torch.device) -> Attend:
        import flashattn
        return partial(flashattn.forward, **self.options(shape, device))

    def prepare(self, shape: Shape, inputs: tuple[Tensor, ...]) -> Callable[[], Tensor | tuple[Tensor, ...]]:
        if shape.op != "decode":
            return super().prepare(shape, inputs)
        import flashattn
        tensors, options = self.decoding(shape, inputs)
        return partial(flashattn.decode, *tensors, **options)

    def decoding(self, shape: Shape, inputs: tuple[Tensor, ...]) -> tuple[list[Tensor | None], dict]:
        """q and caches of their own, the options: of a call with the result of attention over the inputs."""
        q, k, v, _ = inputs
        caches, options = [k.clone(), None if shape.latent else v.clone()], self.options(shape, q.device)
        before = torch.tensor(shape.lengths or [shape.Sk] * shape.B, dtype=torch.int32, device=q.device)
        if shape.latent:
            options["v_head_dim"] = shape.Dv
        if shape.append:
            options["k_new"], options["v_new"] = (t[:, -shape.Sq:].clone() for t in (k, v))
            for cache in caches:
                cache[:, -shape.Sq:] = float("nan")
            angles = torch.zeros(shape.Sk, shape.D // 2, device=q.device)  # rotations that change nothing
            options |= {"rotary_cos": angles.cos(), "rotary_sin": angles.sin()}
            before -= shape.Sq
        if shape.append or shape.lengths:
            options["cache_seqlens"] = before
        if shape.page_size:
            pages = [t.unflatten(1, (-1, shape.page_size)).flatten(0, 1) for t in caches]
            order = torch.randperm(len(pages[0]), device=q.device)
            caches = [torch.empty_like(t).index_copy_(0, order, t) for t in pages]
            options["page_table"] = order.int().view(shape.B, -1)
        return [q.clone(), *caches], options

    def kernel(self, shape: Shape, inputs: tuple[Tensor, ...]) -> str:
        import flashattn
        tensors, options = inputs[:3], self.options(shape, inputs[0].device)
        if shape.op == "decode":
            tensors, options = self.decoding(shape, inputs)
        op = shape.op.rpartition("+")[2]
        return flashattn.explain(*tensors, op=op, **options).kernel or ""


class Kernel(Ours):
    """Ours by the kernel of this name, whatever the dispatcher would choose: compares those of one build."""

    def missing(self) -> str:
        if why := super().missing():
            return why
        try:
            with self.setting():
                return ""
        except ValueError:
            return "this build has no such kernel"

    def setting(self) -> AbstractContextManager:
        import flashattn
        return flashattn.force_family(self.name)

    def kernel(self, shape: Shape, inputs: tuple[Tensor, ...]) -> str:
        return self.name


class Sdpa(Peer):
    """torch's scaled_dot_product_attention, on any device; without a backend torch chooses one itself."""

    heads_first = True

    def __init__(self, name: str, text: str = "", backend: SDPBackend | None = None):
        super().__init__(name, text)
        self.backend = backend
        self.standard = backend is SDPBackend.MATH

    def missing(self) -> str:
        if self.backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION):
            if not torch.cuda.is_available():
                return "no CUDA device"
        if self.backend is SDPBackend.CUDNN_ATTENTION and not torch.backends.cudnn.is_available():
            return "this torch has no cuDNN"
        return ""

    def refuses(self, shape: Shape) -> str:
        if shape.window is not None:
            return "no window without a dense mask"
        if shape.softcap:
            return "no soft cap"
        if shape.alibi:
            return "no ALiBi without a dense bias"
        if shape.deterministic:
            return "deterministic by a setting of all of torch only"
        if shape.lengths:
            return "one length for the whole batch"
        if shape.page_size or shape.append:
            return "neither pages nor an append"
        if shape.causal and shape.Sq not in (1, shape.Sk):
            return "is_causal aligns top-left: another problem when Sq != Sk"
        if self.backend is SDPBackend.FLASH_ATTENTION and shape.D != shape.Dv:
            return "no other head dim for v"
        return ""

    def bind(self, shape: Shape, device: torch.device) -> Attend:
        return partial(F.scaled_dot_product_attention, is_causal=shape.causal and shape.Sq > 1,
                       enable_gqa=shape.Hq != shape.Hk)

    def setting(self) -> AbstractContextManager:
        return sdpa_kernel(self.backend) if self.backend else nullcontext()


class Package(Peer):
    """A Python package for CUDA devices; a subclass gives what it takes and ``bind``."""

    module = ""  # that has the functions
    install = ""
    capabilities = ()  # major numbers of the compute capabilities that it has kernels for; empty: not checked

    def load(self):
        return importlib.import_module(self.module)

    def missing(self) -> str:
        if not torch.cuda.is_available():
            return "no CUDA device"
        if self.capabilities and torch.cuda.get_device_capability()[0] not in self.capabilities:
            numbers = " and ".join(map(str, self.capabilities))
            return f"it has kernels for compute capability {numbers} only"
        try:
            self.load()
        except Exception as error:  # a library built for another torch fails in its own ways
            return f"{reason(error)} ({self.install})"
        return ""


def first(function: Callable, **options) -> Attend:
    """The function with these options; of a tuple (out, lse) that it returns, the output."""
    def attend(q, k, v):
        returned = function(q, k, v, **options)
        return returned[0] if isinstance(returned, tuple) else returned
    return attend


class Fa2(Package):
    """FlashAttention-2 as its package flash-attn builds it."""

    module, install = "flash_attn", "pip install flash-attn"
    decoding = "flash_attn_with_kvcache"  # the function of it

    def refuses(self, shape: Shape) -> str:
        if shape.dtype not in ("float16", "bfloat16"):
            return f"no {shape.dtype}"
        if shape.page_size or shape.append or shape.op == "decode" and shape.lengths:
            return "decode of whole caches only"
        if shape.D != shape.Dv or shape.D > 256 or shape.D % 8:
            return "head dims are multiples of 8 up to 256, the same for v"
        return ""

    def options(self, shape: Shape, device: torch.device) -> dict:
        chosen = {"causal": shape.causal, "softcap": shape.softcap}
        if shape.window is not None:
            chosen["window_size"] = shape.window
        if shape.alibi:
            chosen["alibi_slopes"] = shape.slopes(device)
        if shape.deterministic:
            chosen["deterministic"] = True
        return chosen

    def bind(self, shape: Shape, device: torch.device) -> Attend:
        package, options = self.load(), self.options(shape, device)
        if not shape.packed:
            function = self.decoding if shape.op == "decode" else "flash_attn_func"
            return first(getattr(package, function), **options)
        bounds = shape.bounds(device)
        return first(package.flash_attn_varlen_func, cu_seqlens_q=bounds, cu_seqlens_k=bounds,
                     max_seqlen_q=shape.Sq, max_seqlen_k=shape.Sk, **options)


class Fa4(Fa2):
    """FlashAttention-4, package flash-attn-4: compiles at the first call of a kind."""

    module, install, capabilities = "flash_attn.cute", "pip install flash-attn-4", (9, 10, 11, 12)

    def refuses(self, shape: Shape) -> str:
        if shape.op == "decode":
            return "no decode"
        if shape.alibi:
            return "no ALiBi"
        if shape.D != shape.Dv and (shape.D, shape.Dv) != (192, 128):
            return "not with this head dim of v"
        return super().refuses(replace(shape, Dv=shape.D))


class Fa3(Fa2):
    """FlashAttention-3: its package flash-attn-3, or PyPI's fa3-fwd 0.0.3.

    The latter is forward only, without float16 and windows.
    """

    module, install = "fa3_fwd_interface", "pip install --no-deps fa3-fwd==0.0.3"
    decoding = "flash_attn_func"
    capabilities = (8, 9)

    def load(self):
        return importlib.import_module("flash_attn_interface" if self.whole else self.module)

    @property
    def whole(self) -> bool:
        """Whether it is the package with everything in it."""
        return bool(importlib.util.find_spec("flash_attn_interface"))

    def refuses(self, shape: Shape) -> str:
        if not self.whole:
            if shape.differentiates:
                return "forward only"
            if shape.dtype != "bfloat16":
                return f"built without {shape.dtype}"
            if shape.window is not None:
                return "built without windows"
        if shape.alibi:
            return "no ALiBi"
        if shape.D != shape.Dv and not (128 < shape.D <= 192 and 96 < shape.Dv <= 128
                                        or shape.D <= 64 and shape.Dv <= 512):
            return "not with this head dim of v"
        return super().refuses(replace(shape, Dv=shape.D))

    def options(self, shape: Shape, device: torch.device) -> dict:
        if shape.packed:
            return super().options(shape, device)
        splits = 0 if shape.op == "decode" else 1  # 0: it chooses
        return {**super().options(shape, device), "num_splits": splits}


class Xformers(Package):
    """xFormers' memory_efficient_attention, which chooses among its kernels."""

    module, install = "xformers.ops", "pip install xformers"

    def refuses(self, shape: Shape) -> str:
        if shape.window is not None or shape.softcap or shape.alibi or shape.deterministic or shape.lengths:
            return "plain and causal batches only"
        if shape.page_size or shape.append or shape.Hq != shape.Hk:
            return "neither grouped heads nor pages nor an append"
        return ""

    def bind(self, shape: Shape, device: torch.device) -> Attend:
        ops = self.load()
        masked = shape.causal and shape.Sq > 1
        bias = ops.fmha.attn_bias.LowerTriangularFromBottomRightMask() if masked else None
        return partial(ops.memory_efficient_attention, attn_bias=bias)


class Flex(Peer):
    """torch's FlexAttention, compiled for each shape: only where the options need it."""

    heads_first = True

    def missing(self) -> str:
        return "" if torch.cuda.is_available() else "no CUDA device"

    def refuses(self, shape: Shape) -> str:
        if shape.window is None and not shape.softcap and not shape.alibi:
            return "compiles for seconds: timed with windows, soft caps and ALiBi only"
        if shape.op == "decode" or shape.lengths or shape.deterministic or shape.graph:
            return "neither decode nor packed batches nor graphs"
        return ""

    def compiled(self, function: Callable) -> Callable:
        torch._dynamo.reset()  # it gives up after a few shapes
        return torch.compile(function, dynamic=False)

    def bind(self, shape: Shape, device: torch.device) -> Attend:
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention
        left, right = shape.reach
        centre = shape.Sk - shape.Sq
        slopes = shape.slopes(device)
        scored = shape.softcap or shape.alibi

        def mask(b, h, i, j):
            return (j >= i + centre - left) & (j <= i + centre + right)

        def score(s, b, h, i, j):
            if shape.softcap:
                s = shape.softcap * torch.tanh(s / shape.softcap)
            return s - slopes[h] * (i + centre - j).abs() if shape.alibi else s

        masked = shape.causal or shape.window is not None
        return partial(self.compiled(flex_attention), score_mod=score if scored else None,
                       enable_gqa=shape.Hq != shape.Hk,
                       block_mask=create_block_mask(mask, None, None, shape.Sq, shape.Sk, device=device)
                       if masked else None)


class Plain(Peer):
    """Standard attention, every step a torch call and the whole score matrix in memory."""

    heads_first = standard = True

    def refuses(self, shape: Shape) -> str:
        return "a query without a key is NaN" if shape.Sq - shape.Sk > shape.reach[1] else ""

    def bind(self, shape: Shape, device: torch.device) -> Attend:
        if shape.lengths:
            each = [self.bind(sequence, device) for sequence in shape.sequences()]

            def parts(t):
                if shape.packed:
                    return t.split(shape.lengths, -2)
                return [part[..., :S, :] for part, S in zip(t.split(1), shape.lengths)]

            return lambda q, k, v: torch.cat([
                attend(*part) for attend, *part in
                zip(each, *(parts(tensor) for tensor in (q, k, v)), strict=True)], -2 if shape.packed else 0)
        hidden = bias = None
        if shape.causal or shape.window is not None or shape.alibi:
            left, right = shape.reach
            centre = torch.arange(shape.Sq, device=device)[:, None] + shape.Sk - shape.Sq
            offset = torch.arange(shape.Sk, device=device) - centre
            hidden = (offset < -left) | (offset > right)
            bias = -shape.slopes(device)[:, None, None] * offset.abs() if shape.alibi else None
        group = shape.Hq // shape.Hk

        def attend(q, k, v):
            if group > 1:
                k, v = (tensor.repeat_interleave(group, -3) for tensor in (k, v))
            scores = q @ (k * shape.D**-0.5).transpose(-2, -1)
            if shape.softcap:
                scores = shape.softcap * (scores / shape.softcap).tanh()
            if bias is not None:
                scores = (scores + bias).to(scores.dtype)
            if hidden is not None:
                scores = scores.masked_fill(hidden, float("-inf"))
            return scores.softmax(-1) @ v

        return attend


def reason(error: BaseException) -> str:
    """An error in one line."""
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]


PEERS = {peer.name: peer for peer in (
    Ours("ours"),
    Sdpa("sdpa", "torch's scaled_dot_product_attention"),
    Sdpa("sdpa_flash", "FlashAttention-2, torch's FLASH_ATTENTION", SDPBackend.FLASH_ATTENTION),
    Sdpa("cudnn", "cuDNN, torch's CUDNN_ATTENTION", SDPBackend.CUDNN_ATTENTION),
    Sdpa("sdpa_efficient", "torch's EFFICIENT_ATTENTION", SDPBackend.EFFICIENT_ATTENTION),
    Sdpa("sdpa_math", "torch's MATH", SDPBackend.MATH),
    Fa2("fa2", "FlashAttention-2, package flash-attn"),
    Fa3("fa3", "FlashAttention-3, PyPI's fa3-fwd"),
    Fa4("fa4", "FlashAttention-4, package flash-attn-4"),
    Flex("flex", "FlexAttention, compiled"),
    Xformers("xformers", "xFormers"),
    Plain("plain", "standard attention"))}


def present(names: list[str]) -> tuple[list[Peer], list[dict]]:
    """The named peers that can run here, and why the others cannot, which is printed too.

    A name of an operation with more behind it is one of our kernels.
    """
    here, missing = [], []
    for name in names:
        peer = Kernel(name) if name.startswith(("forward_", "backward_", "decode_")) else PEERS.get(name)
        if peer is None:
            raise SystemExit(f"peer {name!r}: expected the name of a kernel or one of {', '.join(PEERS)}")
        if why := peer.missing():
            print(f"without {name}: {why}")
            missing.append({"peer": name, "reason": why})
        else:
            here.append(peer)
    return here, missing
