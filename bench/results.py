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
from importlib import metadata
from pathlib import Path

import torch

from .memory import METHOD
from .peers import PEERS
from .shapes import Shape

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "bench" / "results"
BLOCK = re.compile(r"(?<=<!-- bench:begin -->\n).*?(?=<!-- bench:end -->)", re.DOTALL)


def cards() -> list[dict]:
    """The driver, and the clock (MHz), power (W) and temperature (C) of every card now; empty without any."""
    fields = ["driver_version", "clocks.sm", "power.draw", "temperature.gpu"]
    query = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    try:
        lines = subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()
    except (OSError, subprocess.CalledProcessError):
        return []
    return [dict(zip(fields, line.split(", "), strict=True)) for line in lines]


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
            "cudnn": torch.backends.cudnn.version(), "fa3": version("fa3-fwd"), "state": cards(),
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


def fastest(rows: Iterable[dict]) -> dict[str, dict]:
    """The row of the fastest peer of each shape that has a ratio."""
    groups = grouped((r for r in rows if "ratio" in r), "name")
    return {name: min(group, key=lambda r: r["ratio"]) for (name,), group in groups.items()}


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


def pace(r: dict) -> float:
    """What counts of a row: GB/s of the cache in a decode, otherwise GFLOP/s."""
    return r.get("gbytes", r["gflops"])


def unit(r: dict) -> str:
    return "B/s" if "gbytes" in r else "FLOP/s"


def rate(r: dict) -> str:
    return f"{pace(r):.3g} G{unit(r)}" if pace(r) < 1e3 else f"{pace(r) / 1e3:.4g} T{unit(r)}"


def geometric_mean(values: list[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def grouped(rows: Iterable[dict], *fields: str) -> dict[tuple, list[dict]]:
    """Rows by the values of some fields, in the order of the first of each."""
    groups = {}
    for r in rows:
        groups.setdefault(tuple(r[field] for field in fields), []).append(r)
    return groups


def timing_table(rows: list[dict]) -> str:
    """One line per shape: time, spread and rate (from 1 GFLOP/s or GB/s up) of each peer, then the ratios.

    With several peers the last column is the lowest ratio and whose it is.
    """
    peers = [peer for peer, in grouped(rows, "peer")]
    rivals = [peer for peer, in grouped((r for r in rows if "ratio" in r), "peer")]
    best, lines = fastest(rows) if len(rivals) > 1 else {}, []
    for (name,), group in grouped(rows, "name").items():
        times, ratios = dict.fromkeys(peers, ""), dict.fromkeys(rivals, "")
        for r in group:
            work = f", {rate(r)}" if pace(r) >= 1 else ""
            times[r["peer"]] = f"{duration(r['seconds'])} ±{r['spread']:.0%}{work}"
            if "ratio" in r:
                ratios[r["peer"]] = f"{r['ratio']:.2f}"
        lines.append([name, *times.values(), *ratios.values()])
        if best:
            lines[-1].append(f"{best[name]['ratio']:.2f} {best[name]['peer']}" if name in best else "")
    header = ["shape", *peers, *(f"{peer} / ours" for peer in rivals)]
    return table([*header, "best / ours"] if best else header, lines)


def summary_table(rows: list[dict]) -> str:
    """One line per operation, dtype and peer: both rates, the lowest ratio and the geometric mean of all.

    Where an operation has several peers, its first line is the fastest of them on each shape.
    """
    ours, lines = {r["name"]: r for r in rows if r["peer"] == "ours"}, []
    rated = [r for r in rows if "ratio" in r]
    letter, size = ("T", 1e3) if min(map(pace, rows), default=0) >= 1e3 else ("G", 1)

    def line(op, dtype, peer, group):
        worst = min(group, key=lambda r: r["ratio"])
        rates = [[pace(r) / size for r in side] for side in ([ours[r["name"]] for r in group], group)]
        which = f" ({worst['peer']})" if peer == "best" else ""
        return [op, dtype, peer, str(len(group)), *(f"{min(some):.3g} to {max(some):.3g}" for some in rates),
                f"{geometric_mean([r['ratio'] for r in group]):.2f}",
                f"{worst['ratio']:.2f} at {worst['name']}{which}"]

    for kind, group in grouped(rated, "op", "dtype").items():
        peers = grouped(group, "peer")
        if len(peers) > 1:
            lines.append(line(*kind, "best", list(fastest(group).values())))
        lines += [line(*kind, peer, some) for (peer,), some in peers.items()]
    header = ["op", "dtype", "peer", "shapes", f"our {letter}{unit(rows[0])}", "the peer's", "mean ratio",
              "lowest ratio"]
    return table(header, lines)


def unrivalled(rows: list[dict]) -> str:
    """The shapes that only we computed, with our rates, and what is compared with another shape.

    Empty if there is none.
    """
    alone = [group[0] for group in grouped(rows, "name").values() if [r["peer"] for r in group] == ["ours"]]
    compared = [r for r in rows if "against_ratio" in r]
    lines = ["No peer here computes " + ", ".join(f"{r['name']} (ours {rate(r)})" for r in alone) + "."
             ] * bool(alone)
    return "\n".join(lines + [f"{r['name']}: {r['against_ratio']:.2f} of our rate at {r['against']}."
                              for r in compared])


def missing_text(missing: list[dict]) -> str:
    """One line per peer and reason; where it is about shapes, with their number."""
    lines = []
    for (peer, why), group in grouped(missing, "peer", "reason").items():
        names = [r["name"] for r in group if "name" in r]
        where = f", {names[0]}" if len(names) == 1 else f", {len(names)} shapes" if names else ""
        lines.append(f"without {peer}{where}: {why}")
    return "\n".join(lines)


def memory_table(rows: list[dict]) -> str:
    """One line per shape and peer: what the call took, beside the score matrix of standard attention."""
    header = ["forward", "peer", "extra memory", "time of the call", "one score matrix"]
    return table(header, ([f"B{r['B']} H{r['Hq']} S{r['Sk']} D{r['D']} {r['dtype']}", r["peer"],
                           f"{r['extra_bytes'] / 2**20:.1f} MiB", duration(r["seconds"]),
                           f"{r['score_bytes'] / 1e9:.2f} GB"] for r in rows))


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
    "cpu": ("Speed", IN_TURN, summary_table),
    "memory": ("Peak memory of a forward", METHOD, memory_table),
    "overhead": ("Host cost of a small call", "Tensors so small that the time is that of the call itself.",
                 timing_table),
    "overhead-cuda": ("Host cost of a small call on a CUDA device", "The card is done before the host has "
                      "started the next call.", timing_table),
}
ON_CARD = ("cuda", "graphs", "decode", "overhead-cuda")


def host(machine: dict, on_card: bool) -> str:
    if not on_card:
        return "{cpu} ({capability}, {cores} cores, {threads} threads), torch {torch}".format(**machine)
    parts = [machine["cards"][0], f"torch {machine['torch']}"]
    if number := machine.get("cudnn"):
        parts.append(f"cuDNN {number // 10000}.{number % 10000 // 100}.{number % 100}")
    if machine.get("fa3"):
        parts.append(f"fa3-fwd {machine['fa3']}")
    if machine.get("state"):
        parts.append(f"driver {machine['state'][0]['driver_version']}")
    return ", ".join(parts)


def section(result: dict) -> str:
    """One record as a part of the README."""
    name, rows = result["name"], result["rows"]
    title, text, tables = SECTIONS[name]
    parts = [text, tables(rows)]
    if on_card := name in ON_CARD:
        parts[0] += "".join(f"\n{peer}: {PEERS[peer].text}." for peer, in grouped(rows, "peer")
                            if peer in PEERS and PEERS[peer].text)
        if len(grouped((r for r in rows if "ratio" in r), "peer")) > 1:
            parts[0] += "\nbest: of each shape the fastest of these."
        absent = missing_text([r for r in result.get("missing", []) if "name" not in r])
        parts += [note for note in (unrivalled(rows), absent) if note]
    parts.append(f"`{result['command']}` on {host(result['machine'], on_card)},\n"
                 f"commit {result['commit']}, {result['date']}.  "
                 f"Every row: [{name}.csv](bench/results/{name}.csv).")
    return f"### {title}\n\n" + "\n\n".join(parts) + "\n"


def report(folder: Path) -> str:
    """The README's figures, all of them from the recorded results."""
    paths = [folder / f"{name}.json" for name in SECTIONS]
    return "\n".join(section(json.loads(path.read_text())) for path in paths if path.exists())


def insert(readme: str, block: str) -> str:
    """The README with the text between its bench markers replaced."""
    if not BLOCK.search(readme):
        raise ValueError("README.md has no <!-- bench:begin --> and <!-- bench:end --> lines")
    return BLOCK.sub(lambda _: block, readme)
