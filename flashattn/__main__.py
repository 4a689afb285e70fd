"""``python -m flashattn doctor | demo | explain``"""

from __future__ import annotations

import argparse
import os
import platform
import re
import sys
from pathlib import Path
from types import ModuleType

import torch

import flashattn

from . import _build, _load, dispatch

DTYPES = ("float32", "bfloat16", "float16", "float64")
DRIVER = Path("/proc/driver/nvidia/version")


def doctor() -> int:
    """Print what is installed and what serves which call.  0 if all is well, otherwise 1 and what to do."""
    try:
        compiler = _build.compiler()
    except _build.BuildError as error:
        compiler = f"none that flashattn.jit could use: {error}"
    show("flashattn", f"{flashattn.__version__} in {os.path.dirname(flashattn.__file__)}")
    show("python", f"{platform.python_version()}, {platform.platform()}")
    show("torch", f"{torch.__version__}, CUDA {torch.version.cuda or 'no'}")
    show("driver", driver())
    cards = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    for card in cards:
        major, minor = torch.cuda.get_device_capability(card)
        show(str(card), f"{torch.cuda.get_device_name(card)}, compute capability {major}.{minor}")
    show("cpu", f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}, "
                f"{torch.get_num_threads()} threads")
    show("compiler", compiler)
    try:
        extension = _load.extension()
    except ImportError as error:
        show("verdict", f"BROKEN: {error}")
        return 1
    info = extension.build_info()
    show("built with", ", ".join(f"{name} {value}" for name, value in info.items() if name != "cuda"))
    show("images", "; ".join(f"{family}: {', '.join(images)}" for family, images in info["cuda"].items())
                   or "no CUDA kernels")
    show("families", ", ".join(dispatch.families()))
    problems = [] if info["openmp"] else ["compiled without OpenMP: kernels use one thread"]
    if cards and not info["cuda"]:
        problems.append(f"{len(cards)} CUDA devices, but no CUDA kernels were built. Run in flashattn's "
                        f"source tree:\n  FLASHATTN_CUDA=on {_build.INSTALL}")
    for device in (torch.device("cpu"), *(cards if info["cuda"] else ())):
        problems += show_kernels(extension, device) + check_arithmetic(device)
    show("verdict", f"BROKEN: {'; '.join(problems)}" if problems else "all is well")
    return bool(problems)


def driver() -> str:
    """NVIDIA's kernel driver, as it tells itself."""
    try:
        text = DRIVER.read_text()
    except OSError:
        return "none of NVIDIA's"
    version = re.search(r"\d+\.\d+(\.\d+)?", text)
    return f"NVIDIA {version[0]}" if version else text.partition("\n")[0]


def show_kernels(extension: ModuleType, device: torch.device) -> list[str]:
    """Print what serves plain calls with head dim 64; what nothing serves is a problem on the CPU."""
    where, facts = "", {}
    if device.type == "cuda":
        capability, _, shared_bytes = extension.cuda_device(device.index)
        where, facts = f" ({device})", {"capability": capability, "shared_bytes": shared_bytes}
    missing = []
    for op in dispatch.OPS:
        for dtype in DTYPES:
            needs = ["own_values", "few_rows"] if op == "decode" else []
            candidates = extension.candidates(op, device.type, dtype, needs=needs, **facts)
            serving = next((name for name, why_not in candidates if not why_not), None)
            show(op, f"{dtype:9} {serving or 'no kernel'}{where}")
            if serving is None and device.type == "cpu":
                missing.append(f"no kernel serves {op} in {dtype} here")
    return missing


def check_arithmetic(device: torch.device) -> list[str]:
    """A known answer: with equal scores out is the mean of V and the LSE the logarithm of the keys."""
    q, k = torch.zeros(1, 3, 2, 16, device=device), torch.zeros(1, 4, 2, 16, device=device)
    v = torch.arange(4.0, device=device).view(1, 4, 1, 1).repeat(1, 1, 2, 16)
    try:
        out, lse = (result.cpu() for result in flashattn.forward(q, k, v, return_lse=True))
    except (NotImplementedError, RuntimeError) as error:
        return [f"a forward on {device} fails: {error}"]
    right = torch.allclose(out, torch.tensor(1.5)) and torch.allclose(lse, torch.tensor(4.0).log())
    return [] if right else [f"a forward with a known answer came out wrong on {device}"]


def explain(options: argparse.Namespace) -> int:
    """Print which kernel serves a call of these shapes."""
    dtype = getattr(torch, options.dtype)
    heads_k, width_v = options.kv_heads or options.heads, options.head_dim_v or options.head_dim
    seqlen_k = options.seqlen_k or options.seqlen_q
    q = torch.empty(options.batch, options.seqlen_q, options.heads, options.head_dim, dtype=dtype)
    k = q.new_empty(options.batch, seqlen_k, heads_k, options.head_dim)
    v = q.new_empty(options.batch, seqlen_k, heads_k, width_v)
    print(flashattn.explain(q, k, v, causal=options.causal, window=options.window, softcap=options.softcap,
                            dropout_p=options.dropout))
    return 0


def show(name: str, text: str) -> None:
    print(f"{name:11} {text}")


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="python -m flashattn", description="exact attention for PyTorch")
    commands = top.add_subparsers(dest="command", required=True)
    commands.add_parser("doctor", help="what is installed, what serves which call, and what is broken")
    commands.add_parser("demo", help="a sentence encoder with this attention, accuracy, and memory")
    call = commands.add_parser("explain", help="which kernel serves a call of these shapes, and why no other")
    for name, default in (("batch", 1), ("seqlen-q", 1024), ("heads", 8), ("head-dim", 64)):
        call.add_argument(f"--{name}", type=int, default=default, help=f"default {default}")
    for name, same in (("seqlen-k", "seqlen-q"), ("kv-heads", "heads"), ("head-dim-v", "head-dim")):
        call.add_argument(f"--{name}", type=int, help=f"default: {same}")
    call.add_argument("--dtype", choices=DTYPES, default="float32")
    call.add_argument("--causal", action="store_true")
    call.add_argument("--window", type=int, nargs=2, metavar=("LEFT", "RIGHT"), help="-1: no limit")
    call.add_argument("--softcap", type=float, default=0.0)
    call.add_argument("--dropout", type=float, default=0.0)
    return top


def main() -> int:
    options = parser().parse_args()
    if options.command == "doctor":
        return doctor()
    if options.command == "explain":
        return explain(options)
    from . import demo

    return demo.main()


if __name__ == "__main__":
    sys.exit(main())
