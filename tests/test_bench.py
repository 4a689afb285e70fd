"""The benchmark harness: what it counts, in which order it times, and that the README shows its records."""

import contextlib
import json
import re
import sys
import types
from dataclasses import asdict, replace

import pytest
import torch

from bench import __main__ as command
from bench import results, tables, timing
from bench.memory import peak_extra
from bench.peers import PEERS, Peer, present
from bench.shapes import SETS, Shape
from bench.timing import GRAPH_CALLS, eager, graphed, input_sets, interleave, spread, time_shape

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
    assert len(shapes) == 15 + 11 + 7 and {s.op for s in shapes.values()} == {"decode"}
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
    with pytest.raises(SystemExit, match="'fa9': expected one of ours"):
        present(["fa9"])


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
    assert len(takes) == 15 + 2 + 1 + 1 + 7 and "queries-16-b64-s8192-h32-8" in takes

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
    measured = {"peer", "seconds", "spread", "rounds", "gflops", "moved_bytes", "kernel", "ratio", "best_peer",
                "best_ratio"}
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


def test_the_readme_shows_what_was_recorded():
    readme = (results.ROOT / "README.md").read_text()
    assert re.search(results.BLOCK, readme)
    assert results.insert(readme, results.report(results.ROOT / "bench" / "results")) == readme
