"""The benchmark harness: what it counts, in which order it times, and that the README shows its records."""

import contextlib
import csv
import json
import re
import sys
import time
import types
from dataclasses import asdict, replace
from functools import partial

import pytest
import torch

from bench import __main__ as command
from bench import card, cold, exact, io, memory, plots, results, tables, timing
from bench.memory import peak_extra
from bench.peers import PEERS, Peer, present
from bench.shapes import SETS, Shape
from bench.timing import GRAPH_CALLS, eager, graphed, input_sets, interleave, spread, time_shape
from flashattn import reference

SQUARE = Shape("square", "forward", 2, 6, 6, 4, 4, 8, 8)
TINY = [
    SQUARE,
    replace(SQUARE, name="causal", causal=True),
    replace(SQUARE, name="bf16", dtype="bfloat16"),
    replace(SQUARE, name="grouped", Hk=2, causal=True, op="backward"),
    replace(SQUARE, name="window", window=(2, 1), op="backward"),
    replace(SQUARE, name="longer keys", Sk=9, causal=True, Dv=4, op="forward+backward"),
    replace(SQUARE, name="softcap", softcap=0.5, causal=True),
    replace(SQUARE, name="alibi", alibi=True, causal=True, dtype="bfloat16"),
    replace(SQUARE, name="packed", B=3, lengths=(6, 1, 4), Hk=2, causal=True, window=(2, 0), alibi=True),
    replace(SQUARE, name="packed backward", B=2, lengths=(2, 6), softcap=2.0, op="backward"),
    (DECODE := replace(SQUARE, name="decode", Sq=1, Sk=12, Hk=1, causal=True, op="decode")),
    replace(DECODE, name="pages", page_size=4),
    replace(DECODE, name="lengths", lengths=(5, 12), Dv=4),
    replace(DECODE, name="values inside the keys", latent=True, Dv=6),
    replace(DECODE, name="append", append=True, Sq=3, Hk=2, window=(4, 0)),
    replace(DECODE, name="append to pages", append=True, page_size=6),
]


def timed_row(name, peer, seconds, **fields):
    return results.row(replace(SQUARE, name=name, **fields),
                       {"peer": peer, "seconds": seconds, "spread": 0.01, "rounds": 5, "gflops": 1 / seconds})


HERE = [peer for peer in PEERS.values() if not peer.missing()]


def brute_force_pairs(Sq, Sk, causal, window):
    left, right = (None if side == -1 else side for side in window or (-1, -1))
    pairs = 0
    for i in range(Sq):
        for j in range(Sk):
            ahead = j - (i + Sk - Sq)
            pairs += (not (causal and ahead > 0) and not (right is not None and ahead > right)
                      and not (left is not None and ahead < -left))
    return pairs


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, (-1, -1), (0, 0), (2, -1), (-1, 1), (3, 2), (1, 40)])
@pytest.mark.parametrize("Sq, Sk", [(1, 1), (5, 5), (3, 8), (8, 3), (1, 7)])
def test_flops_are_those_of_the_visible_pairs(Sq, Sk, window, causal):
    shape = Shape("", "forward", 2, Sq, Sk, 6, 3, 8, 4, causal, window)
    pairs = brute_force_pairs(Sq, Sk, causal, window)
    assert shape.visible_pairs() == 2 * pairs
    products = 2 * 8 * pairs + 2 * 4 * pairs  # a multiply and an add for Q K^T and for P V
    assert shape.flops() == 2 * 6 * products
    assert replace(shape, op="backward").flops() == 2.5 * shape.flops()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, (0, 0), (3, -1), (2, 5)])
def test_flops_of_a_packed_batch_are_those_of_its_sequences(window, causal):
    lengths = (5, 1, 9, 4)
    shape = Shape("", "forward", 4, 9, 9, 6, 3, 8, 4, causal, window, lengths=lengths)
    pairs = sum(brute_force_pairs(S, S, causal, window) for S in lengths)
    assert shape.visible_pairs() == pairs and shape.flops() == 6 * pairs * 2 * (8 + 4)
    q, k, v, dout = shape.inputs()
    assert [tuple(t.shape) for t in (q, k, v, dout)] == [(19, 6, 8), (19, 3, 8), (19, 3, 4), (19, 6, 4)]
    assert shape.input_bytes() == q.nbytes + k.nbytes + v.nbytes
    assert shape.bounds(q.device).tolist() == [0, 5, 6, 15, 19]


def test_bytes_of_a_decode_are_those_of_the_keys_and_values_that_are_seen():
    assert DECODE.cache_bytes() == 2 * 12 * 1 * (8 + 8) * 4 == DECODE.input_bytes() - 2 * 4 * 8 * 4
    for changes, rows, columns in (({"Dv": 4, "Hk": 2}, 48, 12), ({"latent": True, "Dv": 6}, 24, 8),
                                   ({"lengths": (5, 12)}, 17, 16), ({"window": (3, 0)}, 2 * 4, 16),
                                   ({"window": (3, 0), "Sq": 4}, 2 * 7, 16), ({"window": (30, 0)}, 24, 16),
                                   ({"lengths": (2, 12), "window": (3, 0)}, 6, 16)):
        assert replace(DECODE, **changes).cache_bytes() == rows * columns * 4, changes
    latent = replace(DECODE, latent=True, Dv=6)
    _, k, v, _ = latent.inputs()
    assert v.data_ptr() == k.data_ptr() and v.shape[-1] == 6
    assert latent.input_bytes() == 2 * 12 * 8 * 4 + 2 * 4 * 8 * 4


def test_the_decode_set_has_a_row_for_every_kind_of_call():
    shapes = {shape.name: shape for shape in SETS["decode"]}
    assert len(shapes) == 15 + 14 + 7 and {s.op for s in shapes.values()} == {"decode"}
    assert sum(s.graph for s in shapes.values()) == 7 and all(s.causal for s in shapes.values())
    for shape in shapes.values():
        assert not shape.against or shapes[shape.against].graph == shape.graph
        assert not shape.page_size or shape.Sk % shape.page_size == 0
    ragged, = (shape for shape in shapes.values() if shape.lengths)
    equal = shapes[ragged.against]
    assert all(100 <= S <= 32768 for S in ragged.lengths) and len(ragged.lengths) == ragged.B == 64
    assert equal.cache_bytes() == pytest.approx(ragged.cache_bytes(), rel=1e-3)
    mla = shapes["mla-b64-s4096-h128-1"]
    assert mla.cache_bytes() == 64 * 4096 * 576 * 2


def test_our_cache_is_what_the_shape_says():
    q, k, v, _ = inputs = replace(DECODE, Hk=2).inputs()
    decoding = PEERS["ours"].decoding
    (_, pages, _), options = decoding(replace(DECODE, Hk=2, page_size=4), inputs)
    table = options["page_table"]
    assert pages.shape == (6, 4, 2, 8) and table.flatten().sort().values.tolist() == list(range(6))
    assert torch.equal(pages[table.long()].flatten(1, 2), k)
    (_, k_cache, v_cache), options = decoding(replace(DECODE, Hk=2, append=True), inputs)
    assert k_cache[:, 11].isnan().all() and v_cache[:, 11].isnan().all() and not k_cache[:, :11].isnan().any()
    assert options["cache_seqlens"].tolist() == [11, 11] and torch.equal(options["v_new"], v[:, 11:])
    (_, _, none), options = decoding(replace(DECODE, Hk=2, latent=True), inputs)
    assert none is None and options["v_head_dim"] == 8
    _, options = decoding(replace(DECODE, Hk=2, lengths=(5, 12)), inputs)
    assert options["cache_seqlens"].tolist() == [5, 12]


def test_decodes_use_two_caches_in_turn(monkeypatch):
    seen = []

    class Watched(type(PEERS["plain"])):
        def bind(self, shape, device):
            def attend(q, k, v):
                seen.append(k.data_ptr())
                return q
            return attend

    made = eager(Watched("plain"), DECODE, DECODE.inputs())
    for _ in range(3):
        made.call()
    assert made.count == 1 and len(set(seen)) == 2 and seen[:2] == seen[2:]
    del seen[:]
    made = eager(Watched("plain"), SQUARE, SQUARE.inputs())
    made.call()
    assert len(set(seen)) == 1


def test_a_decode_is_rated_by_the_bytes_of_its_cache():
    rows, _ = time_shape(DECODE, HERE, budget_s=0)
    for r in rows:
        assert r["gbytes"] == pytest.approx(DECODE.cache_bytes() / r["seconds"] / 1e9)
    shown = [timed_row(name, peer, seconds, op="decode", against=against) | {"gbytes": 4e3 / seconds}
             for name, peer, seconds, against in (
                 ("x", "ours", 1.0, ""), ("x", "fa3", 1.25, ""), ("y", "ours", 2.0, "x"))]
    results.add_ratios(shown)
    assert [r.get("against_ratio") for r in shown] == [None, None, 0.5]
    assert "| our TB/s |" in tables.summary_table(shown) and ", 4 TB/s |" in tables.timing_table(shown)
    assert tables.unrivalled(shown).splitlines() == ["No peer here computes y (ours 2 TB/s).",
                                                      "y: 0.50 of our rate at x."]


def test_a_shape_says_whether_it_is_timed_in_graphs(monkeypatch):
    asked = []
    monkeypatch.setattr(timing, "graphed", lambda *given: asked.append("graphed") or eager(*given))
    time_shape(replace(SQUARE, graph=True), [PEERS["plain"]], budget_s=0)
    assert asked == ["graphed"]
    time_shape(SQUARE, [PEERS["plain"]], budget_s=0)
    assert asked == ["graphed"] and all(shape.graph for shape in SETS["graphs"])


def test_names_of_shapes_are_unique():
    for shapes in SETS.values():
        assert len({shape.name for shape in shapes}) == len(shapes)


def test_the_cpu_set_is_the_full_grid():
    grid = {(s.op, s.dtype, s.D, s.Sk, s.causal) for s in SETS["cpu"]}
    assert len(grid) == len(SETS["cpu"]) == 32


def test_the_cuda_set_has_a_row_for_every_kind_of_call():
    shapes = {shape.name: shape for shape in SETS["cuda"]}
    forward = [shape for shape in shapes.values() if shape.op == "forward"]
    assert len(forward) == 31 and len(shapes) == 31 + 18
    assert [shape.Sq == 512 for shape in forward] == [True] * 2 + [False] * 29  # these come first
    grid = [s for s in shapes.values() if re.search(r"-d\d+-s\d+-", s.name)]
    assert len(grid) == 16 + 4 + 10 + 2
    for shape in grid:
        assert (shape.B * shape.Sq, shape.Hq * shape.D, shape.Hq) == (16384, 2048, shape.Hk)
    assert {s.dtype for s in forward} == {"bfloat16", "float16"}
    window, mla = shapes["forward-window-1024"], shapes["forward-mla-192-128"]
    assert window.visible_pairs() == sum(min(i + 1, 1024) for i in range(window.Sq))
    assert (mla.D, mla.Dv) == (192, 128)
    assert shapes["forward-softcap-50"].softcap == 50 and shapes["forward-alibi"].alibi


def test_the_equal_batch_is_as_much_work_as_the_packed_one():
    packed, equal = (next(s for s in SETS["cuda"] if s.name == name)
                     for name in ("forward-varlen", "forward-varlen-equal"))
    assert packed.B == len(packed.lengths) == equal.B == 64 and not equal.lengths
    assert all(1 <= S <= 4096 for S in packed.lengths) and packed.Sq == max(packed.lengths)
    assert packed.visible_pairs() == sum(S * (S + 1) // 2 for S in packed.lengths)
    assert packed.lengths[:3] == (3459, 3105, 1723)  # the same batch in every run
    assert equal.visible_pairs() == pytest.approx(packed.visible_pairs(), rel=0.06)


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
    assert rounds == [list(order) for order in ("abc", "acb", "cab", "cba", "bca")]


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


def test_a_sample_is_taken_inside_the_settings_of_its_peer():
    inside, seen = [], []

    @contextlib.contextmanager
    def setting(name):
        inside.append(name)
        yield
        inside.pop()

    calls = {name: lambda name=name: seen.append((name, *inside)) for name in "ab"}
    settings = {name: lambda name=name: setting(name) for name in "ab"}
    interleave(calls, budget_s=0, sample_s=0, settings=settings)
    assert set(seen) == {("a", "a"), ("b", "b")} and not inside


def test_who_fails_before_the_rounds_takes_no_part():
    def fail():
        raise torch.OutOfMemoryError("too much")

    clock, failed = Clock({"a": 1.0, "b": 2.0}), {}
    samples = interleave(clock.calls() | {"c": fail}, budget_s=0, clock=clock, failed=failed)
    assert samples == {"a": [1.0] * 3, "b": [2.0] * 3} and failed == {"c": "OutOfMemoryError: too much"}
    with pytest.raises(torch.OutOfMemoryError, match="too much"):
        interleave({"c": fail}, budget_s=0, clock=clock)


def test_spread_is_the_interquartile_range_over_the_median():
    assert spread([1.0, 2.0, 3.0, 4.0, 5.0]) == pytest.approx(2 / 3)


@pytest.mark.parametrize("shape", TINY, ids=lambda shape: shape.name)
def test_every_peer_solves_the_same_problem(shape):
    rows, missing = time_shape(shape, HERE, budget_s=0)
    expected = [peer.name for peer in HERE if not peer.refuses(shape)]
    assert [r["peer"] for r in rows] == expected and {"ours", "plain"} <= set(expected)
    for r in rows:
        assert r["seconds"] > 0 and r["gflops"] == pytest.approx(shape.flops() / r["seconds"] / 1e9)
    assert {r["peer"]: r["reason"] for r in missing} == {
        peer.name: peer.refuses(shape) for peer in HERE if peer.refuses(shape)}
    op = {"decode": "decode"}.get(shape.op, "backward" if "backward" in shape.op else "forward")
    assert rows[0]["kernel"].startswith(f"{op}_cpu_") and "kernel" not in rows[-1]


@pytest.mark.parametrize("option, changes", [
    ({"softcap": 0.5}, True), ({"alibi": True}, True), ({"window": (1, 1)}, True),
    ({"lengths": (6, 6)}, False)])
def test_an_option_of_a_shape_is_applied(option, changes):
    """Agreement in the test above would not show an option that nobody applies."""
    inputs, shape = SQUARE.inputs(), replace(SQUARE, **option)
    given = tuple(tensor.flatten(0, 1) for tensor in inputs) if shape.lengths else inputs
    plain = PEERS["plain"]
    without, = plain.results(plain.prepare(SQUARE, inputs)())
    applied, = plain.results(plain.prepare(shape, given)())
    assert changes != torch.allclose(applied.flatten(), without.flatten(), atol=1e-6)


class Broken(Peer):
    def bind(self, shape, device):
        def attend(q, k, v):
            raise RuntimeError("No available kernel.\nAborting execution.")
        return attend


def test_a_peer_that_fails_is_missing_with_its_reason():
    rows, missing = time_shape(SQUARE, [PEERS["plain"], Broken("broken")], budget_s=0)
    assert [r["peer"] for r in rows] == ["plain"]
    assert missing == [{"name": "square", "peer": "broken", "reason": "RuntimeError: No available kernel."}]
    assert time_shape(SQUARE, [Broken("broken")], budget_s=0) == ([], missing)


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a CUDA device")
def test_cuda_peers_are_missing_without_a_device(capsys):
    here, missing = present(["ours", "sdpa_flash", "cudnn", "fa3"])
    assert [peer.name for peer in here] == ["ours", "sdpa_flash"]
    assert missing == [{"peer": name, "reason": "no CUDA device"} for name in ("cudnn", "fa3")]
    assert capsys.readouterr().out == "without cudnn: no CUDA device\nwithout fa3: no CUDA device\n"
    for name in ("cuda", "graphs", "decode", "overhead-cuda"):
        assert command.main([name]) == 1
        assert capsys.readouterr().out == "FAILED: no CUDA device\n"
    with pytest.raises(SystemExit, match="'fa9': expected the name of a kernel or one of ours"):
        present(["fa9"])


def test_kernels_are_compared_by_name():
    kernels = ["forward_cpu_baseline", "backward_cpu_baseline"]
    here, missing = present([*kernels, "forward_cpu_none"])
    assert missing == [{"peer": "forward_cpu_none", "reason": "this build has no such kernel"}]
    rows, missing = time_shape(replace(SQUARE, Sq=40), here, budget_s=0)
    assert [(r["peer"], r["kernel"]) for r in rows] == [(kernels[0], kernels[0])]
    assert [r["peer"] for r in missing] == [kernels[1]]


def test_fa3_takes_what_its_build_has(monkeypatch):
    fa3 = PEERS["fa3"]
    takes = [s.name for s in SETS["cuda"] + SETS["graphs"] if not fa3.refuses(s)]
    refused = {s.name: fa3.refuses(s) for s in SETS["cuda"] if s.op == "forward" and fa3.refuses(s)}
    assert len(takes) == 31 - 4 - 2 + 7 and all("float16" in refused[n] for n in refused if "float16" in n)
    assert "windows" in refused.pop("forward-window-1024") and "ALiBi" in refused.pop("forward-alibi")
    assert len(refused) == 4 and fa3.refuses(replace(SQUARE, op="backward")) == "forward only"
    bf16 = replace(SQUARE, dtype="bfloat16")
    assert fa3.refuses(replace(bf16, D=100)) and fa3.refuses(replace(bf16, D=264, Dv=264))
    assert fa3.refuses(replace(bf16, D=128, Dv=64)) and not fa3.refuses(replace(bf16, D=64, Dv=128))
    takes = [s.name for s in SETS["decode"] if not fa3.refuses(s)]
    assert len(takes) == 15 + 2 + 1 + 1 + 1 + 7 and "queries-16-b64-s8192-h32-8" in takes

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setitem(sys.modules, "fa3_fwd_interface", None)
    assert "ImportError" in fa3.missing() or "ModuleNotFoundError" in fa3.missing()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (10, 0))
    assert "compute capability" in fa3.missing()


def test_fa3_is_called_by_the_names_of_its_arguments(monkeypatch):
    """The signatures of fa3-fwd 0.0.3, over plain attention."""
    def flash_attn_func(q, k, v, softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None,
                        v_descale=None, window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1,
                        pack_gqa=None, deterministic=False, sm_margin=0, return_attn_probs=False):
        B, S, Hq, D = q.shape
        assert num_splits == (S == k.shape[1])
        shape = Shape("", "forward", B, S, k.shape[1], Hq, k.shape[2], D, v.shape[3], causal, softcap=softcap)
        plain = PEERS["plain"]
        return plain.layout(plain.bind(shape, q.device)(*map(plain.layout, (q, k, v))))

    def flash_attn_varlen_func(
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q=None, seqused_k=None,
            softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None, v_descale=None,
            window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None,
            deterministic=False, sm_margin=0, return_attn_probs=False):
        assert cu_seqlens_q.dtype == torch.int32 and torch.equal(cu_seqlens_q, cu_seqlens_k)
        parts = [tensor.tensor_split(cu_seqlens_q[1:-1].long()) for tensor in (q, k, v)]
        assert max_seqlen_q == max_seqlen_k == max(map(len, parts[0]))
        return torch.cat([flash_attn_func(*(t[None] for t in part), causal=causal, softcap=softcap)[0]
                          for part in zip(*parts)])

    monkeypatch.setitem(sys.modules, "fa3_fwd_interface", types.SimpleNamespace(
        flash_attn_func=flash_attn_func, flash_attn_varlen_func=flash_attn_varlen_func))
    bf16 = replace(SQUARE, dtype="bfloat16", causal=True)
    for shape in (bf16, replace(bf16, Hk=2, softcap=0.5), replace(bf16, B=3, lengths=(6, 1, 4)),
                  replace(bf16, Sq=2, Sk=9, op="decode")):
        rows, missing = time_shape(shape, [PEERS[name] for name in ("ours", "plain", "fa3")], budget_s=0)
        assert [r["peer"] for r in rows] == ["ours", "plain", "fa3"] and not missing


class FakeCuda:
    """The parts of torch.cuda that capture uses; a captured call runs at once, and again in a replay."""

    def __init__(self, monkeypatch):
        self.graphs, self.capturing = [], None
        stream = types.SimpleNamespace(wait_stream=lambda other: None)
        for name, value in (("Stream", lambda: stream), ("current_stream", lambda: stream),
                            ("stream", contextlib.nullcontext), ("graph", self.graph),
                            ("CUDAGraph", lambda: types.SimpleNamespace(pool=lambda: "pool"))):
            monkeypatch.setattr(torch.cuda, name, value)

    @contextlib.contextmanager
    def graph(self, graph, pool=None):
        assert pool == ("pool" if self.graphs else None)
        graph.calls = self.capturing = []
        graph.replay = lambda: [call() for call in graph.calls]
        self.graphs.append(graph)
        yield
        self.capturing = None

    def attend(self, attend, seen):
        def call(q, k, v):
            seen.append(q.data_ptr())
            if self.capturing is not None:
                self.capturing.append(lambda: attend(q, k, v))
            return attend(q, k, v)
        return call


def test_the_calls_in_graphs_have_inputs_of_their_own(monkeypatch):
    cuda, seen = FakeCuda(monkeypatch), []

    class Watched(type(PEERS["plain"])):
        def bind(self, shape, device):
            return cuda.attend(super().bind(shape, device), seen)

    monkeypatch.setattr(timing, "GRAPH_BYTES", 18 * SQUARE.input_bytes() - 1)
    rows, missing = time_shape(SQUARE, [Watched("plain")], budget_s=0, how=graphed)
    assert [r["peer"] for r in rows] == ["plain"] and not missing
    assert [len(graph.calls) for graph in cuda.graphs] == [GRAPH_CALLS] * 3
    warm_up, captured = seen[:3], seen[3:]
    assert len(set(captured)) == input_sets(SQUARE) == 18
    assert captured[18:] == captured[:6] and warm_up == captured[:3]  # the last graph starts over
    cuda.graphs.clear()
    assert graphed(Watched("plain"), SQUARE, SQUARE.inputs()).count == 24


def test_a_call_in_graphs_is_a_replay_over_its_calls(monkeypatch):
    monkeypatch.setattr(timing, "interleave", lambda calls, **options: dict.fromkeys(calls, [4.0, 8.0, 6.0]))

    def how(peer, shape, inputs):
        return replace(eager(peer, shape, inputs), count=12)

    (row,), _ = time_shape(SQUARE, [PEERS["plain"]], budget_s=0, how=how)
    assert row["seconds"] == 0.5 and row["rounds"] == 3
    assert row["gflops"] == pytest.approx(SQUARE.flops() / 0.5 / 1e9)


def test_what_cannot_be_captured_is_missing(monkeypatch):
    def capture(calls):
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(timing, "capture", capture)
    rows, missing = time_shape(SQUARE, [PEERS["plain"]], budget_s=0, how=graphed)
    assert rows == [] and "not permitted when stream is capturing" in missing[0]["reason"]


def test_inputs_of_graphs_fill_more_than_a_cache():
    for shape in SETS["graphs"] + [shape for shape in SETS["decode"] if shape.graph]:
        total = input_sets(shape) * shape.input_bytes()
        assert total >= 400e6 and input_sets(shape) >= 2, shape.name
        assert total <= max(400e6 + max(shape.input_bytes(), 400e6 / 2), 2 * shape.input_bytes())


def test_a_peer_that_solves_another_problem_is_not_timed():
    class Wrong(Peer):
        def bind(self, shape, device):
            return lambda q, k, v: 0.9 * v

    with pytest.raises(RuntimeError, match="square: wrong and plain differ"):
        time_shape(SQUARE, [PEERS["plain"], Wrong("wrong")], budget_s=0)


def test_the_majority_says_who_solves_another_problem():
    class Wrong(type(PEERS["plain"])):
        def bind(self, shape, device):
            attend = super().bind(shape, device)
            return lambda q, k, v: 0.9 * attend(q, k, v)

    right, wrong = [PEERS["plain"], PEERS["sdpa"]], Wrong("wrong")
    for peers in ([*right, wrong], [wrong, *right]):
        rows, missing = time_shape(SQUARE, peers, budget_s=0)
        assert {r["peer"] for r in rows} == {"plain", "sdpa"} and [r["peer"] for r in missing] == ["wrong"]
        assert re.match(r"square: wrong and \w+ differ by 0\.1", missing[0]["reason"])
    with pytest.raises(RuntimeError, match="differ"):
        time_shape(SQUARE, [*right, wrong, Wrong("as wrong")], budget_s=0)


def test_torch_refuses_what_it_would_solve_differently():
    sdpa, flash = PEERS["sdpa"], PEERS["sdpa_flash"]
    assert "window" in sdpa.refuses(replace(SQUARE, window=(1, 1)))
    assert "top-left" in sdpa.refuses(replace(SQUARE, Sk=9, causal=True))
    assert not sdpa.refuses(replace(SQUARE, Sk=9)) and not sdpa.refuses(replace(SQUARE, Sq=1, causal=True))
    for option in ({"softcap": 1.0}, {"alibi": True}, {"lengths": (6, 6)}, {"page_size": 2},
                   {"append": True}):
        assert sdpa.refuses(replace(SQUARE, **option))
    assert flash.refuses(replace(SQUARE, Dv=4)) and not sdpa.refuses(replace(SQUARE, Dv=4))
    rows, missing = time_shape(replace(SQUARE, window=(1, 1)), [sdpa], budget_s=0)
    assert rows == [] and [r["peer"] for r in missing] == ["sdpa"]


def test_ratios_are_the_peers_time_over_ours():
    rows = [timed_row("x", "ours", 2.0), timed_row("x", "sdpa", 1.0), timed_row("y", "ours", 1.0),
            timed_row("y", "sdpa", 8.0), timed_row("z", "sdpa", 1.0)]
    results.add_ratios(rows)
    assert [r.get("ratio") for r in rows] == [None, 0.5, None, 8.0, None]
    assert tables.geometric_mean([0.5, 8.0]) == pytest.approx(2.0)
    cells = [cell.strip() for cell in tables.summary_table(rows).splitlines()[2].strip("|").split("|")]
    assert cells == ["forward", "float32", "sdpa", "2", "0.5 to 1", "0.125 to 1", "2.00", "0.50 at x"]
    assert [line.split()[-2] for line in tables.timing_table(rows).splitlines()[2:]] == ["0.50", "8.00", "|"]


def test_the_best_peer_of_each_shape_is_summed_up():
    rows = [timed_row(name, peer, seconds) for name, *times in (("x", 2.0, 1.0, 4.0), ("y", 1.0, 16.0, 2.0))
            for peer, seconds in zip(("ours", "cudnn", "fa3"), times)] + [timed_row("z", "ours", 1.0)]
    results.add_ratios(rows)
    ours = {r["name"]: (r.get("best_peer"), r.get("best_ratio")) for r in rows if r["peer"] == "ours"}
    assert ours == {"x": ("cudnn", 0.5), "y": ("fa3", 2.0), "z": (None, None)}
    lines = [[cell.strip() for cell in line.strip("|").split("|")]
             for line in tables.summary_table(rows).splitlines()[2:]]
    assert [line[2:4] + line[6:] for line in lines] == [
        ["best", "2", "1.00", "0.50 at x (cudnn)"],
        ["cudnn", "2", "2.83", "0.50 at x"], ["fa3", "2", "2.00", "2.00 at x"]]
    assert lines[0][4:6] == ["0.5 to 1", "0.5 to 1"]  # the best peers' own rates
    header, _, *lines = tables.timing_table(rows).splitlines()
    assert header.split("|")[-2].strip() == "best / ours"
    assert [line.split("|")[-2].strip() for line in lines] == ["0.50 cudnn", "2.00 fa3", ""]
    assert tables.unrivalled(rows) == "No peer here computes z (ours 1 GFLOP/s)."
    assert tables.unrivalled(rows[:-1]) == ""


def test_fast_cards_are_counted_in_teraflops():
    rows = [{**timed_row("x", peer, 1.0), "gflops": gflops}
            for peer, gflops in (("ours", 7e5), ("fa3", 6.5e5))]
    results.add_ratios(rows)
    assert "| our TFLOP/s |" in tables.summary_table(rows) and "| 700 to 700 " in tables.summary_table(rows)
    assert ", 700 TFLOP/s |" in tables.timing_table(rows)


def test_missing_peers_are_summed_up():
    window = {"peer": "cudnn", "reason": "no window"}
    text = tables.missing_text([{"peer": "fa3", "reason": "not installed"}, {"name": "x", **window},
                                 {"name": "y", **window}, {"name": "x", "peer": "fa2", "reason": "no"}])
    assert text.splitlines() == ["without fa3: not installed", "without cudnn, 2 shapes: no window",
                                 "without fa2, x: no"]


def test_a_part_of_a_run_replaces_no_record(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(results, "FOLDER", tmp_path / "kept")
    monkeypatch.setitem(SETS, "cpu", [SQUARE, replace(SQUARE, name="again", op="backward"),
                                      replace(SQUARE, name="again 2")])
    threads = str(torch.get_num_threads())
    run = ["cpu", "--seconds", "0", "--threads", threads]

    def timed_names(*part, folder=tmp_path / "part"):
        assert command.main([*run, *part, "--results", str(folder), "--commit", "c0ffee"]) == 0
        capsys.readouterr()
        return list(dict.fromkeys(r["name"] for r in json.loads((folder / "cpu.json").read_text())["rows"]))

    assert timed_names("--only", "^again") == ["again", "again 2"]
    assert timed_names("--only", "[^2]$") == ["square", "again"]
    assert timed_names("--kinds", "forward") == ["square", "again 2"]
    assert timed_names("--kinds", "forward,backward", "--only", "again") == ["again", "again 2"]
    record = json.loads((tmp_path / "part" / "cpu.json").read_text())
    line = f"python -m bench cpu --seconds 0 --threads {threads} --kinds forward,backward --only again"
    assert (record["command"], record["commit"]) == (line, "c0ffee")

    for part in (["--only", "again"], ["--kinds", "backward"], ["--peers", "ours"]):
        assert command.main([*run, *part]) == 0
        assert "part of a run: recorded with --results FOLDER only" in capsys.readouterr().out
        assert not results.FOLDER.exists()
    assert command.main([*run, "--peers", "ours,plain,sdpa"]) == 0 and (results.FOLDER / "cpu.json").exists()
    assert command.main([*run, "--only", "nothing like it"]) == 1
    for wrong in (["--only", "("], ["--kinds", "sideways"], ["--onl", "x"]):
        with pytest.raises(SystemExit):
            command.main([*run, *wrong])


def test_the_recorded_command_says_what_was_run_only():
    line = ["--commit=1", "cuda", "--results", "a b", "--only", "x y", "--commit", "abc", "--check", "1"]
    assert command.without_bookkeeping(line) == ["cuda", "--only", "x y", "--check", "1"]


def test_ours_missing_is_a_failure(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(SETS, "cpu", [SQUARE, replace(SQUARE, name="again")])
    run = ["cpu", "--seconds", "0", "--threads", str(torch.get_num_threads()), "--results", str(tmp_path)]
    monkeypatch.setitem(PEERS, "ours", Broken("ours"))
    assert command.main(run) == 1
    assert "FAILED: ours is not timed at square: RuntimeError: No available" in capsys.readouterr().out

    class Wrong(Peer):
        def bind(self, shape, device):
            return lambda q, k, v: v if shape.name == "again" else PEERS["plain"].layout(
                PEERS["plain"].bind(shape, device)(*map(PEERS["plain"].layout, (q, k, v))))

    monkeypatch.setitem(PEERS, "ours", Wrong("ours"))
    assert command.main(run) == 1 and "sdpa and ours differ" in capsys.readouterr().out
    record = json.loads((tmp_path / "cpu.json").read_text())
    assert [r["name"] for r in record["rows"]] == ["square", "square"]  # the others are kept
    assert [(r["name"], r["peer"]) for r in record["missing"]] == [("again", "ours")]


def test_a_run_is_recorded_and_checked(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(SETS, "cpu", [SQUARE, replace(SQUARE, name="again", op="backward")])
    threads = str(torch.get_num_threads())
    run = ["--results", str(tmp_path), "cpu", "--seconds", "0", "--threads", threads, "--check"]
    assert command.main([*run, "1e-6"]) == 0 and command.main([*run, "1e6"]) == 1
    assert "FAILED" in capsys.readouterr().out
    result = json.loads((tmp_path / "cpu.json").read_text())
    assert result["command"] == " ".join(["python -m bench", *run[2:], "1e6"])
    assert result["machine"]["torch"] == torch.__version__ and result["machine"]["threads"] == int(threads)
    assert [(r["name"], r["peer"]) for r in result["rows"]] == [
        (name, peer) for name in ("square", "again") for peer in ("ours", "sdpa")]
    header, *lines = (tmp_path / "cpu.csv").read_text().splitlines()
    measured = {"peer", "seconds", "spread", "rounds", "gflops", "moved_bytes", "kernel", "ratio",
                "best_peer", "best_ratio"}
    assert set(header.split(",")) == set(asdict(SQUARE)) | measured
    assert len(lines) == 4
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


def test_a_section_names_peers_versions_and_what_is_missing():
    rows = [timed_row("x", "ours", 2.0), timed_row("x", "fa3", 1.0), timed_row("y", "ours", 1.0)]
    results.add_ratios(rows)
    assert "best" not in tables.summary_table(rows)  # of one there is no best
    result = results.record("graphs", "python -m bench graphs", rows, "abc", missing=[
        {"peer": "cudnn", "reason": "no cuDNN"}, {"peer": "fa3", "name": "y", "reason": "no window"}])
    result["machine"] |= {"cards": ["A card"], "cudnn": 91900, "fa3": "0.0.3",
                          "state": [{"driver_version": "580.1"}]}
    text = results.section(result)
    assert "fa3: FlashAttention-3" in text and "without cudnn: no cuDNN" in text and "no window" not in text
    assert "No peer here computes y (ours 1 GFLOP/s)." in text
    assert f"A card, torch {torch.__version__}, cuDNN 9.19.0, fa3-fwd 0.0.3, driver 580.1," in text


DETAILS = """==PROF== Connected to process 7 (/usr/bin/python3)
==PROF== Profiling "spin_kernel" - 0: 0%....50%....100% - 1 pass
"ID","Process ID","Kernel Name","Context","Section Name","Metric Name","Metric Unit","Metric Value"
"0","7","void at::spin_kernel(long)","1","Command line profiler metrics","dram__bytes_read.sum","byte","96"
"1","7","gemm<a, b>","1","Command line profiler metrics","dram__bytes_read.sum","byte","1,234"
"1","7","gemm<a, b>","1","Command line profiler metrics","dram__bytes_write.sum","Kbyte","2.5"
"1","7","gemm<a, b>","1","Command line profiler metrics","lts__t_sectors.sum","sector","1,000"
==PROF== Disconnected from process 7
"2","7","reduce","1","Command line profiler metrics","dram__bytes_read.sum","Mbyte","n/a"
"""
RAW = '''"ID","Process ID","Kernel Name","dram__bytes_read.sum","dram__bytes_write.sum","lts__t_sectors.sum"
"","","","Gbyte","byte","sector"
"0","7","spin_kernel","0","0","0"
"1","7","gemm","1.5","2,000","7"
'''


def test_what_ncu_prints_is_read_on_either_page():
    (spin, _), (name, metrics), (_, none) = io.read_csv(DETAILS)
    assert "spin_kernel" in spin and name == "gemm<a, b>" and none == {}
    assert metrics == {"dram__bytes_read.sum": 1234, "dram__bytes_write.sum": 2500,
                       "lts__t_sectors.sum": 1000}
    assert io.read_csv(RAW)[1] == ("gemm", {"dram__bytes_read.sum": 1.5e9, "dram__bytes_write.sum": 2000,
                                            "lts__t_sectors.sum": 7})
    assert io.read_csv("==ERROR== nothing\n") == []


def test_a_call_is_what_lies_between_its_markers():
    def kernel(name, read, write):
        return name, {"dram__bytes_read.sum": read, "dram__bytes_write.sum": write, "lts__t_sectors.sum": 3}

    spin = kernel("spin_kernel", 900, 900)
    kernels = [spin, kernel("a", 1, 2), kernel("b", 10, 20), spin, kernel("flush", 700, 5), spin, spin]
    (call, flush), nothing = io.calls(kernels)
    assert io.figures(call, flush, "lts__t_sectors.sum", 32) == {
        "dram_read": 11, "dram_write": 27, "l2_bytes": 192, "kernels": ["a", "b"]}
    assert "l2_bytes" not in io.figures(call, flush, None, 0)
    with pytest.raises(ValueError, match="no kernel"):
        io.figures(*nothing, None, 0)
    with pytest.raises(KeyError, match="lts__t_bytes"):
        io.figures(call, flush, "lts__t_bytes.sum", 1)


FAKE_NCU = """#!{python}
import json, sys
given = dict(zip(sys.argv, sys.argv[1:]))
metrics = given["--metrics"].split(",")
assert given["--cache-control"] == "none" and given["--profile-from-start"] == "off"
assert given["-m"] == "bench.io"
log = open(given["--log-file"], "w")
if "lts__t_bytes.sum" in metrics and {old}:
    sys.exit("==ERROR== Failed to find metric lts__t_bytes.sum")
if {forbidden}:
    log.write("==ERROR== ERR_NVGPUCTRPERM - The user does not have permission")
peers = given["--peers"].split(",")
cases = [["", True], ["OutOfMemoryError: much", False], ["RuntimeError: late", True], ["", True]]
with open(given["--done"], "w") as done:
    for error, launched in cases:
        done.write(json.dumps(dict(error=error, launched=launched)) + chr(10))
row, number = '"{{}}","{{}}","{{}}","byte","{{}}"' + chr(10), 0
if not {forbidden}:
    log.write("==PROF== 100% - " + ("2 passes" if len(metrics) > 2 and {several} else "1 pass") + chr(10))
    log.write('"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"' + chr(10))
    for case, (error, launched) in enumerate(cases):
        for name in ("spin_kernel", "gemm", "spin_kernel", "reduce") if launched else ():
            for metric in metrics:
                value = 1000 * case + 1 + {several} * (len(metrics) == 2)
                log.write(row.format(number, name, metric, value if name == "gemm" else 7))
            number += 1
"""


@pytest.fixture
def fake_ncu(tmp_path, monkeypatch):
    def install(old=False, forbidden=False, several=False):
        path = tmp_path / "ncu"
        path.write_text(FAKE_NCU.format(python=sys.executable, old=old, forbidden=forbidden, several=several))
        path.chmod(0o755)
        monkeypatch.setattr(io, "find_ncu", lambda: str(path))
        monkeypatch.setitem(SETS, "io", [SQUARE, replace(SQUARE, name="again"), replace(SQUARE, name="last")])
        return list(io.rows_on_card([PEERS["ours"], PEERS["plain"]]))
    return install


@pytest.mark.parametrize("old", [False, True])
def test_counters_go_to_their_shapes(fake_ncu, old):
    rows = fake_ncu(old)
    assert [(shape.name, r["peer"]) for shape, r in rows] == [
        (name, peer) for name in ("square", "again", "last") for peer in ("ours", "plain")]
    figures = [(r.get("dram_read"), r.get("dram_write"), r.get("l2_bytes"), r.get("error")) for _, r in rows]
    assert figures[0] == (1, 8, 32 if old else 1, None) and rows[0][1]["passes"] == 1
    assert figures[3] == (3001, 3008, 3001 * (32 if old else 1), None)
    assert figures[1][3] == "OutOfMemoryError: much" and figures[2][3] == "RuntimeError: late"
    assert all(figure[3].startswith("not reached") for figure in figures[4:])
    ours, plain = rows[0][1]["formula"], rows[1][1]["formula"]
    element = 2 * 4 * 6 * 4  # a number of each row and head, float32
    assert ours == element * (4 * 8 + 1) and plain == 4 * SQUARE.score_bytes() + element * 4 * 8


def test_memory_is_counted_alone_where_passes_would_warm_the_cache(fake_ncu):
    figures = [(r.get("dram_read"), r.get("dram_write"), r.get("l2_bytes"), r.get("passes"))
               for _, r in fake_ncu(several=True)]
    assert figures[0] == (2, 9, 1, 1) and figures[3] == (3002, 3009, 3001, 1)


def test_why_nothing_was_counted():
    trace = "Traceback:\n  raise AssertionError('x')\nAssertionError: no CUDA\n"
    ncu = "==PROF== Connected\n==ERROR== The application returned an error code (1).\n==ERROR== more\n"
    assert io.failure(ncu, trace) == "AssertionError: no CUDA"
    assert io.failure(ncu, "fine\n") == "==ERROR== The application returned an error code (1)."
    assert io.failure('"ID","Kernel Name"', "") == "no error was printed"


def test_counters_out_of_reach_are_a_reason(fake_ncu, monkeypatch):
    rows = fake_ncu(forbidden=True)
    assert all("ERR_NVGPUCTRPERM" in rows[i][1]["error"] for i in (0, 3))
    monkeypatch.setattr(io, "find_ncu", lambda: None)
    assert {r["error"] for _, r in io.rows_on_card([PEERS["ours"]])} == {"no ncu (Nsight Compute) here"}


class FakeCard:
    """What the programs for a card ask of torch.cuda, as a log, over CPU tensors."""

    def __init__(self, monkeypatch):
        self.log, self.peak = [], 0
        cudart = types.SimpleNamespace(cudaProfilerStart=lambda: self.log.append("start"),
                                       cudaProfilerStop=lambda: self.log.append("stop"))
        for name, value in (
                ("cudart", lambda: cudart), ("_sleep", lambda cycles: self.log.append("spin")),
                ("synchronize", lambda: None), ("empty_cache", lambda: None), ("is_available", lambda: True),
                ("get_device_capability", lambda: (9, 0)), ("device_count", lambda: 1),
                ("get_device_name", lambda i: "A card"), ("current_device", lambda: 1),
                ("get_device_properties", lambda i: types.SimpleNamespace(uuid=("another", "this")[i])),
                ("reset_peak_memory_stats", lambda: self.log.append("reset")),
                ("memory_allocated", lambda: 100), ("max_memory_allocated", lambda: 100 + self.peak)):
            monkeypatch.setattr(torch.cuda, name, value)

    def peer(self, name, fails=lambda shape: None):
        class Logged(type(PEERS["plain"])):
            def bind(peer, shape, device):
                attend = super().bind(shape, device)

                def call(q, k, v):
                    self.log.append(shape.name)
                    fails(shape)
                    return attend(q, k, v)
                return call
        return Logged(name)


def test_the_program_under_ncu_profiles_one_warm_call(tmp_path, monkeypatch):
    monkeypatch.setattr(io, "FLUSH_BYTES", 16)
    fake, calls = FakeCard(monkeypatch), []

    def fails(shape):
        calls.append(shape.name)
        if shape.name == "wrong" and len(calls) == 4:
            raise RuntimeError("in the second call")

    peer = fake.peer("plain", fails)
    cases = [(replace(SQUARE, name=name, **more), peer)
             for name, more in (("right", {}), ("wrong", {}), ("refused", {"Sq": 7, "causal": True}))]
    io.child(cases, tmp_path / "done", 100, "cpu")
    right, wrong = (["start", "spin", name, "spin", "stop"] for name in ("right", "wrong"))
    assert fake.log == ["right", *right, "wrong", *wrong]
    done = [json.loads(line) for line in (tmp_path / "done").read_text().splitlines()]
    assert [(entry["error"], entry["launched"]) for entry in done] == [
        ("", True), ("RuntimeError: in the second call", True), ("a query without a key is NaN", False)]
    io.child(cases[:1], tmp_path / "done", -1, "cpu")
    assert json.loads((tmp_path / "done").read_text())["error"] == "the time was used up"


def test_memory_of_a_card_goes_on_after_a_failure(monkeypatch):
    fake = FakeCard(monkeypatch)
    fake.peak = 5000

    def fails(shape):
        if shape.Sk >= 12:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate much")

    shapes = [replace(SQUARE, name=f"{op}-{S}", op=op, Sq=S, Sk=S)
              for op in ("forward", "forward+backward") for S in (6, 12, 24)]
    found = [(shape.name, r["peer"], r.get("extra_bytes"), r.get("error", "")[:22]) for shape, r in
             memory.rows_on_card([fake.peer("ours"), fake.peer("plain", fails)], shapes, "cpu")]
    for op in ("forward", "forward+backward"):
        assert [row[1:] for row in found if row[0].startswith(f"{op}-")] == [
            ("ours", 5000, ""), ("plain", 5000, ""),
            ("ours", 5000, ""), ("plain", None, "OutOfMemoryError: CUDA"),
            ("ours", 5000, ""), ("plain", None, "out of memory at a sho")]
    lines = tables.card_memory_table([results.row(shape, r) for shape, r in memory.rows_on_card(
        [fake.peer("ours"), fake.peer("plain", fails)], shapes[:3], "cpu")]).splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]
    assert [line[3:5] for line in cells] == [["5 kB", "5 kB"], ["5 kB", "-"], ["5 kB", "-"]]


@pytest.mark.parametrize("changes", [{}, {"causal": True, "Sk": 9}, {"Hk": 2, "window": (2, 1)}])
def test_the_oracle_in_blocks_is_the_reference(changes):
    shape = replace(SQUARE, dtype="float64", **changes)
    given = shape.inputs()
    q, k, v = (t.clone().requires_grad_() for t in given[:3])
    out, _, _ = reference.forward(q, k, v, causal=shape.causal, window=shape.window)
    grads = torch.autograd.grad(out, (q, k, v), given[3])
    for block in (1, 20, 2**20):
        for op, tensors in (("forward", (out,)), ("backward", grads)):
            found = exact.oracle(replace(shape, op=op), given, block)
            for name, expected in zip(exact.TENSORS[op], tensors, strict=True):
                torch.testing.assert_close(found[name], expected, rtol=1e-12, atol=1e-12)


def test_errors_are_a_distribution():
    errors = torch.arange(1001.0)
    assert exact.quantiles(errors[torch.randperm(1001)]) == {
        "median": 500, "p99": 990, "p999": 999, "max": 1000}
    expected = torch.tensor([[3.0, 4.0], [30.0, 40.0]], dtype=torch.float64)  # rms 3.54 and 35.4
    found = exact.distribution(expected + torch.tensor([[0.5, 0.0], [0.0, 1.0]]), expected)
    assert found["abs_max"] == 1.0 and found["max"] == pytest.approx(0.5 / 12.5**0.5)
    expected[0] = 0  # rms of the whole: 25
    assert exact.distribution(expected + 1e-3, expected)["max"] == pytest.approx(1e-3 / 2.5)


def test_every_peer_has_its_errors(monkeypatch):
    shapes = [replace(SQUARE, name=f"{kind}-bfloat16", dtype="bfloat16", causal=True)
              for kind in ("normal", "outliers")]
    rows = [(shape.name, shape.op, r) for shape, r in
            exact.rows([PEERS["ours"], PEERS["plain"], Broken("broken")], shapes, "cpu")]
    for name in ("normal-bfloat16", "outliers-bfloat16"):
        assert [(op, r["peer"], r["tensor"]) for where, op, r in rows if where == name] == [
            ("forward", "ours", "out"), ("forward", "plain", "out"), ("forward", "broken", "out"),
            *(("backward", peer, tensor) for peer in ("ours", "plain") for tensor in ("dq", "dk", "dv")),
            ("backward", "broken", "dq")]
    for _, _, r in rows:
        if r["peer"] == "broken":
            assert "No available kernel" in r["error"]
        else:
            assert 0 <= r["median"] <= r["p99"] <= r["p999"] <= r["max"] < 0.3 and r["abs_max"] > 0
            assert r["median"] < 2 * torch.finfo(torch.bfloat16).eps
        if r["peer"] == "plain" and r["tensor"] == "out":
            assert r["draws"] == 16 and r["p999_ratio_error"] > 0 and 0.2 < r["median_ratio"] < 1
        else:
            assert "median_ratio" not in r
    monkeypatch.setattr(exact, "oracle", lambda *given: torch.zeros(-1))
    assert [(r["peer"], r["error"][:32]) for _, r in exact.rows([PEERS["ours"]], shapes, "cpu")] == [
        ("ours", "no float64 result: RuntimeError:")] * 4
    normal, outliers = (exact.inputs(shape, "cpu")[0].float().abs().max() for shape in (
        replace(SQUARE, name=name, Sq=300) for name in ("normal", "outliers")))
    assert outliers > 2 * normal


def test_errors_of_draws_are_compared_draw_by_draw():
    first, second = ({"median": 2.0, "p999": 5.0, "max": 9.0}, {"median": 4.0, "p999": 6.0, "max": 8.0})
    assert exact.of_draws([first, second]) == {"median": 3.0, "p999": 5.5, "max": 9.0}
    found = exact.ratios([first, second], [{"median": 2.0, "p999": 10.0}, {"median": 2.0, "p999": 6.0}])
    assert found == pytest.approx({"median_ratio": 1.5, "median_ratio_error": 0.5,
                                   "p999_ratio": 0.75, "p999_ratio_error": 0.25})
    row = {"name": "long-float16", "dtype": "float16", "tensor": "out", "peer": "ours",
           "median": 1.0, "p999": 1.0, "max": 1.0}
    peer = {**row, "peer": "fa3", "median_ratio": 1.03, "median_ratio_error": 0.01, "p999_ratio": 1.01,
            "p999_ratio_error": 0.01}
    text = tables.exact_table([row, peer])
    assert "1.0300 ±0.0100" in text and "1.0100 ±0.0100" in text
    assert text.endswith("standard errors: fa3 at long-float16, median.")
    assert tables.exact_table([row, {**peer, "median_ratio": 0.99}]).endswith("standard errors: nowhere.")
    assert "±" not in tables.exact_table([row])


def test_growth_is_a_power_law():
    points = [(x, 3 * x**1.7) for x in (1, 2, 8, 64)]
    assert tables.slope(points) == pytest.approx(1.7)
    rows = []
    for S in (64, 16, 32, 128):
        shape = replace(SQUARE, name=f"S-forward-{S}", Sq=S, Sk=S)
        for peer, power in (("ours", 2), ("plain", 2.5)):
            rows.append(results.row(shape, {"peer": peer, "seconds": S**power, "moved_bytes":
                                            shape.moved_bytes(PEERS[peer].standard)}))
    lines = [[cell.strip() for cell in line.strip("|").split("|")]
             for line in tables.growth_table(rows).splitlines()[2:]]
    assert [line[:3] + line[4:] for line in lines] == [
        ["S, forward", "ours", "16 to 128", "2.00", "1.00"],
        ["S, forward", "plain", "16 to 128", "2.50", "1.92"]]
    series = [[s for s in SETS["growth"] if s.name.startswith(kind)] for kind in ("S-", "B-", "H-", "D-")]
    assert sum(map(len, series)) == len(SETS["growth"])
    for kind, shapes in zip("SBHD", series):
        fields = {"S": ("Sq", "Sk"), "B": ("B",), "H": ("Hq", "Hk"), "D": ("D", "Dv")}[kind]
        for shape in shapes:
            assert {getattr(shape, field) for field in fields} == {tables.grown({"name": shape.name})}
        fixed = {tuple(value for name, value in asdict(shape).items() if name not in ("name", "op", *fields))
                 for shape in shapes}
        assert len(fixed) == 1


def test_moved_bytes_are_those_of_the_formulas():
    element = 2 * 6 * 4 * 4  # float32, one number of each row and head
    assert replace(SQUARE, op="forward+backward").moved_bytes() == (
        SQUARE.moved_bytes() + replace(SQUARE, op="backward").moved_bytes())
    assert SQUARE.moved_bytes() == element * (4 * 8 + 1)
    packed = replace(SQUARE, B=3, lengths=(6, 1, 4))
    assert packed.moved_bytes() == 11 * 4 * 4 * (4 * 8 + 1)
    assert DECODE.moved_bytes() == DECODE.cache_bytes() + 2 * 2 * 4 * 8 * 4
    assert PEERS["plain"].standard and PEERS["sdpa_math"].standard and not PEERS["ours"].standard


def test_ceilings_are_measured_and_rows_compared_with_them():
    found = card.ceilings("cpu", size=64, read_bytes=2**16, seconds=0)
    assert found["read_by"] in ("sum", "mv") and min(found[key] for key in (
        "gflops", "read_gbytes", "copy_gbytes")) > 0
    rows = [{"dtype": "bfloat16", "gflops": 50.0}, {"dtype": "bfloat16", "gflops": 50.0, "gbytes": 4.0},
            {"dtype": "float32", "gflops": 50.0}]
    results.add_shares(rows, {"gflops": 100.0, "read_gbytes": 5.0})
    assert [r.get("of_ceiling") for r in rows] == [0.5, 0.8, None]
    shown = timed_row("x", "ours", 1.0) | {"of_ceiling": 0.75}
    assert "| 75% " in tables.timing_table([shown]) and "of ceiling" in tables.timing_table([shown])
    text = results.ceilings_text({"ceilings": found | {"gflops": 789e3}, "rows": [shown], "watched": {
        "clocks.sm": [1000.0, 1500.0, 1980.0], "power.draw": [1, 2, 700.0]}})
    assert "789 TFLOP/s" in text and "75% to 75% of the product" in text and "1500 MHz (1000 to 1980)" in text
    assert results.ceilings_text({"rows": [shown]}) == ""


def test_the_card_is_watched_while_a_run_lasts(tmp_path, monkeypatch):
    (tmp_path / "nvidia-smi").write_text(f"""#!{sys.executable}
import pathlib, sys, time
assert "--id=GPU-this" in sys.argv or "--loop-ms=500" not in sys.argv
for line in ("1500, 600.5, 50", "1980, 100, [N/A]", "1700, 700, 60", "1800, 650, 55"):
    print(line, flush=True)
pathlib.Path(sys.argv[0]).with_name("printed").touch()
time.sleep(60 if "--loop-ms=500" in sys.argv else 0)
""")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    FakeCard(monkeypatch)
    with card.Watch() as watch:
        while not (tmp_path / "printed").exists():
            assert watch.process.poll() is None
            time.sleep(0.01)
    assert watch.summary() == {"clocks.sm": [1500, 1700, 1800], "power.draw": [600.5, 650, 700],
                               "temperature.gpu": [50, 55, 60]}
    monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))
    with card.Watch() as watch:
        pass
    assert watch.summary() == {} and card.cards() == []


def test_a_record_is_there_after_every_row(tmp_path, monkeypatch):
    monkeypatch.setitem(SETS, "cpu", [SQUARE, replace(SQUARE, name="again")])
    seen = []

    def watched(shape, *given):
        path = tmp_path / "cpu.json"
        record = json.loads(path.read_text()) if path.exists() else {"rows": [], "complete": False}
        seen.append((len(record["rows"]), record["complete"]))
        return time_shape(shape, *given)

    monkeypatch.setattr(command, "time_shape", watched)
    run = ["cpu", "--seconds", "0", "--threads", str(torch.get_num_threads()), "--results", str(tmp_path)]
    assert command.main(run) == 0 and seen == [(0, False), (2, False)]
    record = json.loads((tmp_path / "cpu.json").read_text())
    assert record["complete"] and len(record["rows"]) == 4
    assert "cut short" in results.section({**record, "complete": False})
    assert "cut short" not in results.section(record)


def test_a_budget_leaves_out_what_comes_late(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(SETS, "cpu", [SQUARE, replace(SQUARE, name="again")])
    run = ["cpu", "--seconds", "0", "--threads", str(torch.get_num_threads()), "--results", str(tmp_path)]
    assert command.main([*run, "--budget", "1e-9"]) == 1
    assert "ours is not timed at again: TimeoutError: the budget of 1e-09 s" in capsys.readouterr().out
    record = json.loads((tmp_path / "cpu.json").read_text())
    assert record["rows"] == [] and not record["complete"]


def test_what_is_counted_is_recorded_and_shown(tmp_path, monkeypatch, capsys):
    FakeCard(monkeypatch)
    monkeypatch.setitem(SETS, "exact", [replace(SQUARE, name="normal-bfloat16", dtype="bfloat16")])
    monkeypatch.setattr(exact, "rows", partial(exact.rows, device="cpu"))
    assert command.main(["exact", "--results", str(tmp_path), "--peers", "ours,plain,fa3"]) == 0
    out = capsys.readouterr().out
    record = json.loads((tmp_path / "exact.json").read_text())
    assert record["complete"] and len(record["rows"]) == 8 and record["missing"][0]["peer"] == "fa3"
    assert "| normal | bfloat16 | dv " in out and "without fa3" in out
    assert "| normal | bfloat16 | dv " in results.section(record)
    wrong = SQUARE, {"peer": "ours", "error": "E: no"}
    monkeypatch.setattr(exact, "rows", lambda *given: iter([wrong, wrong]))
    assert command.main(["exact", "--results", str(tmp_path), "--peers", "ours", "--budget", "0"]) == 1
    record = json.loads((tmp_path / "exact.json").read_text())
    assert not record["complete"] and len(record["rows"]) == 1
    assert "without ours, square: E: no" in capsys.readouterr().out


def test_runs_on_a_card_are_compared_with_its_ceilings(tmp_path, monkeypatch, capsys):
    FakeCard(monkeypatch)
    inputs = Shape.inputs
    monkeypatch.setattr(Shape, "inputs", lambda self, device: inputs(self, "cpu"))
    ceilings = {"gflops": 50.0, "read_gbytes": 5.0, "copy_gbytes": 6.0, "read_by": "sum"}
    monkeypatch.setattr(card, "ceilings", lambda: ceilings)
    bf16 = replace(SQUARE, dtype="bfloat16")
    for name, shapes in (("cuda", [bf16, replace(bf16, name="back", op="backward")]),
                         ("decode", [replace(DECODE, dtype="bfloat16")]),
                         ("growth", [replace(bf16, name=f"S-forward-{S}", Sq=S, Sk=S)
                                     for S in (16, 32, 64)])):
        monkeypatch.setitem(SETS, name, shapes)
        run = [name, "--results", str(tmp_path), "--seconds", "0", "--peers", "ours,plain", "--threads",
               str(torch.get_num_threads())]
        assert command.main(run) == 0
        record, out = json.loads((tmp_path / f"{name}.json").read_text()), capsys.readouterr().out
        assert record["ceilings"] == ceilings and record["watched"] == {} and record["complete"]
        assert len(record["rows"]) == 2 * len(shapes) and record["machine"]["cards"] == ["A card"]
        for r in record["rows"]:
            part = r["gbytes"] / 5.0 if name == "decode" else r["gflops"] / 50.0
            assert r["of_ceiling"] == pytest.approx(part) and r["moved_bytes"] > 0
        what = {"growth": "| exponent of bytes |", "cuda": "of the product's", "decode": "of the reading's"}
        assert what[name] in out and "on A card, torch" in results.section(record)
    monkeypatch.setattr(card, "ceilings", lambda: torch.zeros(-1))
    assert command.main(run) == 0 and "no ceilings: RuntimeError" in capsys.readouterr().out
    assert "of_ceiling" not in json.loads((tmp_path / "growth.json").read_text())["rows"][0]


def test_memory_and_counters_are_recorded(tmp_path, monkeypatch, capsys, fake_ncu):
    fake = FakeCard(monkeypatch)
    fake.peak = 5000
    fake_ncu()
    monkeypatch.setitem(SETS, "memory-cuda", [replace(SQUARE, name="a"), replace(SQUARE, name="b")])
    monkeypatch.setattr(memory, "rows_on_card", partial(memory.rows_on_card, device="cpu"))
    run = ["--results", str(tmp_path), "--peers", "ours,plain"]
    assert command.main(["memory-cuda", *run]) == 0 and command.main(["io", *run]) == 0
    out = capsys.readouterr().out
    assert "| forward | 6 " in out and "of formula" in out
    assert "without plain, square: OutOfMemoryError" in out
    rows = {name: json.loads((tmp_path / f"{name}.json").read_text())["rows"]
            for name in ("memory-cuda", "io")}
    assert [(r["name"], r["peer"], r["extra_bytes"]) for r in rows["memory-cuda"]] == [
        (name, peer, 5000) for name in "ab" for peer in ("ours", "plain")]
    assert [r.get("dram_read") for r in rows["io"]] == [1, None, None, 3001, None, None]


def test_all_runs_every_part_inside_its_budget(tmp_path, monkeypatch, capsys):
    runs = []

    def run(line, **options):
        name = next(part for part in line if part in command.ALL)
        runs.append((name, line, options["timeout"]))
        if name == "io":
            raise command.subprocess.TimeoutExpired(line, options["timeout"])
        return types.SimpleNamespace(returncode=2 if name == "exact" else 0)

    monkeypatch.setattr(command.subprocess, "run", run)
    readme = tmp_path / "README.md"
    readme.write_text("<!-- bench:begin -->\n<!-- bench:end -->\n")
    given = ["all", "--results", str(tmp_path), "--commit", "c0ffee", "--readme", str(readme)]
    assert command.main([*given, "--budget", "200"]) == 1
    said = capsys.readouterr().err
    assert [name for name, *_ in runs] == list(command.ALL) and sum(command.ALL.values()) <= 470
    assert "io: stopped: it took too long" in said and "exact: exit status 2" in said and "cuda: done" in said
    for name, line, timeout in runs:
        parsed = {part.partition("=")[0]: part.partition("=")[2] for part in line if part.startswith("--")}
        assert parsed["--results"] == str(tmp_path) and parsed["--commit"] == "c0ffee"
        seconds = command.ALL[name] * 200 / sum(command.ALL.values())
        assert name == "cold" or seconds / 3 < float(parsed["--budget"]) < timeout
        assert timeout <= 240
    monkeypatch.setattr(command.subprocess, "run", lambda *_, **options: types.SimpleNamespace(returncode=0))
    assert command.main(given) == 0


def test_without_a_command_it_times_what_is_here(monkeypatch):
    commands = []
    main = command.main
    monkeypatch.setattr(command, "main", lambda arguments: commands.append(arguments) or 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["--results", "x"]) == 0 and commands == [["--results=x", "cpu"]]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert main([]) == 0 and commands[1:] == [["cuda"], ["decode"]]


def test_cold_starts_are_of_fresh_processes(monkeypatch):
    rows = list(cold.rows([]))
    names = [r["name"] for r in rows]
    assert "_C" in names and "import torch" in names and len(set(names)) == len(names)
    for op in ("forward", "backward", "decode"):
        assert {f"first {op}, cpu", f"second {op}, cpu"} <= set(names)
    assert all(r.get("seconds", 1) > 0 and r.get("bytes", 1) > 0 and "error" not in r for r in rows)
    assert "first decode, cpu" in tables.cold_table(rows)
    program = """print('figures {"name": "x", "seconds": 1}'); import os; os.environ["A"] + 1"""
    found = cold.fresh(program, A="b")
    assert found[0] == {"name": "x", "seconds": 1} and "TypeError" in found[1]["error"]
    monkeypatch.setattr(cold, "fresh", lambda program, *given, **settings: [{"name": program, **settings}])
    built = [r for r in cold.rows(["cpu", "9.0;8.0"]) if "build for" in r["name"] or "jit" in r["name"]]
    assert [(r.get("FLASHATTN_CUDA"), r.get("FLASHATTN_ARCHS")) for r in built] == [
        ("off", None), ("on", "9.0;8.0"), (None, None), (None, None)]


def interface(calls):
    """The functions that flash-attn, its successors and xFormers share, over plain attention."""
    def flash_attn_func(q, k, v, causal=False, softcap=0.0, window_size=(-1, -1), deterministic=False,
                        num_splits=1):
        calls.append((deterministic, num_splits))
        B, S, Hq, D = q.shape
        shape = Shape("", "forward", B, S, k.shape[1], Hq, k.shape[2], D, v.shape[3], causal, window_size,
                      softcap=softcap)
        plain = PEERS["plain"]
        out = plain.bind(shape, q.device)(*(t.transpose(1, 2) for t in (q, k, v))).transpose(1, 2)
        return out, None

    class LowerTriangularFromBottomRightMask:
        pass

    def memory_efficient_attention(q, k, v, attn_bias=None):
        return flash_attn_func(q, k, v, attn_bias is not None)[0]

    biases = types.SimpleNamespace(LowerTriangularFromBottomRightMask=LowerTriangularFromBottomRightMask)
    return types.SimpleNamespace(
        flash_attn_func=flash_attn_func, flash_attn_with_kvcache=flash_attn_func,
        memory_efficient_attention=memory_efficient_attention,
        fmha=types.SimpleNamespace(attn_bias=biases))


@pytest.mark.parametrize("name", ["fa2", "fa3", "fa4", "xformers"])
def test_packages_solve_the_same_problem(name, monkeypatch):
    peer, calls = PEERS[name], []
    assert peer.missing() == "no CUDA device" or torch.cuda.is_available()
    monkeypatch.setattr(type(peer), "load", lambda self: interface(calls))
    monkeypatch.setattr(PEERS["fa3"].__class__, "whole", True)
    bf16 = replace(SQUARE, dtype="bfloat16", causal=True)
    for shape in (bf16, replace(bf16, op="backward"), replace(bf16, softcap=0.5, Hk=2),
                  replace(bf16, window=(2, 0)), replace(bf16, op="decode", Sq=1, Sk=9)):
        rows, missing = time_shape(shape, [PEERS["ours"], peer], budget_s=0)
        assert not missing or missing[0]["reason"] == peer.refuses(shape) != ""
        assert len(rows) == 2 - bool(peer.refuses(shape))
    assert calls and not peer.refuses(bf16) and not peer.refuses(replace(bf16, op="forward+backward"))
    assert peer.refuses(replace(bf16, page_size=2, op="decode"))


@pytest.mark.parametrize("changes", [
    {"window": (2, 1)}, {"softcap": 0.5, "causal": True}, {"alibi": True, "Hk": 2},
    {"window": (3, 0), "alibi": True}])
def test_flex_solves_the_same_problem(changes, monkeypatch):
    flex = PEERS["flex"]
    monkeypatch.setattr(type(flex), "compiled", lambda self, function: function)
    shape = replace(SQUARE, Sq=128, Sk=128, D=16, Dv=16, **changes)
    rows, missing = time_shape(shape, [PEERS["plain"], flex], budget_s=0)
    assert [r["peer"] for r in rows] == ["plain", "flex"] and not missing
    assert flex.refuses(SQUARE) and flex.refuses(replace(shape, graph=True))


def figure_records(tmp_path):
    """Small records of every kind that a figure shows."""
    ceilings = {"gflops": 8.0, "read_gbytes": 4.0, "copy_gbytes": 4.0, "read_by": "sum"}
    timed = [timed_row(f"{op}-{name}", peer, seconds, op=op) | {"kernel": f"{op}_sm90_x", "moved_bytes": 1e9}
             for op in ("forward", "backward") for name in "xy"
             for peer, seconds in (("ours", 0.5), ("cudnn", 0.7))]
    decode = [timed_row("b1", "ours", 1.0, op="decode") | {"gbytes": 3.0, "moved_bytes": 1e9}]
    grown = [timed_row(f"S-forward-{S}", "ours", S**2, Sk=S) | {"moved_bytes": S} for S in (2, 4, 8, 16)]
    counted = [results.row(replace(SQUARE, name=f"d128-s{S}", D=128, Sk=S), {
        "peer": peer, "dram_read": S, "dram_write": S, "formula": 2 * S, "kernels": []})
        for S in (8, 16) for peer in ("ours", "plain")] + [results.row(SQUARE, {
            "peer": "sdpa_math", "formula": 1, "error": "E: no"})]
    taken = [results.row(replace(SQUARE, name=f"{op}-{S}", op=op, Sk=S), {
        "peer": "ours", "input_bytes": S, "score_bytes": S * S,
        **({"extra_bytes": S} if S < 32 else {"error": "out of memory"})})
        for op in ("forward", "forward+backward") for S in (8, 16, 32)]
    error = {"median": 1e-3, "p99": 2e-3, "p999": 4e-3, "max": 1e-2}
    errors = [results.row(replace(SQUARE, name=f"normal-{dtype}", dtype=dtype), {
        "peer": peer, "tensor": tensor, **error})
        for dtype in ("bfloat16", "float16") for tensor in ("out", "dq", "dk", "dv")
        for peer in ("ours", "plain")]
    for name, rows, more in (
            ("cuda", timed, {"ceilings": ceilings}), ("graphs", timed[:2], {}), ("decode", decode, {}),
            ("growth", grown, {}), ("io", counted, {}), ("memory-cuda", taken, {}), ("exact", errors, {})):
        record = results.record(name, f"python -m bench {name}", rows, "abc", missing=[], **more)
        results.save(record, tmp_path)
    return results.load(tmp_path)


def test_figures_are_drawn_of_the_records_that_are_there(tmp_path, monkeypatch):
    records = figure_records(tmp_path / "results")
    readme = tmp_path / "README.md"
    readme.write_text("<!-- bench:begin -->\n<!-- bench:end -->\n")
    assert command.main(["report", "--results", str(tmp_path / "results"), "--readme", str(readme)]) == 0
    folder = tmp_path / plots.FOLDER
    assert {path.stem for path in folder.iterdir()} == {figure.name for figure in plots.FIGURES}
    for figure in plots.FIGURES:
        text = (folder / f"{figure.name}.svg").read_text()
        assert figure.source(records) in text and f"({plots.FOLDER}/{figure.name}.svg)" in readme.read_text()
        assert plots.LOOK["ours"][2] in text or figure.name == "roofline"
    assert set(plots.LOOK) == set(PEERS)

    records["cuda"].pop("ceilings")
    for r in records["exact"]["rows"]:
        r["error"] = f"no {r.pop('max')}"
    del records["io"]
    left = {figure.name for figure in plots.FIGURES if figure.possible(records)}
    assert left == {figure.name for figure in plots.FIGURES} - {"roofline", "exact", "exact-gradients", "io"}
    some = [figure for figure in plots.FIGURES if figure.name in ("graphs", "io")]
    monkeypatch.setattr(plots, "FIGURES", some)
    first = (folder / "graphs.svg").read_text()
    assert plots.draw(records, folder) == [folder / "graphs.svg"] and not (folder / "io.svg").exists()
    assert first == (folder / "graphs.svg").read_text()


def test_the_figures_are_of_the_records():
    records = results.load(results.FOLDER)
    possible = [figure for figure in plots.FIGURES if figure.possible(records)]
    drawn = {path.stem for path in (results.ROOT / plots.FOLDER).iterdir()}
    assert drawn == {figure.name for figure in possible}
    for figure in possible:
        assert figure.source(records) in (results.ROOT / plots.FOLDER / f"{figure.name}.svg").read_text()


def test_a_record_in_csv_is_that_in_json():
    for path in results.FOLDER.glob("*.json"):
        record = json.loads(path.read_text())
        with open(path.with_suffix(".csv"), newline="") as file:
            rows = list(csv.DictReader(file))
        assert len(rows) == len(record["rows"])
        assert record["commit"] and not record["commit"].endswith("-dirty")
        for line, r in zip(rows, record["rows"]):
            assert {key: value for key, value in line.items() if value} == {
                key: str(value) for key, value in r.items() if str(value)}


def test_the_readme_shows_what_was_recorded():
    readme = (results.ROOT / "README.md").read_text()
    assert re.search(results.BLOCK, readme)
    assert results.insert(readme, results.report(results.ROOT / "bench" / "results")) == readme
