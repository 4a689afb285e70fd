"""What only a GPU can show: every row of the table, streams, graphs, equal bits on every run, huge tensors.

Where results are compared to the bit, the backward is the deterministic one.
"""

import contextlib
import functools
import math

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import caches
import flashattn
from caches import cached
from cases import NAN, OPTIONS, bias, dense, eye, ints, offsets, packed
from compare import assert_identical, check_backward, check_decode, check_forward
from flashattn import _build, _load, reference

NO_CARD = ("no CUDA device" if not torch.cuda.is_available() else
           "" if _load.extension().build_info()["cuda"] else "this build has no CUDA kernels")
pytestmark = pytest.mark.skipif(bool(NO_CARD), reason=NO_CARD)
large = pytest.mark.xdist_group("large")  # these take much of the card's memory, so one runs at a time

TABLE = _build.instances()
ROWS = [row for module in reversed(TABLE.CUDA_MODULES) for row in TABLE.rows(module, "")]
HALF = (torch.bfloat16, torch.float16)
PLAIN_DIMS = [(64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256)]
RESULTS = ("out", "lse", "dq", "dk", "dv", "dbias")


@pytest.fixture
def device(device):
    return device if device.type == "cuda" else torch.device("cuda")


def train(q, k, v, dout, **options):
    """out, lse, dq, dk, dv[, dbias][, dsink] without autograd."""
    options = {"deterministic": True} | options
    out, lse = flashattn.forward(q, k, v, **options, return_lse=True)
    return out, lse, *flashattn.backward(dout, q, k, v, out, lse, **options)


def train_on_cpu(*tensors, **options):
    options = {name: o.cpu() if isinstance(o, torch.Tensor) else o for name, o in options.items()}
    with flashattn.force_family("cpu_baseline"):                         # a CUDA one may be forced
        return train(*(t.cpu() for t in tensors), **options)


def same(results, wanted):
    for ours, clean, name in zip(results, wanted, RESULTS, strict=False):
        assert_identical(ours, clean, name)


def warm_up(device, call):
    """Calls it once on another stream, as there must be before a capture."""
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream(device).wait_stream(stream)


def half(device, **shape):
    """q, k, v, dout in a dtype of the tensor cores."""
    sm75 = torch.cuda.get_device_capability(device) < (8, 0) or _load.extension().forced_family() == "sm75"
    q, k, v = dense(device, torch.float16 if sm75 else torch.bfloat16, **shape)
    return q, k, v, torch.randn((*q.shape[:3], v.shape[3]), dtype=q.dtype, device=device)


# ---- every row ----

def needs(row, device) -> str:
    """What this card or build lacks to run the row; empty: nothing."""
    capability, _, shared_bytes = _load.extension().cuda_device(device.index or 0)
    return dict(_load.extension().candidates(
        row.op, "cuda", row.dtypes[0], getattr(row, "head_dim", 64), getattr(row, "head_dim_v", 64), [],
        capability, shared_bytes)).get(row.name, "this build does not have it")


def dims_of(row) -> tuple[int, int]:
    """The largest that a row is for, else some."""
    return (row.head_dim, row.head_dim_v) if hasattr(row, "head_dim") else \
        (72, 40) if row.op == "decode" else (40, 72)


def decode_call(row, name, device) -> dict:
    """Arguments of flashattn.decode: several splits, pages and heads of a group, sequences without a key."""
    if name.startswith("latent "):
        return latent(decode_call(row, name.removeprefix("latent "), device))
    shape = {"heads": (8, 2), "dims": dims_of(row), "dtype": getattr(torch, row.dtypes[0])}
    shape["rows"] = rows = min(5, row.rows // 4) if hasattr(row, "rows") else 5  # of q, a group is four heads
    if name == "pages":
        arguments = cached(device, [150, 0, 33], new=rows, page_size=16, **shape)
        cos, sin = torch.randn(2, 160, 8, device=device)
        return arguments | {"causal": True, "rotary_cos": cos, "rotary_sin": sin}
    if name == "splits":
        arguments = cached(device, [300, 1, 70], page_size=64, leftpad=[20, 0, 70], **shape)
        return arguments | {"num_splits": 3, "window": (200, 0), "sink": torch.randn(8, device=device)}
    if name == "packed":                                                 # more rows than a tile has
        arguments = cached(device, [300, 0, 70], new=20, **shape | {"rows": 20})
        return caches.packed(arguments, [1, 21, 21, 23]) | {
            "causal": True, "batch_invariant": "few_rows" in row.serves}
    if name == "prefill":                                                # boxes of 8 rows
        return cached(device, [700, 0, 210], new=200, page_size=24, **shape | {"rows": 200}) | {
            "window": (330, 0)}
    arguments = cached(device, [150, 0, 33], **shape)
    return arguments | {
        "cache": {}, "softcap": {"softcap": 2.0}, "alibi": {"alibi_slopes": torch.rand(3, 8, device=device)},
        "latent": {"v_cache": None, "v_head_dim": dims_of(row)[1]}}[name]


def latent(arguments):
    """The call with values in the first columns of the keys."""
    return {n: t for n, t in arguments.items() if n not in ("v_cache", "v_new")} | {
        "v_cache": None, "v_head_dim": arguments["v_cache"].shape[-1]}


def calls(row) -> list[str]:
    """Names of OPTIONS, or of decode_call, that together ask for all that the row serves."""
    if row.op == "decode" and "own_values" not in row.serves:
        return ["latent", "latent pages", "latent splits", "latent packed"]
    if row.op == "decode":
        names = ["cache", "pages", *(name for name in ("softcap", "alibi") if name in row.serves)]
        names += ["splits"] if "few_rows" in row.serves else ["prefill"]
        names += ["packed"] if "many_queries" in row.serves else []
        return names + (["latent"] if dims_of(row)[1] <= dims_of(row)[0] else [])
    names = ["causal window"]
    if row.serves == TABLE.NEEDS:
        return [*names, "all"]
    return names + [name for name in ("softcap", "alibi") if name in row.serves]


@pytest.mark.parametrize(("row", "name"), [
    pytest.param(row, name, id=f"{row.name}-{name}") for row in ROWS for name in calls(row)])
def test_row(device, row, name):
    """Each row of the table, forced, with what it serves."""
    if lacks := needs(row, device):
        pytest.skip(lacks)
    if row.op == "decode":
        with flashattn.force_family(row.name):
            check_decode(**decode_call(row, name, device))
        return
    q, k, v = dense(device, getattr(torch, row.dtypes[0]), len_q=70, len_k=150, dims=dims_of(row))
    options = OPTIONS[name](q, 150)
    if row.op == "backward":
        with flashattn.force_family("sm80"):  # initcheck does not see what the copy engine stores for sm90
            check_backward(q, k, v, **options, served_by=row.name)
    else:
        with flashattn.force_family(row.name):
            check_forward(q, k, v, **options)


@pytest.mark.parametrize("name", [name for name in OPTIONS if "dropout" not in name and name != "all"])
def test_tensor_cores_agree_with_plain_kernels_and_the_cpu(device, name):
    q, k, v, dout = half(device, len_q=70, len_k=150)
    options = OPTIONS[name](q, 150)
    results = train(q, k, v, dout, **options)
    wide = {n: o.float() if isinstance(o, torch.Tensor) and o.is_floating_point() else o
            for n, o in options.items()}
    plain = train(*(t.float() for t in (q, k, v, dout)), **wide)
    on_cpu = train_on_cpu(*(t.float() for t in (q, k, v, dout)), **wide)
    for ours, simt, cpu, name in zip(results, plain, on_cpu, RESULTS, strict=False):
        assert ours.isinf().equal(simt.isinf()) and simt.isinf().cpu().equal(cpu.isinf())
        unit = 2e-5 if name == "lse" else 8 * torch.finfo(q.dtype).eps
        ours, simt, cpu = (t.float().cpu().nan_to_num(0, 0, 0) for t in (ours, simt, cpu))
        assert (simt - cpu).abs().max() < 2e-5 * (1 + cpu.abs().max()), name
        assert (ours - cpu).abs().max() < unit * (1 + cpu.abs().max()), name


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dim", [64, 96, 128, 256])
def test_gradients_are_as_exact_as_those_of_cudnn(device, dim, causal):
    """Relative RMS errors, at most 1.02 times as large."""
    q, k, v, dout = half(device, len_q=1000, len_k=1000, heads=(4, 4), dims=(dim, dim))
    ours = train(q, k, v, dout, causal=causal)[2:]
    leaves = [t.transpose(1, 2).detach().requires_grad_() for t in (q, k, v)]
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        out = torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=causal)
    theirs = torch.autograd.grad(out, leaves, dout.transpose(1, 2))
    exact = [t.detach().double().requires_grad_() for t in leaves]
    with sdpa_kernel(SDPBackend.MATH):
        out = torch.nn.functional.scaled_dot_product_attention(*exact, is_causal=causal)
    wanted = torch.autograd.grad(out, exact, dout.transpose(1, 2).double())
    for a, b, w, name in zip(ours, theirs, wanted, ("dq", "dk", "dv")):
        mine, cudnn = ((x.double() - w).square().mean().sqrt() for x in (a.transpose(1, 2), b))
        assert mine < 1.02 * cudnn, (name, (mine / cudnn).item())


@pytest.mark.parametrize("dtype", [*HALF, torch.float32, torch.float64], ids=str)
def test_the_dropout_mask_is_that_of_the_cpu(device, dtype):
    """V = identity shows which weights are left, dout = identity which ones the backward uses."""
    q, k, _ = (t / 4 for t in dense(device, dtype, len_q=64, len_k=64, heads=(4, 4)))
    v = eye(device, 2, 64, 4, dtype)
    options = {"dropout_p": 0.3, "seed": 0x1234_5678_9ABC_DEF0}
    out, _, _, _, dv = train(q, k, v, v, **options)
    wanted, _, _, _, wanted_dv = train_on_cpu(q, k, v, v, **options)
    assert (out != 0).cpu().equal(wanted != 0) and (dv != 0).cpu().equal(wanted_dv != 0)
    assert 0.6 < (out != 0).double().mean() < 0.8


# ---- head dims, heads, layouts on tensor cores ----

@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("dims", [*((d, d) for d in (
    1, 8, 16, 24, 32, 40, 48, 56, 63, 64, 72, 80, 88, 96, 104, 112, 120, 128, 136, 160, 192, 224, 256, 512)),
    (192, 128), (64, 512), (576, 512), (128, 64), (8, 256)], ids=str)
def test_head_dims(device, dtype, dims):
    q, k, v = dense(device, dtype, len_q=70, len_k=90, dims=dims)
    check_backward(q, k, v, causal=True)


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("dim", range(8, 257, 8))
def test_every_head_dim_and_length(device, dtype, dim):
    """What the dispatcher chooses, Dv = D and other; all of these together have each length to 300 twice."""
    for dim_v in (dim, 264 - dim):
        number = dim // 4 - 2 + HALF.index(dtype) + 64 * (dim_v != dim)  # of 128
        lens_q = [(5 * number + i) % 300 + 1 for i in range(5)]
        lens_k = [(7 * n + 150) % 300 + 1 for n in lens_q]
        options = {"return_max_logit": False} | ({}, {"causal": True}, {"window": (17, 9)})[number % 3]
        q, k, v, layout = packed(device, lens_q, lens_k, dtype, dims=(dim, dim_v))
        check_forward(q, k, v, **layout, **options)
        q, k, v = dense(device, dtype, len_q=lens_q[0], len_k=lens_k[0], dims=(dim, dim_v))
        check_forward(q, k, v, **options)


@pytest.mark.parametrize("options", [{}, {"softcap": 2.0}], ids=str)
@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 71])
def test_query_heads_share_kv_heads(device, group, options):
    q, k, v, _ = half(device, batch=1, len_q=33, len_k=140, heads=(2 * group, 2))
    check_backward(q, k, v, causal=True, **options)


def odd_base(t):
    return torch.cat([t.new_full((1,), NAN), t.flatten()])[1:].view(t.shape)


def odd_rows(t):
    wide = t.new_full((*t.shape[:-1], t.shape[-1] + 3), NAN)
    return wide[..., :t.shape[-1]].copy_(t)


@pytest.mark.parametrize("layout", [odd_base, odd_rows, lambda t: t[:, :, :1].expand(t.shape)],
                         ids=["odd base", "odd strides", "stride 0"])
@pytest.mark.parametrize("which", ["q", "k", "v", "out", "dout"])
def test_layouts_of_one_tensor(device, one_family, which, layout):
    q, k, v, dout = half(device, len_q=70, len_k=150)
    tensors = {"q": q, "k": k, "v": v, "out": torch.zeros_like(q), "dout": dout}
    viewed = layout(tensors[which])
    if which == "out" and 0 in viewed.stride():
        pytest.skip("a result needs a place for each element")

    def run(q, k, v, out, dout):
        options = {"causal": True, "softcap": 1e4}                       # not plain, whatever the layout
        _, lse = flashattn.forward(q, k, v, **options, out=out, return_lse=True)
        grads = flashattn.backward(dout, q, k, v, out, lse, **options, deterministic=True)
        return out.clone(), lse, *grads

    same(run(**tensors | {which: viewed}),
         run(**tensors | {which: viewed.clone(memory_format=torch.contiguous_format)}))


# ---- memory ----

def banded(t):
    """NaN with a copy of t inside, and the copy."""
    band = t.new_full([n + 2 for n in t.shape[:3]] + [t.shape[3] + 16], NAN)
    return band, band[1:-1, 1:-1, 1:-1, 8:-8].copy_(t)


@pytest.mark.parametrize("dims", PLAIN_DIMS, ids=str)
def test_nothing_around_the_tensors_is_read_or_written(device, dims):
    """All tensors lie, aligned, inside larger ones of NaN; only out changes."""
    q, k, v, dout = half(device, len_q=67, len_k=131, dims=dims)
    wanted = train(q, k, v, dout, causal=True)
    bands, inside = zip(*(banded(t) for t in (q, k, v, dout, torch.zeros_like(dout))))
    before = [band.clone() for band in bands]
    flashattn.forward(*inside[:3], causal=True, out=inside[4])
    same(train(*inside[:4], causal=True), wanted)
    assert_identical(inside[4], wanted[0], "out=")
    inside[4].zero_()
    for band, clean in zip(bands, before):
        assert_identical(band, clean, "band")


def recycle(device, value):
    """Leaves memory of this value, in large and small blocks, for what torch's allocator hands out next."""
    torch.cuda.empty_cache()
    blocks = [torch.full((n,), value, device=device) for n in [1 << 26] * 2 + [1 << 16] * 64]
    del blocks


@contextlib.contextmanager
def new_memory_of_nan():
    """Tensors that are allocated inside hold NaN until they are written."""
    torch.use_deterministic_algorithms(True, warn_only=True)  # torch.utils.deterministic
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("dims", [*PLAIN_DIMS, (40, 72), (72, 72), (300, 300)], ids=str)
@pytest.mark.parametrize("name", ["causal", "all"])
def test_recycled_memory_and_gaps_change_no_bit(device, dims, name):
    """Rows of no sequence, rows that do not count and new memory hold 0, then NaN."""
    lens_q, lens_k = (5, 130, 0, 70), (150, 64, 40, 0)
    q, k, v, dout = half(device, batch=1, len_q=250, len_k=300, dims=dims)
    layout = {"cu_seqlens_q": offsets(device, lens_q, 7), "cu_seqlens_k": offsets(device, lens_k, 9),
              "max_seqlen_q": 130, "max_seqlen_k": 150, "seqused_q": ints(device, 4, 129, 0, 70),
              "seqused_k": ints(device, 131, 64, 3, 0)}
    options = {"causal": {"causal": True}, "all": {
        "softcap": 3.0, "alibi_slopes": torch.rand(4, device=device), "dropout_p": 0.2, "seed": 3,
        "bias": torch.randn(1, 4, 130, 150, dtype=q.dtype, device=device),
        "mask": torch.rand(4, 1, 130, 150, device=device) < 0.8}}[name]

    def filled(t, side, value):
        """t with this value in the rows that nobody reads."""
        result = torch.full_like(t, value)
        for start, n in zip(layout[f"cu_seqlens_{side}"].tolist(), layout[f"seqused_{side}"].tolist()):
            result[start:start + n] = t[start:start + n]
        return result

    def run(value):
        tensors = [filled(t[0], side, value) for t, side in zip((q, k, v, dout), "qkkq")]
        recycle(device, value)
        return train(*tensors, **layout, **options)

    results = run(0.0)
    assert not any(t.isnan().any() for t in results)
    same(run(NAN), results)


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("dims", [*PLAIN_DIMS, (72, 72)], ids=str)
@pytest.mark.parametrize("packs", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("len_q", [100, 200])
def test_what_no_query_sees_changes_no_bit(device, dtype, dims, packs, len_q):
    """The forward, where rows that do not count, of no sequence and before every window hold 0, then NaN."""
    len_k, used_q, used_k = 333, (0, 91, 1, 0, 70), (0, 300, 333, 50, 0)
    tensors = dense(device, dtype, batch=5, len_q=len_q, len_k=len_k, dims=dims)
    layout = {"seqused_q": ints(device, *used_q), "seqused_k": ints(device, *used_k)}
    if packs:                                                            # the first is of no sequence then
        layout = {"seqused_q": layout["seqused_q"][1:], "seqused_k": layout["seqused_k"][1:],
                  "cu_seqlens_q": offsets(device, [len_q] * 4, len_q), "max_seqlen_q": len_q,
                  "cu_seqlens_k": offsets(device, [len_k] * 4, len_k), "max_seqlen_k": len_k}
    window, slopes = (20, 9), torch.rand(4, device=device)

    def run(value, **options):
        q, k, v = (t.clone() for t in tensors)
        for b, (rows, keys) in enumerate(zip(used_q, used_k)):
            first = max(0, keys - rows - window[0]) if "window" in options else 0
            q[b, rows:] = value
            for t in (k, v):
                t[b, keys:] = value
                t[b, :first] = value
        if packs:
            q, k, v = (t.flatten(0, 1) for t in (q, k, v))
        call = functools.partial(flashattn.forward, q, k, v, **layout, **options, return_lse=True)
        return *call(), *call(return_max_logit=True)                     # which may be another way

    for options in ({}, {"causal": True}, {"window": window}, {"window": window, "softcap": 30.0},
                    {"window": window, "alibi_slopes": slopes}):
        results = run(0.0, **options)
        assert not any(t.isnan().any() for t in results)
        for ours, clean in zip(run(NAN, **options), results, strict=True):
            assert_identical(ours, clean, str(options))


# ---- streams, devices, graphs ----

@pytest.mark.parametrize("options", [{"causal": True}, {"softcap": 2.0}], ids=str)
def test_work_goes_to_the_current_stream(device, options):
    """The inputs become right late, in a side stream."""
    right = half(device, len_q=300, len_k=300)
    wanted = train(*right, **options)
    late = [torch.full_like(t, NAN) for t in right]
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)  # cycles, 0.1 s
        for t, value in zip(late, right):
            t.copy_(value)
        leaves = [t.detach().requires_grad_() for t in late[:3]]
        out, lse = flashattn.forward(*leaves, **options, deterministic=True, return_lse=True)
        grads = torch.autograd.grad(out, leaves, late[3])
    torch.cuda.current_stream(device).wait_stream(stream)
    same([out, lse, *grads], wanted)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one CUDA device")
def test_another_device_than_the_current_one():
    tensors = half(torch.device("cuda:0"), len_q=70, len_k=90)
    wanted = train(*tensors, causal=True)
    there = [t.to("cuda:1") for t in tensors]
    torch.cuda.synchronize(1)
    before = torch.cuda.memory_allocated(0)
    leaves = [t.requires_grad_() for t in there[:3]]
    out, lse = flashattn.forward(*leaves, causal=True, deterministic=True, return_lse=True)
    results = [out, lse, *torch.autograd.grad(out, leaves, there[3])]
    assert torch.cuda.memory_allocated(0) == before and all(t.device.index == 1 for t in results)
    same([t.to("cuda:0") for t in results], wanted)
    with pytest.raises(ValueError, match="cuda:1"):
        flashattn.forward(tensors[0], there[1].detach(), there[2].detach())


@pytest.mark.parametrize("kind", ["plain", "general"])
def test_graph_with_other_contents(device, kind):
    """Lengths, mask and seed change between replays.  Capture in this mode refuses every synchronisation and
    every allocation that is not torch's."""
    lens = [((30, 70, 28), (90, 20, 40)), ((0, 64, 64), (64, 0, 86)), ((1, 1, 126), (150, 0, 0))]
    q, k, v, dout = (t[0] for t in half(device, batch=1, len_q=128, len_k=150))
    layout = {"cu_seqlens_q": offsets(device, lens[0][0]), "cu_seqlens_k": offsets(device, lens[0][1])}
    options = {"max_seqlen_q": 128, "max_seqlen_k": 150, "causal": True}
    contents = {}
    if kind == "general":
        contents = {"mask": torch.rand(3, 1, 128, 150, device=device) < 0.8,
                    "seed": torch.tensor([5], device=device)}
        options["dropout_p"] = 0.2
    call = functools.partial(train, q, k, v, dout, **layout, **options, **contents)
    warm_up(device, call)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="global"):
        results = call()
    for number, (lens_q, lens_k) in enumerate(lens):
        layout["cu_seqlens_q"].copy_(offsets(device, lens_q))
        layout["cu_seqlens_k"].copy_(offsets(device, lens_k))
        if contents:
            contents["mask"].copy_(torch.rand_like(contents["mask"], dtype=torch.float32) < 0.7)
            contents["seed"].fill_(number)
        q.normal_()
        graph.replay()
        same(results, call())


def count_differences(call, wanted, times):
    """Of numbers, to the bit, in that many results out, lse of call(out=...); the host waits for nothing.

    Memory of the results holds NaN before.
    """
    out = torch.empty_like(wanted[0])
    count = torch.zeros((), dtype=torch.int64, device=out.device)
    for _ in range(times):
        out.fill_(NAN)
        results = call(out=out, return_lse=True)
        for ours, clean, bits in zip(results, wanted, (torch.int16, torch.int32), strict=True):
            count += (ours.view(bits) != clean.view(bits)).sum()
        results[1].fill_(NAN)                                            # the next one gets this memory
    return count


def check_graph_beside_eager_ones(device, call, replays):
    """A graph of 40 launches and as many eager ones in another stream at the same time give the same bits."""
    wanted = call(return_lse=True)
    assert count_differences(call, wanted, 3) == 0
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream(device)
    with torch.cuda.graph(graph):
        of_replay = count_differences(call, wanted, 40)
    in_graph = torch.zeros_like(of_replay)
    stream.wait_stream(torch.cuda.current_stream(device))
    eager = []
    for _ in range(replays):
        graph.replay()
        in_graph += of_replay
        with torch.cuda.stream(stream):
            eager.append(count_differences(call, wanted, 40))
    torch.cuda.synchronize(device)
    assert in_graph == 0 and sum(eager) == 0


def test_graph_of_many_forwards_beside_eager_ones(device):
    """More tiles than processors: each launch hands them out by a counter, which must be its own."""
    q, k, v, _ = half(device, batch=4, len_q=2048, len_k=2048, heads=(16, 16), dims=(128, 128))
    check_graph_beside_eager_ones(device, functools.partial(flashattn.forward, q, k, v, causal=True), 20)


def test_graph_draws_a_new_seed_in_every_replay(device):
    q, k, v, _ = half(device)
    flashattn.forward(q, k, v, dropout_p=0.5)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = flashattn.forward(q, k, v, dropout_p=0.5)
    replays = []
    for _ in range(3):
        graph.replay()
        replays.append(out.clone())
    assert not replays[0].equal(replays[1]) and not replays[1].equal(replays[2])


def test_no_call_waits_for_the_device(device):
    q, k, v, dout = half(device, len_q=128, len_k=128)
    packing = {"cu_seqlens_q": offsets(device, (100, 156)), "cu_seqlens_k": offsets(device, (56, 200)),
               "max_seqlen_q": 156, "max_seqlen_k": 200, "seqused_k": ints(device, 50, 199)}
    calls = [({}, (q, k, v, dout)), (packing, [t.flatten(0, 1) for t in (q, k, v, dout)])]
    calls += [(OPTIONS[name](q, 128), (q, k, v, dout)) for name in OPTIONS]
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for options, tensors in calls:
            train(*tensors, **options)
            leaves = [t.detach().requires_grad_() for t in tensors[:3]]
            out = flashattn.forward(*leaves, **options, return_max_logit=True)[0]
            torch.autograd.grad(out, leaves, tensors[3])
    finally:
        torch.cuda.set_sync_debug_mode(before)


# ---- the same bits on every run ----

@large
@pytest.mark.parametrize("dims", [(96, 96), (128, 128), (88, 40)], ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_large_tiles(device, dims, causal):
    """What the dispatcher chooses for many queries and keys, and what it chooses when the batch must not
    count: small tiles."""
    q, k, v, _ = half(device, batch=2, len_q=1100, len_k=2700, heads=(60, 60), dims=dims)
    out, lse, _ = check_forward(q, k, v, causal=causal)
    small_out, small_lse = flashattn.forward(q, k, v, causal=causal, batch_invariant=True, return_lse=True)
    assert (out - small_out).abs().max() < 2 * torch.finfo(q.dtype).eps * small_out.abs().max()
    assert (lse - small_lse).abs().max() < 1e-5


@pytest.mark.parametrize("row", [row for row in ROWS if row.op == "forward" and row.module == "sm90"],
                         ids=lambda row: row.name)
@pytest.mark.parametrize("block", [0, 8])
def test_weights_of_sixteen_keys_have_no_error(device, row, block):
    """On Hopper those of the first keys of every eighth block keep what rounding takes from them: out is the
    exact one, rounded.  (With rounded weights a third of the elements differ.)"""
    if lacks := needs(row, device):
        pytest.skip(lacks)
    before = block * row.keys
    q, k, v = dense(device, getattr(torch, row.dtypes[0]), len_q=100, len_k=before + 16, dims=dims_of(row))
    q[..., 0], k[:, :before, :, 0], k[:, before:, :, 0] = 64, -64, 0  # keys before have no weight
    with flashattn.force_family(row.name):
        out = flashattn.forward(q, k, v)
    exact = reference.forward(q.double(), k.double(), v.double())[0].to(out.dtype)
    assert (out != exact).float().mean() < 0.01


@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (40, 72), (192, 128), (256, 256)], ids=str)
def test_the_forward_repeats_its_bits(device, dims):
    q, k, v, _ = half(device, len_q=700, len_k=900, dims=dims)
    call = functools.partial(flashattn.forward, q, k, v, causal=True, return_lse=True, return_max_logit=True)
    first = call()
    for _ in range(100):
        for ours, clean in zip(call(), first):
            assert ours.equal(clean)


@pytest.mark.parametrize("kind", ["causal", "few queries", "packed", "large tiles"])
def test_the_forward_repeats_its_bits_a_thousand_times(device, kind):
    """Heads that share keys, lengths of which no tile is a divisor."""
    if kind == "large tiles":                                            # of the families that have them
        q, k, v, _ = half(device, batch=1, len_q=1100, len_k=2700, heads=(120, 30), dims=(96, 96))
        options = {"causal": True}
    elif kind == "causal":
        q, k, v, _ = half(device, batch=3, len_q=1500, len_k=1500, heads=(8, 2), dims=(128, 128))
        options = {"causal": True, "seqused_q": ints(device, 1500, 1311, 77),
                   "seqused_k": ints(device, 1500, 1403, 900)}
    elif kind == "few queries":
        q, k, v, _ = half(device, batch=8, len_q=100, len_k=1999, heads=(16, 8), dims=(64, 64))
        options = {}
    else:
        lens_q, lens_k = (700, 1, 0, 333, 129), (900, 1000, 65, 333, 40)
        dtype = half(device)[0].dtype
        q, k, v, options = packed(device, lens_q, lens_k, dtype, heads=(8, 2), dims=(256, 256))
        options["causal"] = True
    call = functools.partial(flashattn.forward, q, k, v, **options)
    assert count_differences(call, call(return_lse=True), 1000) == 0


@pytest.mark.parametrize("kind", ["causal", "128 columns", "256 columns", "packed", "bias of all", "float32"])
def test_the_deterministic_backward_repeats_its_bits(device, kind):
    """While another stream keeps the processors busy, so that blocks run in another order each time."""
    dim = int(kind.split()[0]) if "columns" in kind else 64
    q, k, v, dout = half(device, len_q=2048, len_k=2048, heads=(8, 2), dims=(dim, dim))
    options = {"causal": True}
    if kind == "packed":
        q, k, v, dout = (t.flatten(0, 1) for t in (q, k, v, dout))
        lengths = (1000, 1, 0, 2000, 1095)
        options |= {"cu_seqlens_q": offsets(device, lengths), "cu_seqlens_k": offsets(device, lengths[::-1]),
                    "max_seqlen_q": 2000, "max_seqlen_k": 2000}
    elif kind == "bias of all":
        options["bias"] = bias(q, 2048, batch=1, heads=1)
    elif kind == "float32":
        q, k, v, dout = (t[:, :500].float() for t in (q, k, v, dout))
    first = train(q, k, v, dout, **options)
    stream, matrix = torch.cuda.Stream(device), torch.randn(2048, 2048, device=device)
    for _ in range(50):
        with torch.cuda.stream(stream):
            matrix @ matrix
        for ours, clean, name in zip(train(q, k, v, dout, **options), first, RESULTS):
            assert ours.equal(clean), name


# ---- sizes where an index or a grid ends ----

@large
def test_more_than_two_to_the_31_elements(device):
    """First and last batch of q, k, v, dout equal, to the bit, calls of one batch."""
    q, k, v, dout = half(device, batch=2**31 // (64 * 8 * 64) + 1, len_q=64, len_k=64, heads=(8, 8))
    assert min(t.numel() for t in (q, k, v, dout)) > 2**31
    results = train(q, k, v, dout, causal=True)
    for b in (0, len(q) - 1):
        one = train(*(t[b:b + 1] for t in (q, k, v, dout)), causal=True)
        same([t[b:b + 1] for t in results], one)


@large
@pytest.mark.parametrize("batch, heads, length", [
    (65535, (2, 1), 3), (65536, (2, 1), 3), (70000, (8, 8), 4), (1, (65536, 65536), 10), (2, (65536, 1), 2),
    (300, (300, 100), 2)])
@pytest.mark.parametrize("options", [{"causal": True}, {"softcap": 2.0}], ids=str)
def test_many_sequences_and_heads(device, batch, heads, length, options):
    tensors = half(device, batch=batch, len_q=length, len_k=length, heads=heads)
    results = train(*tensors, **options)
    assert results[1].isfinite().all()
    for b in (0, batch // 2, batch - 1):
        same([t[b:b + 1] for t in results], train(*(t[b:b + 1] for t in tensors), **options))
    ratio = heads[0] // heads[1]
    for head in (0, heads[1] // 2, heads[1] - 1):
        of_q, of_k = slice(head * ratio, (head + 1) * ratio), slice(head, head + 1)
        picks = (of_q, of_k, of_k, of_q)
        one = train(*(t[:, :, pick].contiguous() for t, pick in zip(tensors, picks)), **options)
        same([results[0][:, :, of_q], results[1][:, of_q],
              *(t[:, :, pick] for t, pick in zip(results[2:], picks))], one)


@large
def test_many_packed_sequences(device):
    lengths = [1 + b % 3 for b in range(70_000)]
    q, k, v, layout = packed(device, lengths, lengths[::-1], half(device)[0].dtype, heads=(2, 1))
    dout = torch.randn_like(q)
    results = train(q, k, v, dout, **layout, causal=True)
    for b in (0, 35_000, 69_999):
        rows, keys = (slice(*layout[name][b:b + 2].tolist()) for name in ("cu_seqlens_q", "cu_seqlens_k"))
        out, lse, *grads = train(*(t[None] for t in (q[rows], k[keys], v[keys], dout[rows])), causal=True)
        same([results[0][rows], results[1][:, rows]], [out[0], lse[0]])
        for ours, one, at in zip(results[2:], grads, (rows, keys, keys)):
            assert_identical(ours[at], one[0], "gradient")


@large
@pytest.mark.parametrize("len_q", [64 * 65535 + 1, 128 * 65535 + 1])
@pytest.mark.parametrize("dims", [(64, 64), (8, 3)], ids=str)
def test_many_rows(device, len_q, dims):
    """Rows are independent of each other; only three of them give gradients to k and v."""
    q, k, v, dout = half(device, batch=1, len_q=len_q, len_k=16, heads=(1, 1), dims=dims)
    some = [0, len_q // 2, len_q - 1]
    kept = dout[:, some]
    dout.zero_()[:, some] = kept
    out, lse, dq, dk, dv = train(q, k, v, dout)
    one = train(q[:, some], k, v, kept)
    same([out[:, some], lse[..., some], dq[:, some]], one)
    assert lse.isfinite().all() and (dq != 0).any(-1).sum() == 3
    oracle = reference.backward(kept, q[:, some], k, v)
    for ours, wanted in zip((dk, dv), oracle[1:]):
        assert (ours - wanted).abs().max() < 4 * torch.finfo(q.dtype).eps * wanted.abs().max()


@large
def test_many_keys(device):
    """q = 0 and 2^22 + 2^10 keys of value 0 or 1: the share of ones, and the logarithm of the number."""
    len_k = 2**22 + 2**10
    q, k, _, dout = half(device, batch=1, len_q=1, len_k=len_k, heads=(1, 1))
    v = (torch.arange(len_k, device=device) % 4 == 0).to(q.dtype).view(1, len_k, 1, 1).repeat(1, 1, 1, 64)
    out, lse, dq, _, dv = train(torch.zeros_like(q), k, v, torch.ones_like(dout))
    assert (out - 0.25).abs().max() < 1e-3 and abs(lse.item() - math.log(len_k)) < 1e-4
    assert dq.isfinite().all()
    if dv.dtype == torch.bfloat16:  # 2^-22 is hardly a float16
        assert (dv * len_k - 1).abs().max() < 0.02


# ---- decode: what test_decode.py does not ask of the tensor cores, and what only a GPU can show ----

RATIOS = (1, 2, 3, 4, 5, 7, 8, 16, 32, 64, 128)
EDGES = (0, 1, 2, 15, 16, 17, 31, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257, 511, 513, 1025)
LATENT = (576, 512)  # head dims of a cache whose values lie in its keys


def half_dtype(device) -> torch.dtype:
    return half(device, batch=1, len_q=1, len_k=1)[0].dtype


def half_cache(device, lengths, **shape):
    """cached() in a dtype of the tensor cores, of a group of four and 128 columns."""
    usual = {"heads": (8, 2), "dims": (128, 128), "dtype": half_dtype(device)}
    return cached(device, lengths, **usual | shape)


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("ratio", RATIOS)
def test_decode_of_every_group(device, dtype, rows, ratio):
    arguments = cached(device, [300, 0, 65], rows=rows, heads=(2 * ratio, 2), dims=(128, 128), dtype=dtype)
    check_decode(**arguments, causal=True)
    arguments["v_cache"][:] = torch.tensor([1.0, 2.0], device=device)[:, None]
    out, _ = caches.run(arguments)
    heads = torch.tensor([1.0, 2.0], device=device).repeat_interleave(ratio)[:, None].expand_as(out[0])
    torch.testing.assert_close(out[0].float(), heads, rtol=0.01, atol=0)
    torch.testing.assert_close(out[2].float(), heads, rtol=0.01, atol=0)


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("ratio", [1, 4, 16])
@pytest.mark.parametrize("rows", range(1, 18))
def test_decode_of_every_number_of_queries(device, dtype, ratio, rows):
    """As verified tokens are: with the last keys hidden from the first ones, and not."""
    arguments = cached(device, [300, 5, 129], rows=rows, heads=(2 * ratio, 2), dims=(128, 128), dtype=dtype,
                       page_size=16)
    for options in ({}, {"causal": True}, {"causal": True, "window": (40, 0)}):
        check_decode(**arguments, **options)


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("dims", [*((d, d) for d in range(64, 257, 8)), (192, 128), (128, 64), (64, 128),
                                  (40, 72), (63, 63), (300, 300), LATENT], ids=str)
def test_decode_of_every_head_dim(device, dtype, dims):
    for page_size in (None, 16):
        arguments = cached(device, [150, 1, 64], rows=2, new=1, dims=dims, dtype=dtype, page_size=page_size)
        check_decode(**arguments, causal=True)
    if dims == LATENT:
        for heads in ((16, 1), (128, 1)):
            arguments = cached(device, [150, 1, 64], rows=2, new=1, heads=heads, dims=dims, dtype=dtype)
            check_decode(**latent(arguments), causal=True)


@pytest.mark.parametrize("heads", [(1, 1), (16, 1), (64, 1), (128, 1), (16, 2)], ids=str)
@pytest.mark.parametrize("page_size", [None, 1, 16, 32, 64, 256])
@pytest.mark.parametrize("rows", range(1, 5))
def test_latent_decode_of_every_layout(device, rows, page_size, heads):
    """Around the edges of tiles, and of columns that are no multiple of 64; what must not be read is NaN."""
    lengths = [0, 1, 63, 64, 65, 127, 128, 129, 1025]
    dtype = half_dtype(device)
    for dims in (LATENT, (320, 256), (512, 448)):
        arguments = latent(cached(device, lengths, rows=rows, heads=heads, dims=dims, dtype=dtype,
                                  page_size=page_size, leftpad=[0, 0, 5, 63, 64, 64, 128, 0, 700]))
        for options in ({}, {"causal": True, "sink": torch.randn(heads[0], device=device)},
                        {"window": (70, 0)}, {"num_splits": 3, "causal": True}, {"batch_invariant": True}):
            check_decode(**arguments, **options)
    few = latent(cached(device, lengths, rows=rows, new=rows, heads=heads, dims=LATENT, dtype=dtype,
                        page_size=page_size))
    check_decode(**caches.packed(few, [1, *range(1, 1 + rows * 4, rows), *[1 + rows * 4] * 5]), causal=True)
    if page_size is None:
        order = ints(device, *reversed(range(len(lengths))))
        check_decode(**few, cache_batch_idx=order, causal=True)


@pytest.mark.parametrize("heads", [16, 128])
def test_latent_decode_of_logits_far_apart(device, heads):
    """References grow from tile to tile, in both warpgroups, and some rows much later than others."""
    arguments = latent(cached(device, [2000, 70], rows=2, heads=(heads, 1), dims=LATENT,
                              dtype=half_dtype(device)))
    arguments["k_cache"] *= torch.linspace(0.2, 8, 2002, device=device)[:, None, None]
    arguments["q"] *= torch.linspace(0.1, 4, heads, device=device)[:, None]
    check_decode(**arguments, causal=True)
    arguments |= {"k_cache": arguments["k_cache"].flip(1), "leftpad": ints(device, 2, 1932),
                  "cache_seqlens": ints(device, 2002, 2002)}
    check_decode(**arguments, causal=True)


@pytest.mark.parametrize("options", [
    {}, {"causal": True}, {"window": (15, 0)}, {"window": (16, 0)}, {"window": (17, 3)}, {"window": (63, 0)},
    {"window": (64, None)}, {"causal": True, "window": (200, 0), "num_splits": 4}], ids=str)
@pytest.mark.parametrize("page_size", [None, 1, 16, 64, 256])
def test_decode_at_the_edges_of_pages_and_windows(device, page_size, options):
    for rows, new in ((1, 0), (1, 1), (5, 5)):
        check_decode(**half_cache(device, EDGES, rows=rows, new=new, page_size=page_size), **options)


# Batch, keys, heads, queries: on an H200 clusters of 8, 8 and 2 blocks, blocks that count which is the last,
# one block for a tile, more such blocks than fit at once, and shares.
DIVISIONS = [(1, 1024, (32, 8), 1), (2, 900, (64, 8), 1), (8, 4096, (32, 8), 1), (1, 8192, (32, 8), 1),
             (3, 5000, (16, 2), 2), (1, 4000, (8, 1), 1), (16, 2048, (32, 8), 1), (32, 1100, (32, 8), 1),
             (37, 1100, (32, 8), 1), (1, 9000, (5, 5), 16)]


@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128), (256, 256)], ids=str)
@pytest.mark.parametrize("division", DIVISIONS, ids=str)
def test_decode_of_every_division(device, division, dims):
    """Without lengths, and with some: in a batch of several these are not alike."""
    batch, len_k, heads, rows = division
    q, k, v, _ = half(device, batch=batch, len_q=rows, len_k=len_k, heads=heads, dims=dims)
    check_decode(q, k, v, causal=True)
    lengths = ints(device, *(len_k - 130 * (i * i % 7) for i in range(batch)))
    check_decode(q, k, v, cache_seqlens=lengths, causal=True)
    sink = torch.randn(heads[0], device=device)
    check_decode(q, k, v, cache_seqlens=lengths.clamp(max=40), window=(30, 0), sink=sink)


@pytest.mark.parametrize("division", DIVISIONS, ids=str)
def test_graph_of_decodes_beside_eager_ones(device, division):
    """Launches whose blocks count each other need counters of their own, which are zero again at the end."""
    batch, len_k, heads, rows = division
    q, k, v, _ = half(device, batch=batch, len_q=rows, len_k=len_k, heads=heads, dims=(128, 128))
    check_graph_beside_eager_ones(device, functools.partial(flashattn.decode, q, k, v), 5)


@pytest.mark.parametrize("division", DIVISIONS, ids=str)
def test_graph_of_a_decode_with_other_lengths(device, division):
    batch, len_k, heads, rows = division
    q, k, v, _ = half(device, batch=batch, len_q=rows, len_k=len_k, heads=heads, dims=(128, 128))
    lengths = ints(device, *[len_k] * batch)
    call = functools.partial(flashattn.decode, q, k, v, cache_seqlens=lengths, return_lse=True)
    warm_up(device, call)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = call()
    for step in range(5):
        values = (0, 1, len_k // 2 + 1, 65, len_k)
        lengths.copy_(ints(device, *(values[(step + i) % 5] for i in range(batch))))
        graph.replay()
        same(results, call())


@pytest.mark.parametrize("new", [0, 3])
@pytest.mark.parametrize("page_size", [None, 1, 16, 64])
@pytest.mark.parametrize("dims", [*PLAIN_DIMS, LATENT, (40, 72)], ids=str)
def test_what_no_query_sees_changes_no_bit_of_a_decode(device, dims, page_size, new):
    """Keys past the lengths and before every window, pages of nobody and new memory hold 0, then NaN."""
    lengths, rows = (700, 0, 65, 1, 333), 2
    for options in ({}, {"causal": True}, {"num_splits": 5}, {"batch_invariant": True}, {"window": (20, 9)},
                    {"window": (300, 0), "num_splits": 3}):
        left = options["window"][0] if "window" in options else max(lengths) + new
        unseen = [min(n, max(0, n + new - rows - left)) for n in lengths]

        def run(value, unseen=unseen, options=options):
            torch.manual_seed(0)
            arguments = half_cache(device, lengths, rows=rows, new=new, dims=dims, page_size=page_size,
                                   leftpad=unseen, fill=value)
            del arguments["leftpad"]
            recycle(device, value)
            return flashattn.decode(**latent(arguments) if dims == LATENT else arguments, **options,
                                    return_lse=True)

        results = run(0.0)
        assert not any(t.isnan().any() for t in results)
        same(run(NAN), results)


INT_MAX, INT_MIN = 2**31 - 1, -2**31
GARBAGE = {  # the last sequence is sound
    "cache_seqlens": (INT_MIN, INT_MAX, 100, -1, 40),
    "page_table": (INT_MIN, INT_MAX, 40, -1),
    "cache_batch_idx": (INT_MIN, INT_MAX, 5, -1, 4),
    "leftpad": (INT_MIN, INT_MAX, 41, -1, 3),
    "cu_seqlens_q": (3, INT_MAX, -5, INT_MIN, 2, 10),
}


@pytest.mark.parametrize("new", [0, 2])
@pytest.mark.parametrize("kind", GARBAGE)
@pytest.mark.parametrize("dtype", [*HALF, torch.float32], ids=str)
def test_garbage_leads_nowhere_else(device, dtype, kind, new):
    """Lengths, pages, rows and offsets that are none.  Caches, out and the tables of the rotary lie inside
    NaN, which new memory holds too.  It stays as it is and comes into no result; the sound sequence has its
    bits."""
    sound = cached(device, [64, 20, 63, 1, 40], rows=2, new=new, heads=(8, 2), dims=(64, 64), dtype=dtype,
                   page_size=16 if kind == "page_table" else None, capacity=80, fill=0.0)
    if kind == "cache_batch_idx":
        sound[kind] = ints(device, 0, 1, 2, 3, 4)
    elif kind == "leftpad":
        sound[kind] = ints(device, 0, 0, 0, 0, 3)
    elif kind == "cu_seqlens_q":
        sound |= {n: sound[n].flatten(0, 1) for n in ("q", "k_new", "v_new") if n in sound}
        sound |= {kind: ints(device, 0, 2, 4, 6, 8, 10), "max_seqlen_q": 2}
    bands = {name: banded(sound[name]) for name in ("k_cache", "v_cache")}
    arguments = sound | {name: inside for name, (_, inside) in bands.items()}
    if kind == "page_table":
        arguments[kind] = sound[kind].clone()
        for i, page in enumerate(GARBAGE[kind]):
            arguments[kind][i] = page
    else:
        arguments[kind] = ints(device, *GARBAGE[kind])
    tables = torch.full((2, 84, 16), NAN, device=device)
    tables[:, 2:-2] = torch.randn(2, 80, 16, device=device)
    rotary = {"rotary_cos": tables[0, 2:-2], "rotary_sin": tables[1, 2:-2]}
    before = {name: band.clone() for name, (band, _) in bands.items()}
    for options in ({}, rotary, {"causal": True}, {"causal": True, **rotary}, {"window": (9, 0), **rotary},
                    {"num_splits": 3}, {"batch_invariant": True}):
        packs = kind == "cu_seqlens_q"
        out_band, out = banded(torch.zeros_like(sound["q"].view(*((1, 10) if packs else (5, 2)), 8, 64)))
        with new_memory_of_nan():
            _, lse = flashattn.decode(**arguments, **options, out=out[0] if packs else out, return_lse=True)
        assert out.isfinite().all() and not lse.isnan().any(), options
        if "batch_invariant" in options and not new and not packs:
            clean, clean_lse = caches.run(sound, **options)
            assert_identical(out[4], clean[4], "out of the sound sequence")
            assert_identical(lse[4], clean_lse[4], "lse of the sound sequence")
        out.fill_(NAN)
        assert out_band.isnan().all(), options
        for name, (band, inside) in bands.items():
            assert new or inside.equal(sound[name]), options
            assert inside.isfinite().all(), options
            inside.copy_(sound[name])
            assert_identical(band, before[name], f"{name} {options}")


@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128), (256, 256), LATENT], ids=str)
@pytest.mark.parametrize("rows", [1, 3])
def test_decode_of_one_sequence_has_the_bits_of_a_batch(device, dims, rows):
    """In any batch, over any pages."""
    lengths = [5000, 0, 65, 1, 2047, 129]
    arguments = half_cache(device, lengths, rows=rows, new=rows, dims=dims, page_size=16)
    if dims == LATENT:
        arguments = latent(arguments)
    options = {"causal": True, "batch_invariant": True}
    of_each = ("q", "k_new", "v_new", "cache_seqlens", "page_table")
    reading = {n: t for n, t in arguments.items() if n not in ("k_new", "v_new")}
    for given, groups in ((arguments, ([0], [1], [2], [3], [4], [5], [5, 0])),
                          (reading, ([0], [4], [5, 4, 3, 2, 1, 0] * 40))):
        out, lse = caches.run(given, **options)
        for chosen in groups:
            some = {n: t[chosen] if n in of_each else t for n, t in given.items()}
            ours, our_lse = caches.run(some, **options)
            assert_identical(ours, out[chosen], f"out of {chosen}")
            assert_identical(our_lse, lse[chosen], f"lse of {chosen}")


@pytest.mark.parametrize("page_size", [None, 16])
def test_decode_goes_to_the_current_stream(device, page_size):
    """The inputs become right late, in a side stream; the append and its readers are there too."""
    right = half_cache(device, [3000, 5, 64], rows=2, new=2, page_size=page_size)
    wrong = {n: torch.zeros_like(t) for n, t in right.items()}
    wanted_caches = {n: t.clone() for n, t in right.items()}
    wanted = flashattn.decode(**wanted_caches, causal=True, return_lse=True)
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)  # cycles, 0.1 s
        for name, t in wrong.items():
            t.copy_(right[name])
        results = flashattn.decode(**wrong, causal=True, return_lse=True)
    torch.cuda.current_stream(device).wait_stream(stream)
    same(results, wanted)
    for name in ("k_cache", "v_cache"):
        assert_identical(wrong[name], wanted_caches[name], name)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one CUDA device")
def test_decode_on_another_device_than_the_current_one():
    arguments = half_cache(torch.device("cuda:0"), [3000, 5, 64], new=1, page_size=16)
    there = {n: t.to("cuda:1") for n, t in arguments.items()}
    torch.cuda.synchronize(1)
    before = torch.cuda.memory_allocated(0)
    results = flashattn.decode(**there, return_lse=True)
    assert torch.cuda.memory_allocated(0) == before and all(t.device.index == 1 for t in results)
    same([t.to("cuda:0") for t in results], flashattn.decode(**arguments, return_lse=True))


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("page_size", [None, 16, 64])
def test_graph_of_decodes_with_other_contents(device, page_size, batch_invariant):
    """Lengths and pages change between replays, to longer and shorter ones."""
    arguments = half_cache(device, [700, 3, 64], rows=2, new=2, page_size=page_size, capacity=2048, fill=0.5)
    table, lengths = arguments.get("page_table"), arguments["cache_seqlens"]
    pages = len(arguments["k_cache"])
    for name in ("k_cache", "v_cache"):
        arguments[name].normal_()

    def shuffle():
        if table is not None:
            table.copy_(torch.randperm(pages, device=device)[:table.numel()].view_as(table))

    angles = torch.arange(2048, device=device)[:, None] * torch.rand(64, device=device)
    arguments |= {"causal": True, "rotary_cos": angles.cos(), "rotary_sin": angles.sin(),
                  "batch_invariant": batch_invariant, "return_lse": True}
    shuffle()
    warm_up(device, functools.partial(flashattn.decode, **arguments))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="global"):
        results = flashattn.decode(**arguments)
    for contents in ((0, 0, 0), (2046, 2046, 2046), (1, 1000, 63), (2000, 0, 16)):
        lengths.copy_(ints(device, *contents))
        shuffle()
        for name in ("q", "k_new", "v_new"):
            arguments[name].normal_()
        apart = {n: arguments[n].clone() for n in ("k_cache", "v_cache")}
        graph.replay()
        same(results, flashattn.decode(**arguments | apart))
        for name, cache in apart.items():
            assert_identical(arguments[name], cache, name)
    assert not results[0].isnan().any()


def test_no_decode_waits_for_the_device(device):
    plain = half_cache(device, [300, 40], rows=2, new=2)
    reading = {n: t for n, t in plain.items() if n not in ("k_new", "v_new")}
    cos, sin = torch.randn(2, 400, 16, device=device)
    calls = [plain, reading, reading | {"cache_seqlens": 40}, plain | {"cache_seqlens": 40},
             half_cache(device, [300, 40], rows=2, new=2, page_size=16, leftpad=[1, 2]),
             plain | {"rotary_cos": cos, "rotary_sin": sin, "causal": True}, reading | {"num_splits": 5},
             caches.packed(plain, [0, 2, 3]), reading | {"batch_invariant": True, "window": (20, 0)},
             reading | {"cache_batch_idx": ints(device, 1, 0)},
             {n: t.float() if t.is_floating_point() else t for n, t in plain.items()}]
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for arguments in calls:
            flashattn.decode(**arguments)
    finally:
        torch.cuda.set_sync_debug_mode(before)


DECODES = {  # lengths and the rest of half_cache, then options
    "ragged": ((4000, 17, 900, 0, 2500), {"page_size": 16}, {}),
    "one sequence": ((30_000,), {"rows": 2, "heads": (8, 1)}, {"causal": True}),
    "append": ((4000, 1, 900), {"new": 1, "page_size": 64}, {"causal": True}),
    "invariant": ((5000, 33), {"rows": 3}, {"batch_invariant": True}),
    "splits": ((3000, 700), {"dims": (64, 64), "heads": (16, 16)}, {"num_splits": 7}),
    "latent": ((2000, 333), {"dims": LATENT, "heads": (16, 1)}, {}),
    "latent of many heads": ((4000, 17, 900, 0, 2500), {"dims": LATENT, "heads": (128, 1), "page_size": 64},
                             {"causal": True}),
}


def decode_of(device, kind):
    """A call to repeat; an append writes the same each time."""
    lengths, shape, options = DECODES[kind]
    arguments = half_cache(device, lengths, **shape)
    arguments = latent(arguments) if kind.startswith("latent") else arguments
    return functools.partial(flashattn.decode, **arguments, **options)


@pytest.mark.parametrize("kind", DECODES)
def test_a_decode_repeats_its_bits_a_thousand_times(device, kind):
    call = decode_of(device, kind)
    assert count_differences(call, call(return_lse=True), 1000) == 0


@pytest.mark.parametrize("kind", DECODES)
def test_graph_of_many_decodes_beside_eager_ones(device, kind):
    """The parts that a launch merges lie in memory that must be its own."""
    check_graph_beside_eager_ones(device, decode_of(device, kind), 10)


@large
def test_cache_of_more_than_two_to_the_31_elements(device):
    """Its last rows, read and appended to, against a small one; nothing else is touched."""
    entries, index = 2**31 // (64 * 8 * 64) + 3, (-1, 1, -2)
    near = half_cache(device, [60, 3, 63], new=1, heads=(16, 8), dims=(64, 64), capacity=64)
    shape = (entries, *near["k_cache"].shape[1:])
    assert math.prod(shape) > 2**31
    far = {n: torch.empty(shape, dtype=near[n].dtype, device=device) for n in ("k_cache", "v_cache")}
    for name, cache in far.items():
        cache[list(index)] = near[name]
    rows = ints(device, *(i % entries for i in index))
    same(flashattn.decode(**near | far, cache_batch_idx=rows, return_lse=True),
         flashattn.decode(**near, return_lse=True))
    for name, cache in far.items():
        assert_identical(cache[list(index)], near[name], name)


@large
@pytest.mark.parametrize("heads", [(2, 1), (8, 8)], ids=str)
@pytest.mark.parametrize("page_size", [None, 2])
def test_decode_of_many_sequences(device, heads, page_size):
    """70,000, each of two keys: with q = 0 the answer is the mean of two values."""
    batch, dtype = 70_000, half_dtype(device)
    numbers = torch.arange(batch, device=device) % 100
    v_cache = numbers.to(dtype)[:, None, None, None].repeat(1, 2, heads[1], 64)
    v_cache[:, 1] += 2
    options = {}
    if page_size:
        order = torch.randperm(batch, device=device)
        v_cache, options = torch.empty_like(v_cache).index_copy_(0, order, v_cache), {
            "page_table": order.int()[:, None]}
    q = torch.zeros(batch, 1, heads[0], 64, dtype=dtype, device=device)
    out, lse = flashattn.decode(q, torch.zeros_like(v_cache), v_cache, **options, return_lse=True)
    assert out.equal((numbers + 1).to(dtype)[:, None, None, None].expand_as(out))
    assert (lse - math.log(2)).abs().max() < 1e-5


def test_decode_of_many_heads(device):
    """70,000, of which seven share a KV head."""
    numbers, dtype = torch.arange(10_000, device=device) % 100, half_dtype(device)
    v_cache = numbers.to(dtype)[None, None, :, None].repeat(1, 2, 1, 64)
    v_cache[:, 1] += 2
    q = torch.zeros(1, 1, 70_000, 64, dtype=dtype, device=device)
    out = flashattn.decode(q, torch.zeros_like(v_cache), v_cache)
    assert out[0, 0].equal((numbers + 1).to(dtype).repeat_interleave(7)[:, None].expand_as(out[0, 0]))


@large
@pytest.mark.parametrize("page_size", [None, 16])
def test_decode_of_many_keys(device, page_size):
    """q = 0 and 2^22 + 2^10 keys of value 0 or 1: the share of ones, and the logarithm of the number."""
    length, dtype = 2**22 + 2**10, half_dtype(device)
    ones = (torch.arange(length, device=device) % 4 == 0).to(dtype)
    v_cache = ones[None, :, None, None].repeat(1, 1, 2, 64)
    options = {}
    if page_size:
        v_cache = v_cache.view(-1, page_size, 2, 64)
        options["page_table"] = torch.randperm(len(v_cache), device=device).int()[None]
    q = torch.zeros(1, 1, 8, 64, dtype=dtype, device=device)
    out, lse = flashattn.decode(q, torch.zeros_like(v_cache), v_cache, **options, return_lse=True)
    assert (out - 0.25).abs().max() < 1e-3 and (lse - math.log(length)).abs().max() < 1e-4
