"""Speed, memory, bytes, error and host cost of flashattn beside its alternatives, and the README's figures.

Without a command: forward, backward and decode on the CUDA device, or on the CPU where there is none.
`all` measures everything that the README shows of a card, each part in a process of its own.
"""

import argparse
import gc
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import nullcontext, suppress
from pathlib import Path

import torch

from . import card, cold, exact, io, memory, plots, results, tables
from .peers import present, reason
from .shapes import PASSES, SETS, Shape
from .timing import time_shape

MEMORY_LIMIT = 64 * 2**20  # bytes that our forward may take besides inputs and outputs
RIVALS = "ours,sdpa_flash,cudnn,fa3"
PACKAGES = "fa2,fa4,xformers"
ALL = {  # seconds that each part of `all` may take, of which the start of its process is START
    "cuda": 130, "decode": 54, "io": 75, "memory-cuda": 45, "exact": 50, "growth": 50, "graphs": 22,
    "overhead-cuda": 17, "cold": 20}
START = 6


class Record:
    """The record of a run, written after every row: what a run has measured survives its end.

    A whole run replaces the one in bench/results; a part of one would replace figures by fewer, and is kept
    in a folder of its own or not at all.
    """

    def __init__(self, options: argparse.Namespace, **more):
        part = options.only.pattern or options.kinds or set(options.expected) - set(options.peers)
        self.folder = options.results or (None if part else results.FOLDER)
        self.data = results.record(options.command, options.line, [], options.commit, complete=False, **more)

    def add(self, rows: Iterable[dict]) -> None:
        self.data["rows"] += rows
        self.save()

    def save(self, **more) -> None:
        self.data |= more
        if self.folder:
            results.save(self.data, self.folder)

    def close(self, complete: bool = True, **more) -> None:
        self.save(complete=complete, **more)
        if not self.folder:
            print("part of a run: recorded with --results FOLDER only")


def say(text: str, end: str = "\n") -> None:
    print(text, end=end, file=sys.stderr, flush=True)


def ready(options: argparse.Namespace) -> bool:
    """Whether the device of the command is here; if not it is said."""
    if options.device == "cuda" and not torch.cuda.is_available():
        print("FAILED: no CUDA device")
        return False
    return True


def timed(options: argparse.Namespace) -> int:
    """Times a set of shapes; 1 if ours failed, or if --check finds a ratio below it or none to check."""
    if not ready(options):
        return 1
    torch.set_num_threads(options.threads)
    start, cuda = time.monotonic(), options.device == "cuda"
    peers, missing = present(options.peers)
    shapes = chosen(options)
    with card.Watch() if cuda else nullcontext() as watch:
        record = Record(options, missing=missing, **measured_ceilings() if cuda else {})
        rows = record.data["rows"]
        for done, shape in enumerate(shapes, 1):
            say(f"[{done}/{len(shapes)}] {shape.name}", end="")
            measured, without = one_shape(options, shape, peers, start)
            say("  ".join(["", *(f"{r['peer']} {tables.duration(r['seconds'])}" for r in measured)]))
            rows += [results.row(shape, figures) for figures in measured]
            missing += without
            results.add_ratios(rows)
            if "ceilings" in record.data:
                results.add_shares(rows, record.data["ceilings"])
            record.save()
    late = any(r["reason"].startswith("TimeoutError") for r in missing)
    record.close(complete=not late, **{"watched": watch.summary()} if cuda else {})
    return shown(options, record.data, shapes)


def one_shape(options: argparse.Namespace, shape: Shape, peers: list, start: float) -> tuple[list, list]:
    """time_shape's figures; a shape that fails or comes too late is missing with the reason."""
    try:
        if options.budget and time.monotonic() - start > options.budget:
            raise TimeoutError(f"the budget of {options.budget:g} s was used up")
        measured, without = time_shape(shape, peers, options.seconds, options.device)
    except Exception as error:  # peers that differ, or a device that is gone: keep the other shapes
        measured, without = [], [{"name": shape.name, "peer": "ours", "reason": reason(error)}]
    if options.device == "cuda":
        gc.collect()
        with suppress(RuntimeError):  # the device may be gone: then every later shape says so
            torch.cuda.empty_cache()
    standard = {peer.name: peer.standard for peer in peers}
    return [{**r, "moved_bytes": shape.moved_bytes(standard[r["peer"]])} for r in measured], without


def measured_ceilings() -> dict:
    """For a record: {"ceilings": ...}, or nothing where they cannot be measured."""
    try:
        return {"ceilings": card.ceilings()}
    except Exception as error:
        print(f"no ceilings: {reason(error)}")
        return {}


def shown(options: argparse.Namespace, record: dict, shapes: list[Shape]) -> int:
    """Prints a timed run; its exit status."""
    rows, missing = record["rows"], record["missing"]
    print((tables.growth_table if options.command == "growth" else tables.timing_table)(rows))
    notes = [tables.unrivalled(rows), tables.missing_text(missing), results.ceilings_text(record)]
    print(*(f"\n{note}" for note in notes if note), sep="\n")
    ratios = [r["ratio"] for r in rows if "ratio" in r]
    lowest = min(ratios, default=None)
    if ratios:
        if not options.command.startswith("overhead"):
            print(f"\n{tables.summary_table(rows)}")
        print(f"\npeer / ours: {len(ratios)} ratios, lowest {lowest:.2f}, "
              f"geometric mean {tables.geometric_mean(ratios):.2f}")
    failures = [f"ours is not timed at {r['name']}: {r['reason']}" for r in missing
                if r["peer"] == "ours" and "name" in r]
    if not shapes:
        failures.append("no shape is of --only and --kinds")
    if options.check is not None and (lowest is None or lowest < options.check):
        failures.append(f"--check {options.check}: the lowest ratio is {lowest}")
    for failure in failures:
        print(f"FAILED: {failure}")
    return 1 if failures else 0


def chosen(options: argparse.Namespace) -> list[Shape]:
    """The command's shapes that --only and --kinds leave."""
    return [shape for shape in SETS[options.command]
            if options.only.search(shape.name) and (not options.kinds or shape.op in options.kinds)]


def host_memory(options: argparse.Namespace) -> int:
    """Ours and torch's at both lengths, standard attention where it fits; 1 if ours is above the limit."""
    short, long = SETS["memory"]
    peers, record = [peer.name for peer in present(["ours", "sdpa", "plain"])[0]], Record(options)
    runs = [(short, peer) for peer in peers] + [(long, peer) for peer in peers if peer != "plain"]
    runs = [(shape, peer) for shape, peer in runs if options.only.search(shape.name)]
    for done, (shape, peer) in enumerate(runs, 1):
        say(f"[{done}/{len(runs)}] {shape.name} {peer}")
        taken = memory.peak_extra(shape, peer)
        record.add([results.row(shape, {**taken, "score_bytes": shape.score_bytes()})])
    record.close()
    rows = record.data["rows"]
    print(memory.METHOD, tables.memory_table(rows), sep="\n\n")
    print(f"\nstandard attention at S = {long.Sk} needs {long.score_bytes() / 1e9:.1f} GB for its scores")
    most = max((r["extra_bytes"] for r in rows if r["peer"] == "ours"), default=None)
    if most is None or most > MEMORY_LIMIT:
        print(f"FAILED: the limit is {MEMORY_LIMIT} bytes, ours took {most}")
        return 1
    return 0


def counted(options: argparse.Namespace) -> int:
    """What a program yields row by row, errors in place of figures; 1 if there is no figure of ours."""
    if not ready(options):
        return 1
    start = time.monotonic()
    peers, missing = present(options.peers)
    record = Record(options, missing=missing)
    late = False
    with card.Watch() if options.device == "cuda" else nullcontext() as watch:
        for r in options.rows(options, peers):
            record.add([r])
            say(f"{time.monotonic() - start:6.1f} s  " + "  ".join(str(r[key]) for key in (
                "name", "peer", "tensor", "error") if r.get(key)))
            if late := time.monotonic() - start > options.budget:
                break
    record.close(complete=not late, **{"watched": watch.summary()} if options.device == "cuda" else {})
    rows = record.data["rows"]
    _, text, table = results.SECTIONS[options.command]
    print(text, options.table(rows) if options.table else table(rows), sep="\n\n")
    for note in (tables.errors_text(rows), tables.missing_text(missing)):
        print(f"\n{note}" if note else "", end="\n" if note else "")
    if not any("error" not in r and r.get("peer", "ours") == "ours" for r in rows):
        print("FAILED: there is no figure of ours")
        return 1
    return 0


def shape_rows(measured: Iterable[tuple[Shape, dict]]) -> Iterator[dict]:
    return (results.row(shape, figures) for shape, figures in measured)


def io_rows(options: argparse.Namespace, peers: list) -> Iterator[dict]:
    return shape_rows(io.rows_on_card(peers, options.only.pattern, options.budget))


def memory_rows(options: argparse.Namespace, peers: list) -> Iterator[dict]:
    return shape_rows(memory.rows_on_card(peers, chosen(options)))


def exact_rows(options: argparse.Namespace, peers: list) -> Iterator[dict]:
    return shape_rows(exact.rows(peers, chosen(options)))


def cold_rows(options: argparse.Namespace, peers: list) -> Iterator[dict]:
    return cold.rows(options.build)


def everything(options: argparse.Namespace) -> int:
    """All parts of ALL and the report: 1 if one failed, whose reasons its output says.

    A part may use what those before it have left of their time, and not what those after it need.
    """
    scale = options.budget / sum(ALL.values())
    plan = {name: scale * seconds for name, seconds in ALL.items()}
    say("budget  " + "  ".join(f"{name} {seconds:.0f} s" for name, seconds in plan.items()))
    start, planned, ended = time.monotonic(), 0.0, {}
    for name, seconds in plan.items():
        planned += seconds
        left = max(seconds / 2, planned - (time.monotonic() - start))
        inner = [f"--budget={max(1, left - START):.0f}"] if name != "cold" else []
        inner += [f"--seconds={TIMED[name][3] * scale:.2g}"] if name in TIMED else []
        say(f"\n== {name} (at {time.monotonic() - start:.0f} s)")
        try:
            done = subprocess.run([sys.executable, "-m", "bench", *bookkeeping(options), name, *inner],
                                  cwd=results.ROOT, timeout=left + 40)
            ended[name] = "done" if done.returncode == 0 else f"exit status {done.returncode}"
        except subprocess.TimeoutExpired:
            ended[name] = "stopped: it took too long"
    status = report(options)
    say("\n" + "\n".join(f"{name}: {how}" for name, how in ended.items()))
    say(f"in {time.monotonic() - start:.0f} s")
    return 1 if status or set(ended.values()) != {"done"} else 0


def bookkeeping(options: argparse.Namespace) -> list[str]:
    """The arguments that say where results are kept, for another command."""
    given = {"results": options.results, "commit": options.commit}
    return [f"--{name}={value}" for name, value in given.items() if value]


def speed(options: argparse.Namespace) -> int:
    commands = ("cuda", "decode") if torch.cuda.is_available() else ("cpu",)
    return max([main([*bookkeeping(options), command]) for command in commands])


def report(options: argparse.Namespace) -> int:
    """Draws the figures and writes the README's part, both from the records."""
    folder = options.results or results.FOLDER
    try:
        drawn = plots.draw(results.load(folder), options.readme.parent / plots.FOLDER)
        say("\n".join(f"wrote {path}" for path in drawn))
    except ImportError as error:
        print(f"FAILED: no figures: {error} (pip install matplotlib)")
        return 1
    options.readme.write_text(results.insert(options.readme.read_text(), results.report(folder)))
    return 0


def without_bookkeeping(arguments: list[str]) -> list[str]:
    """The arguments that say what is run, and not where it is kept."""
    kept, skip = [], False
    for argument in arguments:
        if skip:
            skip = False
        elif argument in ("--results", "--commit"):
            skip = True
        elif not argument.startswith(("--results=", "--commit=")):
            kept.append(argument)
    return kept


def pattern(text: str) -> re.Pattern:
    try:
        return re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a regular expression: {error}") from None


def kinds(text: str) -> list[str]:
    names = text.split(",")
    if unknown := set(names) - set(PASSES):
        raise argparse.ArgumentTypeError(f"{unknown.pop()!r}: expected some of {','.join(PASSES)}")
    return names


def names(text: str) -> list[str]:
    return text.split(",")


TIMED = {  # help, device, peers, seconds for each shape
    "cpu": ("forward and backward against torch", "cpu", "ours,sdpa", 3.0),
    "cuda": ("the same on a CUDA device, against all that it has", "cuda",
             f"{RIVALS},sdpa_efficient,sdpa_math,{PACKAGES},flex", 0.6),
    "graphs": ("small forwards in CUDA graphs", "cuda", f"{RIVALS},{PACKAGES}", 0.6),
    "decode": ("a KV cache on a CUDA device, in CUDA graphs too", "cuda", f"{RIVALS},{PACKAGES}", 0.5),
    "growth": ("time against length, batch, heads and head dim on a CUDA device", "cuda", "ours,plain", 0.3),
    "overhead": ("host cost of a small call", "cpu", "ours,sdpa", 3.0),
    "overhead-cuda": ("the same on a CUDA device", "cuda", f"sdpa,{RIVALS},{PACKAGES}", 0.5)}
COUNTED = {  # help, peers, rows, table of all rows where the README has fewer, seconds
    "io": ("bytes that one call moves, by ncu's counters on a CUDA device",
           "ours,plain,sdpa_math,sdpa_flash", io_rows, tables.io_table, 80.0),
    "memory-cuda": ("peak memory on a CUDA device, to a million tokens",
                    "ours,plain,sdpa_flash,cudnn", memory_rows, None, 60.0),
    "exact": ("error against float64 on a CUDA device",
              "ours,sdpa_flash,fa3,cudnn,plain", exact_rows, None, 60.0),
    "cold": ("sizes, imports and first calls in fresh processes", "ours", cold_rows, None, 60.0)}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command")
    for name, (text, device, peers, seconds) in TIMED.items():
        threads = torch.get_num_threads() if name == "cpu" else 1
        command = commands.add_parser(name, help=text, allow_abbrev=False)
        command.add_argument("--peers", type=names, default=names(peers), metavar="NAMES",
                             help=f"of {','.join(results.PEERS)} ({peers})")
        command.add_argument("--seconds", type=float, default=seconds, help="for each shape (%(default)s)")
        command.add_argument("--budget", type=float, default=0, metavar="SECONDS",
                             help="for all: later shapes are left out (default: no limit)")
        command.add_argument("--threads", type=int, default=threads, help="of torch (%(default)s)")
        command.add_argument("--check", type=float, metavar="RATIO", help="exit 1 if a ratio is below this")
        command.add_argument("--kinds", type=kinds, metavar="NAMES",
                             help=f"only these: of {','.join(PASSES)}; not recorded without --results")
        command.set_defaults(run=timed, device=device, expected=names(peers))
    for name, (text, peers, rows, table, seconds) in COUNTED.items():
        command = commands.add_parser(name, help=text, allow_abbrev=False)
        if name == "cold":
            command.add_argument("--build", type=names, default=[], metavar="ARCHS",
                                 help="builds for each of these too, such as cpu,9.0, and JIT-load: minutes")
        else:
            command.add_argument("--peers", type=names, default=names(peers), metavar="NAMES",
                                 help=f"of {','.join(results.PEERS)} ({peers})")
            command.add_argument("--budget", type=float, default=seconds, metavar="SECONDS",
                                 help="later rows are left out (%(default)s)")
        command.set_defaults(run=counted, device="cpu" if name == "cold" else "cuda", kinds=None, rows=rows,
                             table=table, expected=names(peers))
    commands.choices["cold"].set_defaults(peers=["ours"], budget=float("inf"))
    command = commands.add_parser("memory", help="peak memory of a forward (minutes)", allow_abbrev=False)
    command.set_defaults(run=host_memory, kinds=None, expected=[], peers=[])
    for command in commands.choices.values():
        command.add_argument("--only", type=pattern, default="", metavar="REGEX",
                             help="only shapes with this in their names; not recorded without --results")
    whole = commands.add_parser("all", help="all that needs a card, then the report", allow_abbrev=False)
    whole.add_argument("--budget", type=float, default=sum(ALL.values()), metavar="SECONDS",
                       help="for all parts together (%(default)s)")
    whole.set_defaults(run=everything)
    reporter = commands.add_parser("report", help="records to figures and README", allow_abbrev=False)
    reporter.set_defaults(run=report)
    for command in (whole, reporter):
        command.add_argument("--readme", type=Path, default=results.ROOT / "README.md")
    parser.set_defaults(results=None, commit=None, run=speed)
    for command in (parser, *commands.choices.values()):  # before the command and after it
        command.add_argument("--results", type=Path, default=argparse.SUPPRESS, metavar="FOLDER",
                             help="of the records (default: bench/results)")
        command.add_argument("--commit", default=argparse.SUPPRESS,
                             help="of these sources, if they lie outside their repository")
    options = parser.parse_args(arguments)
    options.line = shlex.join(["python", "-m", "bench", *without_bookkeeping(arguments)])
    return options.run(options)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
