"""What is compared.  A peer says whether it is here and whether it takes a shape, and prepares one call."""

from collections.abc import Callable
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

    def __init__(self, name: str):
        self.name = name

    def missing(self) -> str:
        """Why it cannot run on this machine; empty if it can."""
        return ""

    def refuses(self, shape: Shape) -> str:
        """Why it does not compute this shape; empty if it does."""
        return ""

    def bind(self, shape: Shape) -> Attend:
        """The function (q, k, v) -> out of this shape, with nothing between it and the implementation."""
        raise NotImplementedError

    def layout(self, tensor: Tensor) -> Tensor:
        """A copy from (B, S, H, D) in the layout that the peer likes best, or back; never timed."""
        return tensor.transpose(1, 2).contiguous() if self.heads_first else tensor.clone()

    def results(self, returned: Tensor | tuple[Tensor, ...]) -> list[Tensor]:
        """What a prepared call returned, in (B, S, H, D)."""
        tensors = returned if isinstance(returned, tuple) else (returned,)
        return [self.layout(tensor.detach()) for tensor in tensors]

    def prepare(self, shape: Shape, inputs: tuple[Tensor, ...]) -> Callable[[], Tensor | tuple[Tensor, ...]]:
        """One timed call of the shape: out, or (dq, dk, dv), in the peer's layout."""
        q, k, v, dout = (self.layout(tensor) for tensor in inputs)
        attend = self.bind(shape)
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

    def bind(self, shape: Shape) -> Attend:
        import flashattn
        function = flashattn.decode if shape.op == "decode" else flashattn.forward
        return partial(function, causal=shape.causal, window=shape.window)


class Sdpa(Peer):
    """torch's scaled_dot_product_attention, on any device; without backends torch chooses one itself."""

    heads_first = True

    def __init__(self, name: str, *backends: SDPBackend):
        super().__init__(name)
        self.backends = list(backends)

    def refuses(self, shape: Shape) -> str:
        if shape.window is not None:
            return "no window without a dense mask"
        if shape.causal and shape.Sq not in (1, shape.Sk):
            return "is_causal aligns top-left: another problem when Sq != Sk"
        return ""

    def bind(self, shape: Shape) -> Attend:
        attend = partial(F.scaled_dot_product_attention, is_causal=shape.causal and shape.Sq > 1,
                         enable_gqa=shape.Hq != shape.Hk)
        if not self.backends:
            return attend

        def forced(q, k, v):
            with sdpa_kernel(self.backends):
                return attend(q, k, v)

        return forced


class Plain(Peer):
    """Standard attention, every step a torch call and the whole score matrix in memory."""

    heads_first = True

    def refuses(self, shape: Shape) -> str:
        return "a query without a key is NaN" if shape.Sq - shape.Sk > shape.reach[1] else ""

    def bind(self, shape: Shape) -> Attend:
        hidden = None
        if shape.causal or shape.window is not None:
            left, right = shape.reach
            offset = torch.arange(shape.Sk) - (torch.arange(shape.Sq)[:, None] + shape.Sk - shape.Sq)
            hidden = (offset < -left) | (offset > right)
        group = shape.Hq // shape.Hk

        def attend(q, k, v):
            if group > 1:
                k, v = (tensor.repeat_interleave(group, 1) for tensor in (k, v))
            scores = q @ (k * shape.D**-0.5).transpose(2, 3)
            if hidden is not None:
                scores = scores.masked_fill(hidden, float("-inf"))
            return scores.softmax(-1) @ v

        return attend


PEERS = {peer.name: peer for peer in (
    Ours("ours"), Sdpa("sdpa"), Sdpa("sdpa_flash", SDPBackend.FLASH_ATTENTION), Plain("plain"))}


def present(names: list[str]) -> list[Peer]:
    """The named peers that can run here; prints why the others cannot."""
    for name in names:
        if name not in PEERS:
            raise SystemExit(f"peer {name!r}: expected one of {', '.join(PEERS)}")
        if reason := PEERS[name].missing():
            print(f"without {name}: {reason}")
    return [PEERS[name] for name in names if not PEERS[name].missing()]
