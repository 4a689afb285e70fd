"""Speed, host cost and memory of flashattn beside its alternatives, and the README's figures from records."""

import argparse
import re
import shlex
import sys
from pathlib import Path

import torch

from . import results
from .memory import METHOD, peak_extra
from .peers import PEERS, present, reason
from .shapes import PASSES, SETS, Shape
from .timing import time_shape

MEMORY_LIMIT = 64 * 2**20  # bytes that our forward may take besides inputs and outputs


def timed(options: argparse.Namespace) -> int:
    """Times a set of shapes; 1 if ours failed, or if --check finds a ratio below it or none to check."""
    if options.device == "cuda" and not torch.cuda.is_available():
        print("FAILED: no CUDA device")
        return 1
    torch.set_num_threads(options.threads)
    peers, missing = present(options.peers)
    start, rows, shapes = results.cards(), [], chosen(options)
    for done, shape in enumerate(shapes, 1):
        print(f"[{done}/{len(shapes)}] {shape.name}", end="", file=sys.stderr, flush=True)
        try:
            measured, without = time_shape(shape, peers, options.seconds, options.device)
        except Exception as error:  # peers that differ, or a device that is gone: keep the other shapes
            measured, without = [], [{"name": shape.name, "peer": "ours", "reason": reason(error)}]
        times = (f"{r['peer']} {results.duration(r['seconds'])}" for r in measured)
        print("", *times, sep="  ", file=sys.stderr)
        rows += [results.row(shape, figures) for figures in measured]
        missing += without
    results.add_ratios(rows)
    keep(options, rows, missing=missing, state_at_start=start)
    print(results.timing_table(rows))
    if alone := results.unrivalled(rows):
        print(f"\n{alone}")
    if missing:
        print(f"\n{results.missing_text(missing)}")
    ratios = [r["ratio"] for r in rows if "ratio" in r]
    lowest = min(ratios, default=None)
    if ratios:
        if not options.command.startswith("overhead"):
            print(f"\n{results.summary_table(rows)}")
        print(f"\npeer / ours: {len(ratios)} ratios, lowest {lowest:.2f}, "
              f"geometric mean {results.geometric_mean(ratios):.2f}")
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


def memory(options: argparse.Namespace) -> int:
    """Ours and torch's at both lengths, standard attention where it fits; 1 if ours is above the limit."""
    short, long = SETS["memory"]
    peers, rows = [peer.name for peer in present(["ours", "sdpa", "plain"])[0]], []
    runs = [(short, peer) for peer in peers] + [(long, peer) for peer in peers if peer != "plain"]
    runs = [(shape, peer) for shape, peer in runs if options.only.search(shape.name)]
    for done, (shape, peer) in enumerate(runs, 1):
        print(f"[{done}/{len(runs)}] {shape.name} {peer}", file=sys.stderr, flush=True)
        rows.append(results.row(shape, {**peak_extra(shape, peer), "score_bytes": shape.score_bytes()}))
    keep(options, rows)
    print(METHOD, results.memory_table(rows), sep="\n\n")
    print(f"\nstandard attention at S = {long.Sk} needs {long.score_bytes() / 1e9:.1f} GB for its scores")
    most = max((r["extra_bytes"] for r in rows if r["peer"] == "ours"), default=None)
    if most is None or most > MEMORY_LIMIT:
        print(f"FAILED: the limit is {MEMORY_LIMIT} bytes, ours took {most}")
        return 1
    return 0


def keep(options: argparse.Namespace, rows: list[dict], **more) -> None:
    """Records a whole run; a part of one would replace figures by fewer, and needs a folder of its own."""
    folder = options.results
    if options.only.pattern or options.kinds or set(options.expected) - set(options.peers):
        if not folder:
            print("part of a run: recorded with --results FOLDER only")
            return
    results.save(results.record(options.command, options.line, rows, options.commit, **more),
                 folder or results.FOLDER)


def report(options: argparse.Namespace) -> int:
    block = results.report(options.results or results.FOLDER)
    options.readme.write_text(results.insert(options.readme.read_text(), block))
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


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__, allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True)
    torch_threads, rivals = torch.get_num_threads(), "ours,sdpa_flash,cudnn,fa3"
    for name, text, device, peers, seconds, threads in (
            ("cpu", "forward and backward against torch", "cpu", "ours,sdpa", 3.0, torch_threads),
            ("cuda", "the same on a CUDA device, against all that it has", "cuda", rivals, 0.8, 1),
            ("graphs", "small forwards in CUDA graphs", "cuda", rivals, 0.8, 1),
            ("decode", "a KV cache on a CUDA device, in CUDA graphs too", "cuda", rivals, 0.8, 1),
            ("overhead", "host cost of a small call", "cpu", "ours,sdpa", 3.0, 1),
            ("overhead-cuda", "the same on a CUDA device", "cuda", f"sdpa,{rivals}", 0.8, 1)):
        command = commands.add_parser(name, help=text, allow_abbrev=False)
        command.add_argument("--peers", type=lambda names: names.split(","), default=peers.split(","),
                             metavar="NAMES", help=f"of {','.join(PEERS)} ({peers})")
        command.add_argument("--seconds", type=float, default=seconds, help="for each shape (%(default)s)")
        command.add_argument("--threads", type=int, default=threads, help="of torch (%(default)s)")
        command.add_argument("--check", type=float, metavar="RATIO", help="exit 1 if a ratio is below this")
        command.add_argument("--kinds", type=kinds, metavar="NAMES",
                             help=f"only these: of {','.join(PASSES)}; not recorded without --results")
        command.set_defaults(run=timed, device=device, expected=peers.split(","))
    command = commands.add_parser("memory", help="peak memory of a forward (minutes)", allow_abbrev=False)
    command.set_defaults(run=memory, kinds=None, expected=[], peers=[])
    for command in commands.choices.values():
        command.add_argument("--only", type=pattern, default="", metavar="REGEX",
                             help="only shapes with this in their names; not recorded without --results")
    command = commands.add_parser("report", help="records to README", allow_abbrev=False)
    command.add_argument("--readme", type=Path, default=results.ROOT / "README.md")
    command.set_defaults(run=report)
    parser.set_defaults(results=None, commit=None)
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
