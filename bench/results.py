"""Records of runs: the machine, files under bench/results, tables, and the figures in the README."""

import csv
import json
import math
import os
import platform
import re
import subprocess
from collections.abc import Iterable
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path

import torch

from .memory import METHOD
from .shapes import Shape

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(r"(?<=<!-- bench:begin -->\n).*?(?=<!-- bench:end -->)", re.DOTALL)


def machine() -> dict:
    try:
        model = re.search(r"model name\s*:\s*(.*)", Path("/proc/cpuinfo").read_text())[1]
    except (OSError, TypeError):
        model = platform.processor() or platform.machine()
    return {"cpu": model, "capability": torch.backends.cpu.get_cpu_capability(), "cores": os.cpu_count(),
            "threads": torch.get_num_threads(), "load": os.getloadavg()[0], "torch": torch.__version__,
            "python": platform.python_version(), "system": f"{platform.system()} {platform.machine()}",
            "cards": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]}


def commit() -> str:
    """The commit of the sources, with -dirty if they differ from it (recorded figures do not count)."""
    def git(*arguments):
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
        return done.stdout.strip() if done.returncode == 0 else ""
    changed = git("status", "--porcelain", "--", ".", ":!bench/results", ":!README.md")
    return (git("rev-parse", "--short=12", "HEAD") or "none") + ("-dirty" if changed else "")


def row(shape: Shape, measured: dict) -> dict:
    """One line of a result: the problem, then what was measured."""
    return {**asdict(shape), "window": list(shape.window or ()), **measured}


def add_ratios(rows: list[dict]) -> None:
    """ratio = time of the peer / ours on the same shape: above 1, ours is faster."""
    ours = {r["name"]: r["seconds"] for r in rows if r["peer"] == "ours"}
    for r in rows:
        if r["peer"] != "ours" and r["name"] in ours:
            r["ratio"] = r["seconds"] / ours[r["name"]]


def record(name: str, command: str, rows: list[dict], sources: str | None = None) -> dict:
    """What is kept of a run; ``sources`` is their commit where there is no repository to ask."""
    date = datetime.now(timezone.utc).isoformat(timespec="seconds")
    return {"name": name, "command": command, "date": date, "commit": sources or commit(),
            "machine": machine(), "rows": rows}


def save(result: dict, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{result['name']}.json").write_text(json.dumps(result, indent=1) + "\n")
    with open(folder / f"{result['name']}.csv", "w", newline="") as file:
        fields = dict.fromkeys(key for r in result["rows"] for key in r)
        writer = csv.DictWriter(file, fields, lineterminator="\n")
        writer.writeheader()
        writer.writerows(result["rows"])


def table(header: Iterable[str], lines: Iterable[Iterable[str]]) -> str:
    """A Markdown table that is also readable as text."""
    grid = [list(header), *map(list, lines)]
    widths = [max(map(len, column)) for column in zip(*grid, strict=True)]
    grid.insert(1, ["-" * width for width in widths])
    return "\n".join("| " + " | ".join(map(str.ljust, cells, widths)) + " |" for cells in grid)


def duration(seconds: float) -> str:
    if seconds < 1e-3:
        return f"{seconds * 1e6:.3g} us"
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def geometric_mean(values: list[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def grouped(rows: Iterable[dict], *fields: str) -> dict[tuple, list[dict]]:
    """Rows by the values of some fields, in the order of the first of each."""
    groups = {}
    for r in rows:
        groups.setdefault(tuple(r[field] for field in fields), []).append(r)
    return groups


def timing_table(rows: list[dict]) -> str:
    """One line per shape: time, spread and GFLOP/s (from one up) of each peer, then the ratios."""
    peers = [peer for peer, in grouped(rows, "peer")]
    rivals = [peer for peer, in grouped((r for r in rows if "ratio" in r), "peer")]
    lines = []
    for (name,), group in grouped(rows, "name").items():
        times, ratios = dict.fromkeys(peers, ""), dict.fromkeys(rivals, "")
        for r in group:
            rate = f", {r['gflops']:.3g} GFLOP/s" if r["gflops"] >= 1 else ""
            times[r["peer"]] = f"{duration(r['seconds'])} ±{r['spread']:.0%}{rate}"
            if "ratio" in r:
                ratios[r["peer"]] = f"{r['ratio']:.2f}"
        lines.append([name, *times.values(), *ratios.values()])
    return table(["shape", *peers, *(f"{peer} / ours" for peer in rivals)], lines)


def summary_table(rows: list[dict]) -> str:
    """One line per operation, dtype and peer: both rates, the lowest ratio and the geometric mean of all."""
    ours, lines = {r["name"]: r for r in rows if r["peer"] == "ours"}, []
    for kind, group in grouped((r for r in rows if "ratio" in r), "op", "dtype", "peer").items():
        worst = min(group, key=lambda r: r["ratio"])
        rates = [[r["gflops"] for r in side] for side in ([ours[r["name"]] for r in group], group)]
        lines.append([*kind, str(len(group)), *(f"{min(rate):.3g} to {max(rate):.3g}" for rate in rates),
                      f"{geometric_mean([r['ratio'] for r in group]):.2f}",
                      f"{worst['ratio']:.2f} at {worst['name']}"])
    header = ["op", "dtype", "peer", "shapes", "our GFLOP/s", "the peer's", "mean ratio", "lowest ratio"]
    return table(header, lines)


def memory_table(rows: list[dict]) -> str:
    """One line per shape and peer: what the call took, beside the score matrix of standard attention."""
    header = ["forward", "peer", "extra memory", "time of the call", "one score matrix"]
    return table(header, ([f"B{r['B']} H{r['Hq']} S{r['Sk']} D{r['D']} {r['dtype']}", r["peer"],
                           f"{r['extra_bytes'] / 2**20:.1f} MiB", duration(r["seconds"]),
                           f"{r['score_bytes'] / 1e9:.2f} GB"] for r in rows))


SECTIONS = {  # recorded name -> title, what it shows, the table
    "cuda": ("Speed on a CUDA device", "bf16, ours and FlashAttention-2 (torch's FLASH_ATTENTION) in turn\n"
             "on the same shapes; a ratio is the peer's time over ours: above 1 ours is faster.  The\n"
             "mean is geometric.", summary_table),
    "cpu": ("Speed", "Ours and each peer in turn on the same shapes; a ratio is the peer's time over ours:\n"
            "above 1 ours is faster.  The mean is geometric.", summary_table),
    "memory": ("Peak memory of a forward", METHOD, memory_table),
    "overhead": ("Host cost of a small call", "Tensors so small that the time is that of the call itself.",
                 timing_table),
}


def report(folder: Path) -> str:
    """The README's figures, all of them from the recorded results."""
    parts = []
    for name, (title, text, tables) in SECTIONS.items():
        path = folder / f"{name}.json"
        if path.exists():
            result = json.loads(path.read_text())
            host = "{cpu} ({capability}, {cores} cores, {threads} threads), torch {torch}"
            if name == "cuda":
                host = f"{result['machine']['cards'][0]}, torch {{torch}}"
            source = (f"`{result['command']}` on {host.format(**result['machine'])},\n"
                      f"commit {result['commit']}, {result['date']}.  "
                      f"Every row: [{name}.csv](bench/results/{name}.csv).")
            parts.append(f"### {title}\n\n{text}\n\n{tables(result['rows'])}\n\n{source}\n")
    return "\n".join(parts)


def insert(readme: str, block: str) -> str:
    """The README with the text between its bench markers replaced."""
    if not BLOCK.search(readme):
        raise ValueError("README.md has no <!-- bench:begin --> and <!-- bench:end --> lines")
    return BLOCK.sub(lambda _: block, readme)
