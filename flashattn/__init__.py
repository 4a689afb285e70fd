"""Exact attention: forward, backward and split-KV decode as hand-written kernels."""

from . import _load, ops
from ._build import VERSION as __version__
from .dispatch import debug_checks, explain, force_family
from .functional import backward, decode, forward, merge
from .traffic import traffic

if _load.problem is None:
    ops.register("flashattn")

__all__ = ["__version__", "backward", "debug_checks", "decode", "explain", "force_family", "forward", "merge",
           "traffic"]
