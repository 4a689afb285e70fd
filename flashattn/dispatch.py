"""Which kernel serves a call, and how to force another one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from . import _load, functional

OPS = ("forward", "backward", "decode")
T = TypeVar("T")


@dataclass(frozen=True)
class Explanation:
    """What :func:`explain` found.  ``str()`` is a readable text.

    Attributes:
        op: forward, backward or decode.
        kernel: name of the row that serves the call, None if no row does.
        rejected: name and reason of each row that was asked before it.
    """

    op: str
    kernel: str | None
    rejected: dict[str, str]

    def __str__(self) -> str:
        lines = [f"{self.op}: {self.kernel or 'no kernel serves this call'}"]
        return "\n".join(lines + [f"  not {name}: {reason}" for name, reason in self.rejected.items()])


def explain(q: Tensor, k: Tensor, v: Tensor | None = None, *, op: str = "forward", **options) -> Explanation:
    """Which kernel serves a call, and why not the ones that the dispatcher asks before it.

    Args:
        q, k, v: tensors as for :func:`flashattn.forward` or :func:`flashattn.decode`; nothing is computed.
        op: "forward", "backward" or "decode".
        options: options of that function.

    Raises:
        ValueError: op is none of these.
        ValueError, TypeError: as that function.
    """
    if op not in OPS:
        raise ValueError(f"op is {op!r}: expected one of {OPS}")
    if options.get("dropout_p"):
        options.setdefault("seed", 0)

    def call() -> None:
        if op == "decode":
            functional.decode(q, k, v, **options)
        elif op == "forward":
            functional.forward(q, k, k if v is None else v, **options)
        else:
            out, lse = functional.forward(q, k, k if v is None else v, return_lse=True, **options)
            functional.backward(out, q, k, k if v is None else v, out, lse, **options)

    with torch.no_grad():
        candidates = _load.extension().explain(call)
    rejected = {}
    for name, reason in candidates:
        if not reason:
            return Explanation(op, name, rejected)
        rejected[name] = reason
    return Explanation(op, None, rejected)


@contextmanager
def force_family(name: str) -> Iterator[None]:
    """Let only the kernels of one family serve inside the ``with`` block, in the whole process: for tests and
    A/B runs.

    Args:
        name: a family of :func:`families`, for example "cpu_baseline", or one kernel, for example
            "forward_cpu_baseline", which leaves the other operations without any.

    Raises:
        ValueError: this build has no such family or kernel.
    """
    extension = _load.extension()
    if name not in families() and name not in (row["name"] for row in extension.instances()):
        raise ValueError(f"family {name!r}: expected one of {families()}, or the name of a kernel")
    with _setting(extension.forced_family, extension.force_family, name):
        yield


@contextmanager
def debug_checks(on: bool = True) -> Iterator[None]:
    """Check the contents of length, index and page tensors of CUDA calls too, in the whole process.

    On the CPU they are always checked.  On CUDA kernels clamp them instead, because reading them on the host
    waits for the device; so this is slow, and a call under stream capture fails.

    Args:
        on: False switches the checks off inside the block.
    """
    extension = _load.extension()
    with _setting(extension.debug_checks, extension.set_debug_checks, on):
        yield


@contextmanager
def _setting(read: Callable[[], T], write: Callable[[T], None], value: T) -> Iterator[None]:
    """A setting of the process has this value inside the ``with`` block."""
    before = read()
    write(value)
    try:
        yield
    finally:
        write(before)


def families() -> list[str]:
    """Families of kernels that this build holds, in the dispatcher's order."""
    return list(dict.fromkeys(row["family"] for row in _load.extension().instances()))
