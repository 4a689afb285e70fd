"""The benchmark harness: what it counts, in which order it times, and that the README shows its records."""

import json
import re
from dataclasses import asdict, replace

import pytest
import torch

from bench import __main__ as command
from bench import results
from bench.memory import peak_extra
from bench.peers import PEERS, Peer
from bench.shapes import SETS, Shape
from bench.timing import interleave, spread, time_shape

SQUARE = Shape("square", "forward", 2, 6, 6, 4, 4, 8, 8)
TINY = [
    SQUARE,
    replace(SQUARE, name="causal", causal=True),
    replace(SQUARE, name="bf16", dtype="bfloat16"),
    replace(SQUARE, name="grouped", Hk=2, causal=True, op="backward"),
    replace(SQUARE, name="window", window=(2, 1), op="backward"),
    replace(SQUARE, name="longer keys", Sk=9, causal=True, Dv=4, op="forward+backward"),
    replace(SQUARE, name="decode", Sq=1, Sk=9, Hk=1, causal=True, op="decode"),
]


def timed_row(name, peer, seconds, **fields):
    return results.row(replace(SQUARE, name=name, **fields),
                       {"peer": peer, "seconds": seconds, "spread": 0.01, "rounds": 5, "gflops": 1 / seconds})


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, (-1, -1), (0, 0), (2, -1), (-1, 1), (3, 2), (1, 40)])
@pytest.mark.parametrize("Sq, Sk", [(1, 1), (5, 5), (3, 8), (8, 3), (1, 7)])
def test_flops_are_those_of_the_visible_pairs(Sq, Sk, window, causal):
    shape = Shape("", "forward", 2, Sq, Sk, 6, 3, 8, 4, causal, window)
    left, right = (None if side == -1 else side for side in window or (-1, -1))
    pairs = 0
    for i in range(Sq):
        for j in range(Sk):
            ahead = j - (i + Sk - Sq)
            pairs += (not (causal and ahead > 0) and not (right is not None and ahead > right)
                      and not (left is not None and ahead < -left))
    assert shape.visible_pairs() == pairs
    products = 2 * 8 * pairs + 2 * 4 * pairs  # a multiply and an add for Q K^T and for P V
    assert shape.flops() == 2 * 6 * products
    assert replace(shape, op="backward").flops() == 2.5 * shape.flops()


def test_names_of_shapes_are_unique():
    names = [shape.name for shapes in SETS.values() for shape in shapes]
    assert len(set(names)) == len(names)


def test_the_cpu_set_is_the_full_grid():
    grid = {(s.op, s.dtype, s.D, s.Sk, s.causal) for s in SETS["cpu"]}
    assert len(grid) == len(SETS["cpu"]) == 32


class Clock:
    """Time that only the timed calls spend: costs[name] seconds a call, the next of a list each time."""

    def __init__(self, costs):
        self.now, self.log, self.costs = 0.0, [], costs

    def __call__(self):
        return self.now

    def calls(self):
        def spend(name):
            self.log.append(name)
            cost = self.costs[name]
            self.now += cost[len(self.log) % len(cost)] if isinstance(cost, list) else cost
        return {name: lambda name=name: spend(name) for name in self.costs}


def test_every_round_times_every_peer_in_turn():
    clock = Clock({"a": 1.0, "b": 2.0, "c": 3.0})
    samples = interleave(clock.calls(), budget_s=1000, clock=clock)
    assert samples == {"a": [1.0] * 5, "b": [2.0] * 5, "c": [3.0] * 5}  # steady: five rounds are enough
    rounds = [clock.log[3 + 3 * i:6 + 3 * i] for i in range(5)]  # after one calibrating call of each
    assert rounds == [list(order) for order in ("abc", "bca", "cab", "abc", "bca")]


def test_rounds_stay_inside_the_budget_and_below_the_cap():
    noisy = [1.0, 2.0, 4.0, 8.0, 1.0]
    clock = Clock({"a": noisy, "b": noisy[::-1]})
    interleave(clock.calls(), budget_s=100, clock=clock)
    assert 60 < clock.now <= 100 + 16
    clock = Clock({"a": noisy, "b": noisy[::-1]})
    assert len(interleave(clock.calls(), budget_s=1e9, max_rounds=7, clock=clock)["a"]) == 7
    clock = Clock({"a": 50.0})
    assert len(interleave(clock.calls(), budget_s=1, clock=clock)["a"]) == 3  # never fewer


def test_short_calls_are_repeated_within_a_sample():
    clock = Clock({"short": 1e-5, "long": 1.0})
    samples = interleave(clock.calls(), budget_s=1000, sample_s=2e-3, clock=clock)
    assert samples["short"] == pytest.approx([1e-5] * 5) and samples["long"] == pytest.approx([1.0] * 5)
    assert clock.log.count("short") >= 5 * 200 and clock.log.count("long") == 6


def test_spread_is_the_interquartile_range_over_the_median():
    assert spread([1.0, 2.0, 3.0, 4.0, 5.0]) == pytest.approx(2 / 3)


@pytest.mark.parametrize("shape", TINY, ids=lambda shape: shape.name)
def test_every_peer_solves_the_same_problem(shape):
    rows = time_shape(shape, list(PEERS.values()), budget_s=0)
    expected = [peer.name for peer in PEERS.values() if not peer.refuses(shape)]
    assert [r["peer"] for r in rows] == expected and {"ours", "plain"} <= set(expected)
    for r in rows:
        assert r["seconds"] > 0 and r["gflops"] == pytest.approx(shape.flops() / r["seconds"] / 1e9)


def test_a_peer_that_solves_another_problem_is_not_timed():
    class Wrong(Peer):
        def bind(self, shape):
            return lambda q, k, v: 0.9 * v

    with pytest.raises(RuntimeError, match="square: wrong and plain differ"):
        time_shape(SQUARE, [PEERS["plain"], Wrong("wrong")], budget_s=0)


def test_torch_refuses_what_it_would_solve_differently():
    sdpa = PEERS["sdpa"]
    assert "window" in sdpa.refuses(replace(SQUARE, window=(1, 1)))
    assert "top-left" in sdpa.refuses(replace(SQUARE, Sk=9, causal=True))
    assert not sdpa.refuses(replace(SQUARE, Sk=9)) and not sdpa.refuses(replace(SQUARE, Sq=1, causal=True))
    assert time_shape(replace(SQUARE, window=(1, 1)), [sdpa], budget_s=0) == []


def test_ratios_are_the_peers_time_over_ours():
    rows = [timed_row("x", "ours", 2.0), timed_row("x", "sdpa", 1.0), timed_row("y", "ours", 1.0),
            timed_row("y", "sdpa", 8.0), timed_row("z", "sdpa", 1.0)]
    results.add_ratios(rows)
    assert [r.get("ratio") for r in rows] == [None, 0.5, None, 8.0, None]
    assert results.geometric_mean([0.5, 8.0]) == pytest.approx(2.0)
    cells = [cell.strip() for cell in results.summary_table(rows).splitlines()[2].strip("|").split("|")]
    assert cells == ["forward", "float32", "sdpa", "2", "0.5 to 1", "0.125 to 1", "2.00", "0.50 at x"]
    assert [line.split()[-2] for line in results.timing_table(rows).splitlines()[2:]] == ["0.50", "8.00", "|"]


def test_a_run_is_recorded_and_checked(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(SETS, "cpu", [SQUARE, replace(SQUARE, name="again", op="backward")])
    threads = str(torch.get_num_threads())
    run = ["--results", str(tmp_path), "cpu", "--seconds", "0", "--threads", threads, "--check"]
    assert command.main([*run, "1e-6"]) == 0 and command.main([*run, "1e6"]) == 1
    assert "FAILED" in capsys.readouterr().out
    result = json.loads((tmp_path / "cpu.json").read_text())
    assert result["command"] == " ".join(["python -m bench", *run, "1e6"])
    assert result["machine"]["torch"] == torch.__version__ and result["machine"]["threads"] == int(threads)
    assert [(r["name"], r["peer"]) for r in result["rows"]] == [
        (name, peer) for name in ("square", "again") for peer in ("ours", "sdpa")]
    header, *lines = (tmp_path / "cpu.csv").read_text().splitlines()
    measured = {"peer", "seconds", "spread", "rounds", "gflops", "ratio"}
    assert set(header.split(",")) == set(asdict(SQUARE)) | measured
    assert len(lines) == 4
    before = (tmp_path / "cpu.json").read_text()
    assert command.main([*run, "1e-6", "--only", "again"]) == 0  # a part of a run replaces no record
    assert (tmp_path / "cpu.json").read_text() == before
    assert command.main([*run, "1e-6", "--peers", "sdpa"]) == 1  # nothing to check is a failure


def test_memory_sees_the_score_matrix():
    shape = Shape("", "forward", 1, 1024, 1024, 8, 8, 16, 16)  # scores of 32 MiB
    assert shape.score_bytes() == 32 * 2**20
    standard, tiled = (peak_extra(shape, peer) for peer in ("plain", "ours"))
    assert shape.score_bytes() <= standard["extra_bytes"] < 3 * shape.score_bytes()
    lse_bytes = 8 * 1024 * 4
    assert lse_bytes <= tiled["extra_bytes"] < shape.score_bytes() / 4
    assert standard["output_bytes"] == 1024 * 8 * 16 * 4


def test_the_report_holds_the_recorded_figures(tmp_path):
    readme = tmp_path / "README.md"
    readme.write_text("before\n<!-- bench:begin -->\nold 1.23\n<!-- bench:end -->\nafter\n")
    rows = [timed_row("x", "ours", 2.0), timed_row("x", "sdpa", 2.5)]
    results.add_ratios(rows)
    results.save(results.record("cpu", "python -m bench cpu", rows), tmp_path)
    sizes = {"output_bytes": 1, "extra_bytes": 3 * 2**20, "score_bytes": 34e9}
    rows = [results.row(SQUARE, {"peer": "ours", "seconds": 1.5, **sizes})]
    results.save(results.record("memory", "python -m bench memory", rows), tmp_path)
    for _ in range(2):  # again changes nothing
        assert command.main(["--results", str(tmp_path), "report", "--readme", str(readme)]) == 0
        text = readme.read_text()
        assert text.startswith("before\n<!-- bench:begin -->\n")
        assert text.endswith("<!-- bench:end -->\nafter\n")
        assert "1.25 at x" in text and "3.0 MiB" in text and "34.00 GB" in text and "old" not in text
        assert text.count("bench:end") == 1
    with pytest.raises(ValueError, match="bench:begin"):
        results.insert("no markers", "")


def test_the_readme_shows_what_was_recorded():
    readme = (results.ROOT / "README.md").read_text()
    assert re.search(results.BLOCK, readme)
    assert results.insert(readme, results.report(results.ROOT / "bench" / "results")) == readme
