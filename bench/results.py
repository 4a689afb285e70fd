"""Records of runs: the machine, files under bench/results, and what the README shows of them."""

import csv
import json
import os
import platform
import re
import subprocess
from dataclasses import asdict
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path

import torch

from . import cold, exact, io, memory, plots
from .card import cards
from .peers import PEERS
from .shapes import Shape
from .tables import (
    amount,
    card_memory_table,
    cold_table,
    errors_text,
    exact_table,
    fastest,
    grouped,
    growth_table,
    io_table,
    memory_table,
    missing_text,
    summary_table,
    timing_table,
    unrivalled,
)

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "bench" / "results"
PACKAGES = ("fa3-fwd", "flash-attn", "flash-attn-3", "flash-attn-4", "xformers", "triton")
BLOCK = re.compile(r"(?<=<!-- bench:begin -->\n).*?(?=<!-- bench:end -->)", re.DOTALL)


def version(package: str) -> str:
    """The installed one; empty if there is none."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def machine() -> dict:
    try:
        model = re.search(r"model name\s*:\s*(.*)", Path("/proc/cpuinfo").read_text())[1]
    except (OSError, TypeError):
        model = platform.processor() or platform.machine()
    return {"cpu": model, "capability": torch.backends.cpu.get_cpu_capability(), "cores": os.cpu_count(),
            "threads": torch.get_num_threads(), "load": os.getloadavg()[0], "torch": torch.__version__,
            "cudnn": torch.backends.cudnn.version(), "state": cards(),
            "packages": {name: found for name in PACKAGES if (found := version(name))},
            "python": platform.python_version(), "system": f"{platform.system()} {platform.machine()}",
            "cards": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]}


def commit() -> str:
    """The commit of the sources, with -dirty if they differ from it (recorded figures do not count)."""
    def git(*arguments):
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
        return done.stdout.strip() if done.returncode == 0 else ""
    changed = git("status", "--porcelain", "--", ".", ":!bench/results", ":!docs/figures", ":!README.md")
    return (git("rev-parse", "--short=12", "HEAD") or "none") + ("-dirty" if changed else "")


def row(shape: Shape, measured: dict) -> dict:
    """One line of a result: the problem, then what was measured."""
    return {**asdict(shape), "window": list(shape.window or ()), "lengths": list(shape.lengths), **measured}


def add_ratios(rows: list[dict]) -> None:
    """ratio = time of the peer / ours on the same shape: above 1, ours is faster.  Our row names the best.

    against_ratio = our rate of reading the cache / that on the shape which ours is compared with.
    """
    ours = {r["name"]: r for r in rows if r["peer"] == "ours"}
    for r in rows:
        if r["peer"] != "ours" and r["name"] in ours:
            r["ratio"] = r["seconds"] / ours[r["name"]]["seconds"]
    for name, best in fastest(rows).items():
        ours[name] |= {"best_peer": best["peer"], "best_ratio": best["ratio"]}
    for r in ours.values():
        if r["against"] in ours:
            r["against_ratio"] = r["gbytes"] / ours[r["against"]]["gbytes"]


def record(name: str, command: str, rows: list[dict], sources: str | None = None, **more) -> dict:
    """What is kept of a run; ``sources`` is their commit where there is no repository to ask."""
    date = datetime.now(timezone.utc).isoformat(timespec="seconds")
    return {"name": name, "command": command, "date": date, "commit": sources or commit(),
            "machine": machine(), **more, "rows": rows}


def save(result: dict, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{result['name']}.json").write_text(json.dumps(result, indent=1) + "\n")
    with open(folder / f"{result['name']}.csv", "w", newline="") as file:
        fields = dict.fromkeys(key for r in result["rows"] for key in r)
        writer = csv.DictWriter(file, fields, lineterminator="\n")
        writer.writeheader()
        writer.writerows(result["rows"])


def add_shares(rows: list[dict], ceilings: dict) -> None:
    """of_ceiling = the rate of a row / that of a matrix product, or of reading in a decode."""
    for r in rows:
        if "gbytes" in r:
            r["of_ceiling"] = r["gbytes"] / ceilings["read_gbytes"]
        elif r["dtype"] in ("bfloat16", "float16"):
            r["of_ceiling"] = r["gflops"] / ceilings["gflops"]


def load(folder: Path) -> dict[str, dict]:
    """The records of a folder that a section shows, by name."""
    paths = [folder / f"{name}.json" for name in SECTIONS]
    return {path.stem: json.loads(path.read_text()) for path in paths if path.exists()}


IN_TURN = ("Ours and each peer in turn on the same shapes; a ratio is the peer's time over ours:\n"
           "above 1 ours is faster.  The mean is geometric.")
SECTIONS = {  # recorded name -> title, what it shows, the table
    "cuda": ("Speed on a CUDA device", IN_TURN, summary_table),
    "graphs": ("Small forwards on a CUDA device", "bfloat16, in CUDA graphs of 8 calls, so that the "
               "host's part is not timed, and with\ninputs that are in no cache.", timing_table),
    "decode": ("Decode on a CUDA device",
               "bfloat16, a token of each sequence against its KV cache; rates are those of reading it.\n"
               "Calls use two caches in turn; graph: in CUDA graphs of 8 calls, so that the host's part is\n"
               "not timed, with keys and values that are in no cache of the card.", timing_table),
    "io": ("Bytes moved on a CUDA device", io.METHOD,
           lambda rows: io_table([r for r in rows if r["Sk"] == 8192] or rows)),
    "memory-cuda": ("Peak memory on a CUDA device", memory.CUDA_METHOD, card_memory_table),
    "exact": ("Error on a CUDA device", exact.METHOD, exact_table),
    "growth": ("Growth on a CUDA device", "Time against one size, the others fixed, and the power of that "
               "size which time and bytes\n(`flashattn.traffic`) follow over the larger half of the sizes.",
               growth_table),
    "cold": ("Cold start", cold.METHOD, cold_table),
    "cpu": ("Speed", IN_TURN, summary_table),
    "memory": ("Peak memory of a forward", memory.METHOD, memory_table),
    "overhead": ("Host cost of a small call", "Tensors so small that the time is that of the call itself.",
                 timing_table),
    "overhead-cuda": ("Host cost of a small call on a CUDA device", "The card is done before the host has "
                      "started the next call.", timing_table),
}
TIMED = ("cuda", "graphs", "decode", "cpu", "overhead", "overhead-cuda")


def host(machine: dict, on_card: bool) -> str:
    if not on_card:
        return "{cpu} ({capability}, {cores} cores, {threads} threads), torch {torch}".format(**machine)
    parts = [machine["cards"][0], f"torch {machine['torch']}"]
    if number := machine.get("cudnn"):
        parts.append(f"cuDNN {number // 10000}.{number % 10000 // 100}.{number % 100}")
    if machine.get("fa3"):  # in older records
        parts.append(f"fa3-fwd {machine['fa3']}")
    parts += [f"{name} {number}" for name, number in machine.get("packages", {}).items()]
    if machine.get("state"):
        parts.append(f"driver {machine['state'][0]['driver_version']}")
    return ", ".join(parts)


def ceilings_text(result: dict) -> str:
    """What the card did at most in the same run, its clock, and which part of that ours reached."""
    found, watched = result.get("ceilings"), result.get("watched")
    lines = []
    if found:
        lines.append(f"Ceilings of the same run: {found['gflops'] / 1e3:.0f} TFLOP/s in a bfloat16 product "
                     f"of 8192^3,\n{amount(1e9 * found['read_gbytes'])}/s reading memory, "
                     f"{amount(1e9 * found['copy_gbytes'])}/s copying it (bytes read and written).")
        for op, group in grouped((r for r in result["rows"] if r["peer"] == "ours"), "op").items():
            parts = [r["of_ceiling"] for r in group if "of_ceiling" in r]
            if parts:
                what = "reading" if op == ("decode",) else "product"
                lines.append(f"Ours, {op[0]}: {min(parts):.0%} to {max(parts):.0%} of the {what}'s rate.")
    if watched:
        low, middle, high = watched["clocks.sm"]
        lines.append(f"Clock {middle:.0f} MHz ({low:.0f} to {high:.0f}), "
                     f"power up to {watched['power.draw'][2]:.0f} W.")
    return "\n".join(lines)


def section(result: dict, figures: list[str] = ()) -> str:
    """One record as a part of the README, with links to its figures."""
    name, rows = result["name"], result["rows"]
    title, text, tables = SECTIONS[name]
    on_card = bool(result["machine"].get("cards")) and name not in ("cpu", "memory", "overhead")
    parts = [text, *figures, tables(rows)]
    if name != "cold" and on_card:
        parts[0] += "".join(f"\n{peer}: {PEERS[peer].text}." for peer, in grouped(rows, "peer")
                            if peer in PEERS and PEERS[peer].text)
    if name in TIMED and on_card:
        if len(grouped((r for r in rows if "ratio" in r), "peer")) > 1:
            parts[0] += "\nbest: of each shape the fastest of these."
        absent = missing_text([r for r in result.get("missing", []) if "name" not in r])
        parts += [note for note in (unrivalled(rows), absent, ceilings_text(result)) if note]
    if wrong := errors_text(rows):
        parts.append(wrong)
    if not result.get("complete", True):
        parts.append("This run was cut short: the rest of its rows is missing.")
    parts.append(f"`{result['command']}` on {host(result['machine'], on_card)},\n"
                 f"commit {result['commit']}, {result['date']}.  "
                 f"Every row: [{name}.csv](bench/results/{name}.csv).")
    return f"### {title}\n\n" + "\n\n".join(parts) + "\n"


def report(folder: Path) -> str:
    """The README's figures, all of them from the recorded results."""
    records = load(folder)
    figures = plots.links(records)
    return "\n".join(section(result, figures.get(name, [])) for name, result in records.items())


def insert(readme: str, block: str) -> str:
    """The README with the text between its bench markers replaced."""
    if not BLOCK.search(readme):
        raise ValueError("README.md has no <!-- bench:begin --> and <!-- bench:end --> lines")
    return BLOCK.sub(lambda _: block, readme)
