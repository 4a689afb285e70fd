"""Rows of a record as Markdown tables that are readable as text too."""

import math
from collections.abc import Iterable


def grouped(rows: Iterable[dict], *fields: str) -> dict[tuple, list[dict]]:
    """Rows by the values of some fields, in the order of the first of each."""
    groups = {}
    for r in rows:
        groups.setdefault(tuple(r[field] for field in fields), []).append(r)
    return groups


def fastest(rows: Iterable[dict]) -> dict[str, dict]:
    """The row of the fastest peer of each shape that has a ratio."""
    groups = grouped((r for r in rows if "ratio" in r), "name")
    return {name: min(group, key=lambda r: r["ratio"]) for (name,), group in groups.items()}


def table(header: Iterable[str], lines: Iterable[Iterable[str]]) -> str:
    """A Markdown table that is also readable as text."""
    grid = [list(header), *map(list, lines)]
    widths = [max(map(len, column)) for column in zip(*grid, strict=True)]
    grid.insert(1, ["-" * width for width in widths])
    return "\n".join("| " + " | ".join(map(str.ljust, cells, widths)) + " |" for cells in grid)


def duration(seconds: float) -> str:
    if seconds < 0.9995e-3:
        return f"{seconds * 1e6:.3g} us"
    return f"{seconds * 1e3:.3g} ms" if seconds < 0.9995 else f"{seconds:.3g} s"


def amount(count: float) -> str:
    """Bytes, in powers of ten."""
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if count >= 0.9995 * size:
            return f"{count / size:.3g} {letter}B"
    return f"{count:.0f} B"


def pace(r: dict) -> float:
    """What counts of a row: GB/s of the cache in a decode, otherwise GFLOP/s."""
    return r.get("gbytes", r["gflops"])


def unit(r: dict) -> str:
    return "B/s" if "gbytes" in r else "FLOP/s"


def rate(r: dict) -> str:
    return f"{pace(r):.3g} G{unit(r)}" if pace(r) < 1e3 else f"{pace(r) / 1e3:.4g} T{unit(r)}"


def geometric_mean(values: list[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def share(r: dict) -> str:
    """What of the card's measured ceiling a row reaches; empty where none was measured."""
    return f"{r['of_ceiling']:.0%}" if "of_ceiling" in r else ""


def timing_table(rows: list[dict]) -> str:
    """One line per shape: our time, spread and rate (from 1 GFLOP/s or GB/s up), then the peers' ratios.

    With ceilings, which part of theirs our rate is.  With several peers the last column is the lowest ratio
    and whose it is.
    """
    rivals = [peer for peer, in grouped((r for r in rows if "ratio" in r), "peer")]
    best, lines = fastest(rows) if len(rivals) > 1 else {}, []
    shares = any("of_ceiling" in r for r in rows)
    for (name,), group in grouped(rows, "name").items():
        ours, part, ratios = "", "", dict.fromkeys(rivals, "")
        for r in group:
            if r["peer"] == "ours":
                work = f", {rate(r)}" if pace(r) >= 1 else ""
                ours, part = f"{duration(r['seconds'])} ±{r['spread']:.0%}{work}", share(r)
            if "ratio" in r:
                ratios[r["peer"]] = f"{r['ratio']:.2f}"
        lines.append([name, ours, *[part] * shares, *ratios.values()])
        if best:
            lines[-1].append(f"{best[name]['ratio']:.2f} {best[name]['peer']}" if name in best else "")
    header = ["shape", "ours", *["of ceiling"] * shares, *(f"{peer} / ours" for peer in rivals)]
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


def card_memory_table(rows: list[dict]) -> str:
    """One line per length and operation: the bytes that each peer takes, and those of one score matrix."""
    peers, lines = [peer for peer, in grouped(rows, "peer")], []
    for (op, S), group in grouped(rows, "op", "Sk").items():
        taken = {r["peer"]: amount(r["extra_bytes"]) if "extra_bytes" in r else "-" for r in group}
        lines.append([op, f"{S:,}", amount(group[0]["input_bytes"]), *(taken.get(peer, "") for peer in peers),
                      amount(group[0]["score_bytes"])])
    return table(["op", "S", "q, k, v", *peers, "one score matrix"], lines)


def io_table(rows: list[dict]) -> str:
    """One line per shape: the bytes of memory and of the L2 cache that a call moves, beside the formula's."""
    lines = []
    for r in rows:
        if "dram_read" not in r:
            continue
        moved = r["dram_read"] + r["dram_write"]
        lines.append([f"{r['D']}", f"{r['Sk']:,}", r["peer"], amount(r["dram_read"]), amount(r["dram_write"]),
                      amount(moved / r["Hq"]), amount(r["formula"] / r["Hq"]), f"{moved / r['formula']:.2f}",
                      amount(r["l2_bytes"] / r["Hq"]) if "l2_bytes" in r else ""])
    return table(["d", "S", "", "memory read", "written", "both, a head", "formula, a head", "of formula",
                  "L2 cache, a head"], lines)


def exact_table(rows: list[dict]) -> str:
    """One line per input, dtype and result: each peer's median, 99.9th percentile and largest error.

    Below it, where outputs of several draws are compared, what `exact_ratios` says of them.
    """
    peers, lines = [peer for peer, in grouped(rows, "peer")], []
    for (name, tensor), group in grouped((r for r in rows if "max" in r), "name", "tensor").items():
        cells = {r["peer"]: f"{r['median']:.2e}, {r['p999']:.2e}, {r['max']:.1e}" for r in group}
        lines.append([name.partition("-")[0], group[0]["dtype"], tensor,
                      *(cells.get(peer, "") for peer in peers)])
    compared = [r for r in rows if "p999_ratio" in r]
    errors = table(["inputs", "dtype", "result", *peers], lines)
    return f"{errors}\n\n{exact_ratios(compared)}" if compared else errors


def exact_ratios(rows: list[dict]) -> str:
    """Ours over each peer's with the standard error, and where it is above by more than two of these."""
    peers, lines, above = [peer for peer, in grouped(rows, "peer")], [], []
    for (name,), group in grouped(rows, "name").items():
        for quantile, text in (("median", "median"), ("p999", "99.9 %")):
            ratio, error = f"{quantile}_ratio", f"{quantile}_ratio_error"
            cells = {r["peer"]: f"{r[ratio]:.4f} ±{r[error]:.4f}" for r in group}
            lines.append([name.partition("-")[0], group[0]["dtype"], text,
                          *(cells.get(peer, "") for peer in peers)])
            above += [f"{r['peer']} at {name}, {text}" for r in group if r[ratio] - 2 * r[error] > 1]
    ratios = table(["inputs", "dtype", "out", *(f"ours / {peer}" for peer in peers)], lines)
    return f"{ratios}\n\nOurs is above by more than two standard errors: {'; '.join(above) or 'nowhere'}."


def slope(points: Iterable[tuple[float, float]]) -> float:
    """Exponent of the power law through points, by least squares of the logarithms."""
    logs = [(math.log(x), math.log(y)) for x, y in points]
    mean_x, mean_y = (sum(values) / len(logs) for values in zip(*logs))
    return (sum((x - mean_x) * (y - mean_y) for x, y in logs) / sum((x - mean_x) ** 2 for x, _ in logs))


def grown(r: dict) -> int:
    """The size that grows in a row's series, of names like S-forward-512."""
    return int(r["name"].rpartition("-")[2])


def growth_table(rows: list[dict]) -> str:
    """One line per series and peer: the exponents of time and of flashattn.traffic's bytes in the size.

    The fit is over the larger half of the sizes, where the card is full.
    """
    lines = []
    for (series, peer), group in growth_series(rows).items():
        half = group[len(group) // 2:]
        if len(half) < 2:
            continue
        lines.append([series.replace("-", ", ", 1), peer, f"{grown(group[0]):,} to {grown(group[-1]):,}",
                      f"{duration(group[0]['seconds'])} to {duration(group[-1]['seconds'])}",
                      *(f"{slope((grown(r), r[what]) for r in half):.2f}"
                        for what in ("seconds", "moved_bytes"))])
    return table(["what grows", "peer", "from, to", "time", "exponent of time", "exponent of bytes"], lines)


def growth_series(rows: list[dict]) -> dict[tuple[str, str], list[dict]]:
    """Rows by (series, peer), the sizes in order."""
    named = ({**r, "series": r["name"].rpartition("-")[0]} for r in rows)
    return {key: sorted(group, key=grown) for key, group in grouped(named, "series", "peer").items()}


def cold_table(rows: list[dict]) -> str:
    return table(["what", "time", "size", "memory"],
                 ([r["name"], duration(r["seconds"]) if "seconds" in r else "",
                   amount(r["bytes"]) if "bytes" in r else "",
                   amount(r["peak_bytes"]) if "peak_bytes" in r else r.get("error", "")] for r in rows))


def errors_text(rows: list[dict]) -> str:
    """One line per peer and reason where there is an error in place of figures."""
    return missing_text([{"name": r["name"], "peer": r.get("peer", ""), "reason": r["error"]}
                         for r in rows if "error" in r])
