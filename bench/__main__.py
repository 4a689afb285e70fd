"""Speed, host cost and memory of flashattn beside its alternatives, and the README's figures from records."""

import argparse
import sys
from pathlib import Path

import torch

from . import results
from .memory import METHOD, peak_extra
from .peers import PEERS, present
from .shapes import SETS
from .timing import time_shape

MEMORY_LIMIT = 64 * 2**20  # bytes that our forward may take besides inputs and outputs


def timed(options: argparse.Namespace) -> int:
    """Times a set of shapes; 1 if --check finds a ratio below it, or none to check."""
    torch.set_num_threads(options.threads)
    peers, rows = present(options.peers.split(",")), []
    shapes = [shape for shape in SETS[options.command] if options.only in shape.name]
    for done, shape in enumerate(shapes, 1):
        print(f"[{done}/{len(shapes)}] {shape.name}", file=sys.stderr, flush=True)
        measured = time_shape(shape, peers, options.seconds, options.device)
        rows += [results.row(shape, figures) for figures in measured]
    results.add_ratios(rows)
    keep(options, rows)
    print(results.timing_table(rows))
    ratios = [r["ratio"] for r in rows if "ratio" in r]
    lowest = min(ratios, default=None)
    if ratios:
        if options.command != "overhead":
            print(f"\n{results.summary_table(rows)}")
        print(f"\npeer / ours: {len(ratios)} ratios, lowest {lowest:.2f}, "
              f"geometric mean {results.geometric_mean(ratios):.2f}")
    if options.check is not None and (lowest is None or lowest < options.check):
        print(f"FAILED: --check {options.check}: the lowest ratio is {lowest}")
        return 1
    return 0


def memory(options: argparse.Namespace) -> int:
    """Ours and torch's at both lengths, standard attention where it fits; 1 if ours is above the limit."""
    short, long = SETS["memory"]
    peers, rows = [peer.name for peer in present(["ours", "sdpa", "plain"])], []
    runs = [(short, peer) for peer in peers] + [(long, peer) for peer in peers if peer != "plain"]
    runs = [(shape, peer) for shape, peer in runs if options.only in shape.name]
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


def keep(options: argparse.Namespace, rows: list[dict]) -> None:
    """Records a whole run; a part of one would replace figures by fewer."""
    if options.only:
        print("part of a run: not recorded")
    else:
        results.save(results.record(options.command, options.line, rows, options.commit), options.results)


def report(options: argparse.Namespace) -> int:
    options.readme.write_text(results.insert(options.readme.read_text(), results.report(options.results)))
    return 0


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("--results", type=Path, default=results.ROOT / "bench" / "results",
                        help="folder of the records (default: bench/results)")
    parser.add_argument("--commit", help="of these sources, if they lie outside their repository")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text, device, peers, seconds, threads in (
            ("cpu", "forward and backward against torch", "cpu", "ours,sdpa", 3.0, torch.get_num_threads()),
            ("cuda", "the same on a CUDA device", "cuda", "ours,sdpa_flash", 0.5, 1),
            ("overhead", "host cost of a small call", "cpu", "ours,sdpa", 3.0, 1)):
        command = commands.add_parser(name, help=text)
        command.add_argument("--peers", default=peers, help=f"of {','.join(PEERS)} (%(default)s)")
        command.add_argument("--seconds", type=float, default=seconds, help="for each shape (%(default)s)")
        command.add_argument("--threads", type=int, default=threads, help="of torch (%(default)s)")
        command.add_argument("--check", type=float, metavar="RATIO", help="exit 1 if a ratio is below this")
        command.set_defaults(run=timed, device=device)
    commands.add_parser("memory", help="peak memory of a forward (takes minutes)").set_defaults(run=memory)
    for command in commands.choices.values():
        command.add_argument("--only", default="", help="part of a shape's name: run those, record nothing")
    command = commands.add_parser("report", help="write the recorded figures into the README")
    command.add_argument("--readme", type=Path, default=results.ROOT / "README.md")
    command.set_defaults(run=report)
    options = parser.parse_args(arguments)
    options.line = " ".join(["python -m bench", *arguments])
    return options.run(options)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
