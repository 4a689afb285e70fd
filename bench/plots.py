"""Figures of the records, for the README: ``python -m bench report`` draws those whose records are there."""

import hashlib
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from .tables import grouped, grown, growth_series, slope

FOLDER = Path("docs/figures")  # from the README
WIDTH = 8.0  # inches: 800 pixels in a README
STYLE = {
    "font.size": 9, "axes.titlesize": 9.5, "axes.labelsize": 9, "legend.fontsize": 8.5,
    "xtick.labelsize": 8.5, "ytick.labelsize": 8.5, "font.family": "sans-serif",
    "axes.spines.top": False, "axes.spines.right": False,
    "axes.grid": True, "grid.color": "#dddddd", "grid.linewidth": 0.6, "axes.axisbelow": True,
    "legend.frameon": False, "svg.fonttype": "none", "svg.hashsalt": "flashattn",
    "savefig.facecolor": "white"}
LOOK = {  # peer: colour, marker, name in a legend
    "ours": ("#c8102e", "o", "flashattn"),
    "cudnn": ("#3a7d2c", "s", "cuDNN"),
    "fa3": ("#1f5fa8", "D", "FlashAttention-3"),
    "fa4": ("#6b4ea0", "P", "FlashAttention-4"),
    "sdpa_flash": ("#5aa9d6", "^", "FlashAttention-2 (torch)"),
    "fa2": ("#2c7f9e", "v", "FlashAttention-2"),
    "sdpa_efficient": ("#b08000", "<", "torch, memory-efficient"),
    "sdpa_math": ("#8c8c8c", "x", "torch, math"),
    "flex": ("#d0741c", ">", "FlexAttention"),
    "xformers": ("#a8437d", "h", "xFormers"),
    "sdpa": ("#7f5f3f", "*", "torch"),
    "plain": ("#444444", "X", "standard attention")}


@dataclass(frozen=True)
class Figure:
    """One picture: the record in whose section it stands, what it shows, how it is drawn, of which rows."""

    name: str
    record: str
    text: str
    draw: Callable  # of the records, to a matplotlib figure
    shows: Callable[[dict], bool]  # which rows of the record
    uses: tuple[str, ...] = ()  # other records, where they are there
    needs: str = "rows"  # of the record

    def possible(self, records: dict[str, dict]) -> bool:
        record = records.get(self.record, {})
        return self.needs in record and any(map(self.shows, record["rows"]))

    def source(self, records: dict[str, dict]) -> str:
        """Names and digests of the records: a drawing says what it was drawn from."""
        return " ".join(f"{name}:{digest(records[name])}" for name in (self.record, *self.uses)
                        if name in records)


def digest(record: dict) -> str:
    shown = json.dumps([record["rows"], record.get("ceilings")])
    return hashlib.sha256(shown.encode()).hexdigest()[:16]


def links(records: dict[str, dict]) -> dict[str, list[str]]:
    """The README's references to figures, by the record in whose section they stand."""
    found = {}
    for figure in FIGURES:
        if figure.possible(records):
            link = f"![{figure.text}]({FOLDER}/{figure.name}.svg)"
            found.setdefault(figure.record, []).append(link)
    return found


def draw(records: dict[str, dict], folder: Path, kinds: tuple[str, ...] = ("svg",)) -> list[Path]:
    """Writes the figures that are possible, deletes the others, and returns the paths."""
    wanted = [figure for figure in FIGURES if figure.possible(records)]
    for figure in set(FIGURES) - set(wanted):
        (folder / f"{figure.name}.svg").unlink(missing_ok=True)
    if not wanted:
        return []
    import matplotlib
    matplotlib.use("agg")
    from matplotlib import pyplot
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for figure in wanted:
        with pyplot.rc_context(STYLE):
            picture = figure.draw(records)
            for kind in kinds:
                paths.append(folder / f"{figure.name}.{kind}")
                about = {"Date": None, "Description": figure.source(records)} if kind == "svg" else None
                picture.savefig(paths[-1], metadata=about, dpi=100)
            pyplot.close(picture)
    return paths


def _axes(rows: int = 1, columns: int = 1, height: float = 3.0, **options):
    from matplotlib import pyplot
    picture, axes = pyplot.subplots(rows, columns, figsize=(WIDTH, height), layout="constrained",
                                    squeeze=False, **options)
    return picture, list(axes.flat)


def _logarithmic(axis, x: bool = True) -> None:
    from matplotlib.ticker import FuncFormatter, NullFormatter
    if x:
        axis.set_xscale("log", base=2)
        axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _short(value)))
        axis.xaxis.set_minor_formatter(NullFormatter())
    axis.set_yscale("log")


def _short(value: float) -> str:
    for size, letter in ((2**20, "M"), (2**10, "k")):
        if value >= size and value % size == 0:
            return f"{value / size:g}{letter}"
    return f"{value:g}"


def _legend(picture, axes, columns: int = 4) -> None:
    """One legend for all axes, above them."""
    entries = {}
    for axis in axes:
        for handle, label in zip(*axis.get_legend_handles_labels()):
            entries.setdefault(label, handle)
    picture.legend(entries.values(), entries, loc="outside upper left", ncols=columns, handletextpad=0.4,
                   columnspacing=1.2)


def _dots(record: dict, chosen: Callable[[dict], bool], unit: str, ceiling: str):
    """One line per shape, one mark per peer: rates."""
    rows = [r for r in record["rows"] if chosen(r)]
    key = "gbytes" if ceiling == "read_gbytes" else "gflops"
    names = [name for name, in grouped(rows, "name")]
    picture, (axis,) = _axes(height=1.1 + 0.2 * len(names))
    top = record.get("ceilings", {}).get(ceiling)
    if top:
        axis.axvline(top / 1e3, color="#888888", linewidth=1, linestyle="--", zorder=1,
                     label="ceiling of the same run")
    peers = sorted((peer for peer, in grouped(rows, "peer")), key=list(LOOK).index)
    for peer in reversed(peers):  # ours on top
        colour, marker, label = LOOK[peer]
        points = [(r[key] / 1e3, names.index(r["name"])) for r in rows if r["peer"] == peer]
        axis.scatter(*zip(*points), color=colour, marker=marker, label=label, s=44 if peer == "ours" else 26,
                     linewidths=1, zorder=4 if peer == "ours" else 3)
    axis.set_yticks(range(len(names)), [name.partition("-")[2] if name.startswith(("forward-", "backward-"))
                                        else name for name in names])
    axis.set_ylim(len(names) - 0.4, -0.6)
    axis.set_xlim(left=0)
    axis.set_xlabel(unit)
    handles, labels = axis.get_legend_handles_labels()
    picture.legend(handles[::-1], labels[::-1], loc="outside upper left", ncols=4, handletextpad=0.2,
                   columnspacing=1.0)
    return picture


def _speed(op: str, unit: str = "TFLOP/s (work that the mask leaves; higher is better)"):
    return lambda records: _dots(records["cuda"], lambda r: r["op"] == op, unit, "gflops")


def _decode(records):
    return _dots(records["decode"], lambda r: True, "TB/s of the KV cache (higher is better)", "read_gbytes")


def _graphs(records):
    return _dots(records["graphs"], lambda r: True, "TFLOP/s in CUDA graphs (higher is better)", "gflops")


def _io(records):
    rows = [r for r in records["io"]["rows"] if "dram_read" in r]
    dims = sorted({r["D"] for r in rows}, reverse=True)
    picture, axes = _axes(1, max(len(dims), 1), 3.4, sharey=True)
    for axis, D in zip(axes, dims):
        mine = [r for r in rows if r["D"] == D]
        for (peer,), group in grouped(mine, "peer").items():
            colour, marker, label = LOOK[peer]
            axis.plot([r["Sk"] for r in group], [(r["dram_read"] + r["dram_write"]) / r["Hq"] for r in group],
                      color=colour, marker=marker, linestyle="", markersize=5, label=label)
        for peer, label in (("plain", "formula, standard"), ("ours", "formula, tiled")):
            group = [r for r in mine if r["peer"] == peer]
            axis.plot([r["Sk"] for r in group], [r["formula"] / r["Hq"] for r in group], color=LOOK[peer][0],
                      linewidth=1, linestyle="--" if peer == "plain" else ":", label=label)
        _logarithmic(axis)
        axis.set_title(f"head dim {D}, float16")
        axis.set_xlabel("sequence length")
    axes[0].set_ylabel("bytes of memory a head")
    _legend(picture, axes, 3)
    return picture


def _memory(records):
    rows = records["memory-cuda"]["rows"]
    groups = grouped(rows, "op")
    picture, axes = _axes(1, len(groups), 3.4, sharey=True)
    for axis, ((op,), mine) in zip(axes, groups.items()):
        for (peer,), group in grouped(mine, "peer").items():
            colour, marker, label = LOOK[peer]
            points = [(r["Sk"], r["extra_bytes"]) for r in group if r.get("extra_bytes")]
            if points:  # ours is thin and on top: peers that take as much show behind it
                width, size, order = (1, 3, 4) if peer == "ours" else (2.2, 6, 3)
                axis.plot(*zip(*points), color=colour, marker=marker, linewidth=width, markersize=size,
                          zorder=order, label=label)
            if points and "error" in group[-1] and points[-1][0] < group[-1]["Sk"]:
                why = "out of memory" if "memory" in group[-1]["error"] else "error"
                axis.annotate(why, points[-1], xytext=(-2, 6), textcoords="offset points", ha="right",
                              fontsize=8, color=colour)
        scores = sorted({(r["Sk"], r["score_bytes"]) for r in mine})
        axis.plot(*zip(*scores), color="#888888", linewidth=1, linestyle="--", label="one score matrix")
        _logarithmic(axis)
        axis.set_title(f"{op.replace('+', ' + ')}, {_heads(mine[0])}")
        axis.set_xlabel("sequence length")
    axes[0].set_ylabel("peak bytes of one call")
    _legend(picture, axes, 3)
    return picture


def _heads(r: dict) -> str:
    return f"{r['Hq']} head{'s' * (r['Hq'] > 1)} of {r['D']}, {r['dtype']}"


def _errors(dtypes: tuple[str, ...], tensors: tuple[str, ...]):
    def draw(records):
        from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter
        rows = [r for r in records["exact"]["rows"] if "max" in r and r["dtype"] in dtypes
                and r["tensor"] in tensors]
        panels = grouped(rows, *(("dtype", "name") if len(dtypes) > 1 else ("name", "tensor")))
        peers = sorted((peer for peer, in grouped(rows, "peer")), key=list(LOOK).index)
        columns = 3
        lines = math.ceil(len(panels) / columns)
        picture, axes = _axes(max(lines, 1), columns, 0.75 + lines * (0.6 + 0.2 * len(peers)), sharey=True)
        for axis in axes[len(panels):]:
            axis.set_visible(False)
        for axis, group in zip(axes, panels.values()):
            for r in group:
                colour, y = LOOK[r["peer"]][0], peers.index(r["peer"])
                axis.plot([r["median"], r["max"]], [y, y], color=colour, linewidth=1.2)
                for name, marker in (("median", "|"), ("p99", "s"), ("p999", "D"), ("max", "o")):
                    axis.plot(r[name], y, color=colour, marker=marker, linestyle="",
                              markersize=8 if marker == "|" else 4)
            axis.set_xscale("log")
            low, high = axis.get_xlim()
            axis.xaxis.set_major_locator(LogLocator(subs=(1, 3) if high / low < 500 else (1,)))
            axis.xaxis.set_major_formatter(
                FuncFormatter(lambda value, _: f"{value:.0e}".replace("e-0", "e-").replace("e+00", "")))
            axis.xaxis.set_minor_formatter(NullFormatter())
            axis.set_yticks(range(len(peers)), [LOOK[peer][2] for peer in peers])
            axis.set_ylim(len(peers) - 0.5, -0.5)
            r = group[0]
            axis.set_title(f"{r['name'].partition('-')[0]}, {r['dtype']}"
                           + (f", {r['tensor']}" if len(tensors) > 1 else ""))
        for axis in axes[-columns:]:
            axis.set_xlabel("error / rms of the row")
        from matplotlib.lines import Line2D
        marks = (("median", "|"), ("99 %", "s"), ("99.9 %", "D"), ("largest", "o"))
        picture.legend([Line2D([], [], color="#444444", marker=marker, linestyle="") for _, marker in marks],
                       [label for label, _ in marks], loc="outside upper left", ncols=4)
        return picture
    return draw


def _growth(records):
    series = growth_series(records["growth"]["rows"])
    kinds = list(dict.fromkeys(kind for kind, _ in series))
    picture, axes = _axes(math.ceil((len(kinds) + 1) / 3), 3, 2.3 * math.ceil((len(kinds) + 1) / 3) + 0.4)
    size = {"S": "sequence length", "B": "batch", "H": "heads", "D": "head dim"}
    for axis, kind in zip(axes, kinds):
        what, _, op = kind.partition("-")
        for (of, peer), group in series.items():
            if of == kind:
                _power(axis, peer, [(grown(r), r["seconds"]) for r in group])
        _logarithmic(axis)
        axis.set_title(op)
        axis.set_xlabel(size.get(what, what))
        axis.set_ylabel("seconds")
    axis = axes[len(kinds)]
    for (of, peer), group in series.items():
        if of == "S-forward":
            _power(axis, peer, [(grown(r), r["moved_bytes"]) for r in group], marker="")
    for r in records.get("io", {"rows": []})["rows"]:
        if r["D"] == 128 and r["peer"] in ("ours", "plain") and "dram_read" in r:
            heads = next(iter(series.values()))[0]["Hq"] / r["Hq"]
            axis.plot(r["Sk"], heads * (r["dram_read"] + r["dram_write"]), color=LOOK[r["peer"]][0],
                      marker="+", markersize=7, linestyle="")
    _logarithmic(axis)
    axis.set_title("forward: formula" + (", + counted" if "io" in records else ""))
    axis.set_xlabel(size["S"])
    axis.set_ylabel("bytes of memory")
    for axis in axes[len(kinds) + 1:]:
        axis.set_visible(False)
    _legend(picture, axes[:1])
    return picture


def _power(axis, peer: str, points: list[tuple[float, float]], marker: str | None = None) -> None:
    """Points, and the power law through the larger half of them."""
    colour, own, label = LOOK[peer]
    half = points[len(points) // 2:]
    if len(half) > 1:
        exponent = slope(half)
        x0, y0 = (math.exp(sum(math.log(point[i]) for point in half) / len(half)) for i in (0, 1))
        ends = [points[0][0], points[-1][0]]
        axis.plot(ends, [y0 * (x / x0) ** exponent for x in ends], color=colour, linewidth=0.9,
                  linestyle="--")
        shift, ha, va = ((5, -3), "left", "top") if peer == "ours" else ((-5, 3), "right", "bottom")
        at = half[0] if peer == "ours" else half[len(half) // 2]
        axis.annotate(f"power {exponent:.2f}", at, xytext=shift, textcoords="offset points", ha=ha,
                      va=va, fontsize=8, color=colour)
    axis.plot(*zip(*points), color=colour, marker=own if marker is None else marker,
              linestyle="" if marker is None else "-", markersize=4, label=label)


def _roofline(records):
    top = records["cuda"]["ceilings"]
    picture, (axis,) = _axes(height=4.6)
    rows = [r for name in ("cuda", "decode", "graphs") for r in records.get(name, {"rows": []})["rows"]
            if r["peer"] == "ours" and "moved_bytes" in r]
    points = [(r, r["gflops"] * r["seconds"] * 1e9 / r["moved_bytes"]) for r in rows]
    low, high = (bound(x for _, x in points) for bound in (min, max))
    ridge = top["gflops"] / top["read_gbytes"]
    low, high = min(low, ridge) / 1.6, max(high, ridge) * 1.6
    axis.plot([low, ridge, high], [low * top["read_gbytes"] / 1e3, top["gflops"] / 1e3, top["gflops"] / 1e3],
              color="#444444", linewidth=1.4)
    middle = math.sqrt(low * ridge)
    axis.annotate(f"{top['read_gbytes'] / 1e3:.2f} TB/s, reading",
                  (middle, middle * top["read_gbytes"] / 1e3), xytext=(-8, 4), ha="right",
                  textcoords="offset points", fontsize=8.5, color="#444444")
    axis.annotate(f"{top['gflops'] / 1e3:.0f} TFLOP/s, bfloat16 product", (high, top["gflops"] / 1e3),
                  xytext=(-4, 4), textcoords="offset points", ha="right", fontsize=8.5, color="#444444")
    colours = {"forward": "#c8102e", "backward": "#1f5fa8", "decode": "#3a7d2c"}
    families = {"sm90": "o", "sm80": "^"}
    for (op, family), group in grouped(({**r, "x": x, "family": (r.get("kernel") or "__").split("_")[1]}
                                        for r, x in points), "op", "family").items():
        axis.scatter([r["x"] for r in group], [r["gflops"] / 1e3 for r in group], s=26, alpha=0.85,
                     color=colours[op], marker=families.get(family, "s"), label=f"{op}, {family} kernels")
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_xlabel("arithmetic intensity: FLOP a byte of flashattn.traffic")
    axis.set_ylabel("TFLOP/s")
    axis.legend(loc="lower right")
    return picture


def _has(key: str, **fields) -> Callable[[dict], bool]:
    return lambda r: key in r and all(r[name] == value for name, value in fields.items())


FIGURES = (
    Figure("forward", "cuda", "Forward: TFLOP/s of every shape and peer", _speed("forward"),
           _has("gflops", op="forward")),
    Figure("backward", "cuda", "Backward: TFLOP/s of every shape and peer", _speed("backward"),
           _has("gflops", op="backward")),
    Figure("roofline", "cuda", "Every timed call of ours under the card's measured ceilings", _roofline,
           _has("moved_bytes", peer="ours"), ("decode", "graphs"), "ceilings"),
    Figure("graphs", "graphs", "Small forwards in CUDA graphs: TFLOP/s", _graphs, _has("gflops")),
    Figure("decode", "decode", "Decode: TB/s of the KV cache of every shape and peer", _decode,
           _has("gbytes")),
    Figure("io", "io", "Bytes of memory that one call moves, counted by the hardware, against S", _io,
           _has("dram_read")),
    Figure("memory", "memory-cuda", "Peak memory of one call against S", _memory, _has("extra_bytes")),
    Figure("exact", "exact", "Error of the output against float64",
           _errors(("bfloat16", "float16"), ("out",)), _has("max", tensor="out")),
    Figure("exact-gradients", "exact", "Error of the gradients against float64",
           _errors(("bfloat16",), ("dq", "dk", "dv")), _has("max", tensor="dq", dtype="bfloat16")),
    Figure("growth", "growth", "Time and bytes against one size, and the power of it that they follow",
           _growth, _has("moved_bytes"), ("io",)),
)
