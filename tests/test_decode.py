"""flashattn.decode against the oracle, with NaN in all memory that it must not read."""

import math
import mmap
from itertools import combinations_with_replacement

import pytest
import torch

import flashattn
from caches import cached, packed, run
from compare import assert_close_2x, assert_identical, check_decode
from flashattn import reference
from layouts import DISTINCT, around, laid_out

F32, F64, F16, BF16 = torch.float32, torch.float64, torch.float16, torch.bfloat16
DTYPES = [F32, BF16, F16, F64]


def ints(values, device):
    return torch.tensor(values, dtype=torch.int32, device=device)


# Layouts and lengths ----------------------------------------------------------------------------------------

@pytest.mark.parametrize("page_size", [None, 16])
@pytest.mark.parametrize("new", [0, 3])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes(dtype, causal, new, page_size, device):
    arguments = cached(device, [40, 7, 65], rows=3, new=new, dtype=dtype, page_size=page_size)
    check_decode(**arguments, causal=causal)


@pytest.mark.parametrize("heads", [(1, 1), (4, 4), (2, 1), (6, 2), (8, 1), (9, 3), (16, 1), (71, 1)], ids=str)
@pytest.mark.parametrize("rows", [1, 5])
def test_heads(heads, rows, device):
    check_decode(**cached(device, [40, 3], rows=rows, heads=heads), causal=True)


@pytest.mark.parametrize("ratio", [1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 71])
def test_query_head_reads_its_kv_head(ratio, device):
    arguments = cached(device, [9], rows=2, heads=(3 * ratio, 3))
    arguments["v_cache"][:] = torch.arange(3, device=device)[:, None]
    out, _ = run(arguments)
    expected = torch.arange(3 * ratio, device=device) // ratio
    torch.testing.assert_close(out, expected[:, None].to(out.dtype).expand_as(out), rtol=1e-6, atol=0)


@pytest.mark.parametrize("dims", [*((n, n) for n in (1, 8, 24, 63, 64, 80, 96, 112, 128, 160, 224, 256, 512)),
                                  (192, 128), (64, 512), (5, 40)], ids=str)
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_head_dims(dims, dtype, device):
    check_decode(**cached(device, [33, 12], rows=2, new=2, dims=dims, dtype=dtype), causal=True)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("rows", [*range(1, 18), 63, 64, 65, 130])
def test_query_rows(rows, causal, device):
    """From one token to a prefill chunk, longer than some of the sequences."""
    check_decode(**cached(device, [150, 64, 20], rows=rows, page_size=16), causal=causal)


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (19, 0)},
                                     {"window": (7, 40), "softcap": 5.0}], ids=str)
@pytest.mark.parametrize("new", [0, 5])
@pytest.mark.parametrize("page_size", [1, 16, 32, 64, 128, 256])
def test_page_sizes(page_size, new, options, device):
    check_decode(**cached(device, [300, 1, 64, 0, 255], rows=4, new=new, page_size=page_size), **options)


@pytest.mark.parametrize("page_size", [None, 16])
@pytest.mark.parametrize("new", [0, 1, 16, 17])
@pytest.mark.parametrize("length", [0, 1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 257])
def test_lengths_at_edges(length, new, page_size, device):
    check_decode(**cached(device, [length, 20], rows=2, new=new, page_size=page_size), causal=True)


def test_a_full_cache(device):
    check_decode(**cached(device, [32, 32], new=0, capacity=32))
    check_decode(**cached(device, [29, 28], rows=3, new=3, capacity=32), causal=True)
    check_decode(**cached(device, [61, 61], rows=3, new=3, capacity=64, page_size=16), causal=True)
    whole = cached(device, [32, 32], capacity=32)
    del whole["cache_seqlens"]                                # the default is the whole cache
    check_decode(**whole)
    whole = cached(device, [64, 64], capacity=64, page_size=16)
    del whole["cache_seqlens"]
    check_decode(**whole)


@pytest.mark.parametrize("page_size", [None, 4])
def test_empty_sequences(page_size, device):
    """No key: out 0 and LSE -inf, or the sink; neighbours are not touched."""
    arguments = cached(device, [0, 9, 0], rows=2, page_size=page_size)
    out, lse, *_ = check_decode(**arguments)
    for b in (0, 2):
        assert torch.equal(out[b], torch.zeros_like(out[b])) and (lse[b] == -math.inf).all()
    sink = torch.tensor([0.5, -1.0, 2.0, 0.0], device=device)
    out, lse, *_ = check_decode(**arguments, sink=sink)
    for b in (0, 2):
        assert torch.equal(out[b], torch.zeros_like(out[b]))
        assert torch.equal(lse[b], sink[:, None].expand_as(lse[b]))


@pytest.mark.parametrize("batch, rows, capacity", [(0, 1, 8), (2, 0, 8), (2, 3, 0)])
def test_nothing_to_do(batch, rows, capacity, device):
    """No sequence, no query, or a cache without room."""
    arguments = cached(device, [min(4, capacity)] * batch, rows=rows, capacity=capacity)
    out, lse, *_ = check_decode(**arguments)
    assert out.shape == (batch, rows, 4, 16) and lse.shape == (batch, 4, rows)


def test_70000_sequences(device):
    """More sequences than a 16-bit grid holds; with q = 0 the answer is the mean of two values."""
    batch = 70_000
    numbers = torch.arange(batch, device=device).float()
    v_cache = numbers[:, None, None, None].repeat(1, 2, 1, 8)
    v_cache[:, 1] += 2
    zeros = torch.zeros(batch, 1, 2, 8, device=device)
    out, lse = flashattn.decode(zeros, torch.zeros_like(v_cache), v_cache, return_lse=True)
    assert torch.equal(out[:, 0, 0, 0], numbers + 1)
    torch.testing.assert_close(lse, torch.full_like(lse, math.log(2)))


def test_70000_heads(device):
    """Each KV head serves seven query heads; with q = 0 the answer is the mean of two values."""
    numbers = torch.arange(10_000, device=device).float()
    v_cache = numbers[None, None, :, None].repeat(1, 2, 1, 4)
    v_cache[:, 1] += 2
    out = flashattn.decode(torch.zeros(1, 1, 70_000, 4, device=device), torch.zeros_like(v_cache), v_cache)
    assert torch.equal(out[0, 0, :, 0], numbers.repeat_interleave(7) + 1)


@pytest.mark.xdist_group("large")
def test_pages_beyond_32_bits(device):
    """Offsets over 2^32: 262,148 pages of 16,384 elements, K and V interleaved; 4 pages are touched."""
    pages, page_size, heads, dim = 262_148, 16, 8, 64
    shape = pages, 2, page_size, heads, dim
    if device.type == "cpu":
        no_reserve = 0x4000                                   # MAP_NORESERVE: address space without memory
        memory = mmap.mmap(-1, 2 * math.prod(shape), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve)
        pool = torch.frombuffer(memory, dtype=F16).view(shape)
    else:
        pool = torch.empty(shape, dtype=F16, device=device)
    table = ints([[pages - 1, pages - 3], [131_073, pages - 2]], device)
    small = torch.randn(2, 2, 2, page_size, heads, dim, device=device).to(F16)  # sequence, page, K or V
    pool[table.long()] = small
    q, k_new, v_new = (torch.randn(2, 1, h, dim, device=device).to(F16) for h in (16, 8, 8))
    common = {"q": q, "k_new": k_new, "v_new": v_new, "cache_seqlens": ints([30, 17], device)}
    common |= {"return_lse": True}
    out, lse = flashattn.decode(k_cache=pool[:, 0], v_cache=pool[:, 1], page_table=table, **common)

    k_small, v_small = (t.flatten(0, 1).contiguous() for t in small.unbind(2))
    near = ints([[0, 1], [2, 3]], device)
    expected = flashattn.decode(k_cache=k_small, v_cache=v_small, page_table=near, **common)
    assert_identical(out, expected[0], "out")
    assert_identical(lse, expected[1], "lse")
    assert_identical(pool[table.long(), 0].flatten(0, 1), k_small, "k_cache")
    assert_identical(pool[table.long(), 1].flatten(0, 1), v_small, "v_cache")


@pytest.mark.parametrize("layout", DISTINCT[1:])
@pytest.mark.parametrize("name", ["q", "k_cache", "v_cache", "k_new", "v_new"])
@pytest.mark.parametrize("page_size", [None, 16])
def test_strides(name, layout, page_size, device):
    """Each tensor alone in each layout: the same bits as from contiguous tensors, in the caches too."""
    arguments = cached(device, [40, 13], rows=2, new=2, page_size=page_size)
    contiguous = {n: t.clone() for n, t in arguments.items()}
    expected = flashattn.decode(**contiguous, causal=True, return_lse=True)
    view = arguments[name] = laid_out(arguments[name], layout)
    gaps = around(view)
    ours = flashattn.decode(**arguments, causal=True, return_lse=True)
    assert_identical(ours[0], expected[0], "out")
    assert_identical(ours[1], expected[1], "lse")
    for n in arguments:
        assert_identical(arguments[n], contiguous[n], n)
    assert_identical(around(view), gaps, "memory around the view")


def test_expanded_tensors(device):
    """Stride 0: one query and one appended key for all sequences and heads, one cache for all batches."""
    arguments = cached(device, [17, 9], rows=2, new=2)
    arguments["q"] = arguments["q"][:1, :, :1].expand(2, 2, 4, 16)
    arguments["k_new"] = arguments["k_new"][:1, :, :1].expand(2, 2, 2, 16)
    check_decode(**arguments, causal=True)
    reading = cached(device, [17], rows=2)
    for name in ("k_cache", "v_cache"):
        reading[name] = reading[name].expand(3, -1, -1, -1)
    reading |= {"q": torch.randn(3, 2, 4, 16, device=device), "cache_seqlens": ints([17, 3, 8], device)}
    check_decode(**reading, causal=True)


# What must not be read --------------------------------------------------------------------------------------

@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (5, 2)}, {"num_splits": 3},
                                     {"batch_invariant": True}], ids=str)
@pytest.mark.parametrize("page_size", [None, 8])
def test_unread_memory_never_matters(page_size, options, device):
    """The same bits whatever lies past a length, before leftpad, in unused pages and outside every window."""
    results = []
    for fill in (0.0, math.nan, math.inf, -math.inf, 6e4):
        torch.manual_seed(0)
        arguments = cached(device, [30, 9, 0], rows=3, page_size=page_size, leftpad=[3, 8, 0], fill=fill)
        if "window" in options:                               # query 0 stands at 27 and sees keys from 22 on
            first = arguments["page_table"][0, :2].tolist() if page_size else None
            for t in (arguments["k_cache"], arguments["v_cache"]):
                if page_size:
                    t[first] = fill
                else:
                    t[0, :22] = fill
        results.append(run(arguments, **options))
    for out, lse in results[1:]:
        assert_identical(out, results[0][0], "out")
        assert_identical(lse, results[0][1], "lse")
    assert results[0][0].isfinite().all()


def test_leftpad(device):
    slopes = torch.rand(4, device=device)
    for page_size in (None, 1, 16):
        for leftpad in ([0, 5, 16], [17, 1, 40], [15, 6, 39]):
            for options in ({}, {"causal": True}, {"window": (9, 0)},
                            {"window": (3, 3), "alibi_slopes": slopes}):
                for new in (0, 3):
                    arguments = cached(device, [33, 6, 40], rows=3, new=new, page_size=page_size,
                                       leftpad=leftpad)
                    check_decode(**arguments, **options)


def test_cache_batch_idx(device):
    for new in (0, 3):
        arguments = cached(device, [20, 4, 33, 0, 11], rows=2, new=new)
        for name in ("q", "k_new", "v_new"):
            if name in arguments:
                arguments[name] = arguments[name][:4]
        index = [4, 0, 2, 1]
        arguments["cache_seqlens"] = arguments["cache_seqlens"][index]
        check_decode(**arguments, cache_batch_idx=ints(index, device), causal=True)
    shared = cached(device, [20, 20, 20], rows=2)             # several sequences may read one row
    shared |= {name: shared[name][:1] for name in ("k_cache", "v_cache")}
    check_decode(**shared, cache_batch_idx=ints([0, 0, 0], device))


def test_pages_shared_by_sequences(device):
    """Sequences 1 and 2 share the two first pages of sequence 0; each appends to a page of its own."""
    arguments = cached(device, [9, 9, 9], rows=2, new=2, page_size=4, capacity=12)
    table = arguments["page_table"]
    table[1:, :2] = table[0, :2]
    arguments["k_cache"] = torch.where(arguments["k_cache"].isnan(), 0.5, arguments["k_cache"])
    check_decode(**arguments, causal=True)
    table[:] = table[0].clone()                               # reading, everything may be shared
    check_decode(**{n: t for n, t in arguments.items() if n not in ("k_new", "v_new")}, causal=True)


# Append and rotary ------------------------------------------------------------------------------------------

def test_append_writes_only_its_rows(device):
    """Rows 1 to 4 of a cache of 5 by 4096 positions, one token each: four keys and values change."""
    k_cache, v_cache = (torch.randn(5, 4096, 2, 16, device=device) for _ in range(2))
    before = k_cache.clone(), v_cache.clone()
    k_new, v_new = (torch.randn(4, 1, 2, 16, device=device) for _ in range(2))
    lengths = [0, 17, 4095, 2000]
    flashattn.decode(torch.randn(4, 1, 4, 16, device=device), k_cache, v_cache, k_new=k_new, v_new=v_new,
                     cache_seqlens=ints(lengths, device), cache_batch_idx=ints([1, 2, 3, 4], device))
    for cache, old, new, name in zip((k_cache, v_cache), before, (k_new, v_new), ("k_cache", "v_cache")):
        for b, length in enumerate(lengths):
            old[b + 1, length] = new[b, 0]
        assert_identical(cache, old, name)


@pytest.mark.parametrize("rows, new", [(1, 4), (4, 1), (7, 3), (2, 20)])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (4, 1)}], ids=str)
def test_append_of_another_length_than_q(rows, new, options, device):
    check_decode(**cached(device, [5, 0, 31], rows=rows, new=new, page_size=8), **options)


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (6, 0)}, {"window": (3, 2)}], ids=str)
@pytest.mark.parametrize("new", [0, 3])
@pytest.mark.parametrize("columns", [2, 8, 16])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rotary(dtype, interleaved, columns, new, options, device):
    """All 16 columns or the first; tables in float32 and the dtype of q, NaN at positions that nobody has."""
    page_size = None if columns == 8 else 4
    arguments = cached(device, [20, 3, 9], rows=3, new=new, dtype=dtype, page_size=page_size)
    angles = torch.arange(40, device=device)[:, None] * 0.7 ** torch.arange(columns // 2, device=device)
    for table_dtype in {dtype, F32 if dtype != F64 else dtype}:
        cos, sin = (function(angles).to(table_dtype) for function in (torch.cos, torch.sin))
        cos[23:], sin[23:] = math.nan, math.nan
        check_decode(**arguments, rotary_cos=cos, rotary_sin=sin, rotary_interleaved=interleaved, **options)


def test_rotary_of_odd_head_dim(device):
    arguments = cached(device, [20, 3], rows=2, new=2, dims=(23, 16))
    cos, sin = torch.randn(2, 40, 11, device=device)
    for interleaved in (False, True):
        check_decode(**arguments, rotary_cos=cos, rotary_sin=sin, rotary_interleaved=interleaved, causal=True)


def test_rotary_of_queries_before_the_first_key(device):
    """More queries than keys: positions below 0 count as 0."""
    q, k, v = (torch.randn(1, rows, 1, 8, device=device) for rows in (5, 2, 2))
    cos, sin = torch.randn(2, 2, 4, device=device)
    check_decode(q, k, v, window=(None, 3), rotary_cos=cos, rotary_sin=sin)


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary_scores_depend_on_distance(interleaved, device):
    """Rotated by true cosines and sines, a score depends on positions only through their difference."""
    angles = torch.arange(64, device=device, dtype=F64)[:, None] * 0.5 ** torch.arange(8, device=device)
    rotary = {"rotary_cos": angles.cos(), "rotary_sin": angles.sin(), "rotary_interleaved": interleaved}
    q, k, v = (torch.randn(1, 6, h, 16, dtype=F64, device=device) for h in (4, 2, 2))
    results = []
    for start in (0, 31):                                     # leftpad hides what stands before
        caches = [torch.full((1, 64, 2, 16), math.nan, dtype=F64, device=device) for _ in range(2)]
        results.append(flashattn.decode(q, *caches, k_new=k, v_new=v, cache_seqlens=start, causal=True,
                                        leftpad=ints([start], device), **rotary))
    torch.testing.assert_close(*results, rtol=1e-10, atol=1e-12)


# MLA, packed queries ----------------------------------------------------------------------------------------

@pytest.mark.parametrize("dims, heads", [((16, 12), (4, 1)), ((16, 16), (4, 2)), ((16, 1), (3, 1)),
                                         ((576, 512), (16, 1))], ids=str)
@pytest.mark.parametrize("page_size", [None, 16])
@pytest.mark.parametrize("new", [0, 2])
def test_values_inside_the_keys(dims, heads, page_size, new, device):
    arguments = cached(device, [40, 1, 0], rows=2, new=new, heads=heads, dims=dims, page_size=page_size)
    arguments["v_cache"] = None
    arguments.pop("v_new", None)
    check_decode(**arguments, v_head_dim=dims[1], causal=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_mla_dtypes_and_rotary(dtype, device):
    arguments = cached(device, [40, 5], rows=2, new=2, heads=(4, 1), dims=(24, 16), dtype=dtype)
    arguments |= {"v_cache": None, "v_new": None}
    cos, sin = torch.randn(2, 50, 4, device=device, dtype=dtype)
    check_decode(**arguments, v_head_dim=16, num_splits=3)
    check_decode(**arguments, v_head_dim=16, rotary_cos=cos, rotary_sin=sin, causal=True)


@pytest.mark.parametrize("cu", [[0, 3, 3, 4, 10], [2, 3, 8, 9, 9], [0, 0, 0, 0, 0], [0, 1, 2, 3, 4],
                                [5, 40, 41, 60, 60]], ids=str)
@pytest.mark.parametrize("append", [False, True])
@pytest.mark.parametrize("page_size", [None, 8])
def test_packed_queries(page_size, append, cu, device):
    """Sequences without queries, rows of q in no sequence; k_new is packed like q."""
    rows = max(b - a for a, b in zip(cu, cu[1:]))
    arguments = cached(device, [30, 0, 7, 16], rows=rows, new=rows if append else 0, page_size=page_size)
    for options in ({}, {"causal": True}, {"window": (5, 1)}, {"causal": True, "max_seqlen_q": rows + 3}):
        out, lse, *_ = check_decode(**packed(arguments, cu) | options)
        for outside in (slice(0, cu[0]), slice(cu[-1], None)):
            assert (out[outside] == 0).all() and (lse[:, outside] == -math.inf).all()


def test_packed_queries_with_rotary(device):
    arguments = packed(cached(device, [30, 0, 7], rows=5, new=5), [1, 4, 9, 10])
    cos, sin = torch.randn(2, 40, 4, device=device)
    for options in ({}, {"causal": True}):
        check_decode(**arguments, rotary_cos=cos, rotary_sin=sin, **options)


def test_packed_equals_dense(device):
    arguments = cached(device, [30, 5, 17], rows=4, new=4)
    out, lse = run(arguments, causal=True, batch_invariant=True)
    ours, our_lse = run(packed(arguments, [0, 4, 8, 12]), causal=True, batch_invariant=True)
    assert_identical(ours[:12], out.flatten(0, 1), "out")
    assert_identical(our_lse[:, :12], lse.transpose(0, 1).flatten(1), "lse")


# Options ----------------------------------------------------------------------------------------------------

def option(name, device):
    return {
        "causal": {"causal": True},
        "window": {"window": (20, 3)},
        "left only": {"window": (9, None)},
        "right only": {"window": (-1, 2)},
        "scale": {"scale": 0.6},
        "negative scale": {"scale": -0.6},
        "softcap": {"softcap": 1.5},
        "alibi": {"alibi_slopes": torch.tensor([0.5, 0.1, -0.2, 0.0], device=device)},
        "alibi of each batch": {"alibi_slopes": torch.rand(3, 4, device=device)},
        "sink": {"sink": torch.tensor([0.5, -math.inf, 3.0, -2.0], device=device)},
        "splits": {"num_splits": 4},
        "invariant": {"batch_invariant": True},
    }[name]


OPTIONS = ["causal", "window", "left only", "right only", "scale", "negative scale", "softcap", "alibi",
           "alibi of each batch", "sink", "splits", "invariant"]


@pytest.mark.parametrize("pair", [*combinations_with_replacement(OPTIONS, 2)], ids=" and ".join)
def test_option_pairs(pair, device):
    """Every pair, over pages with an append: right or refused by name, never ignored."""
    options = option(pair[0], device) | option(pair[1], device)
    arguments = cached(device, [37, 0, 16], rows=3, new=3, page_size=16)
    if pair == ("splits", "invariant"):                       # a number of splits, and their length
        with pytest.raises(ValueError, match="num_splits.*batch_invariant"):
            check_decode(**arguments, **options)
    else:
        check_decode(**arguments, **options)


@pytest.mark.parametrize("dtype", [BF16, F16, F64], ids=str)
def test_all_options_at_once(dtype, device):
    options = {}
    for name in ("causal", "window", "scale", "softcap", "alibi", "sink", "splits"):
        options |= option(name, device)
    arguments = cached(device, [70, 0, 16], rows=3, new=3, page_size=16, leftpad=[9, 0, 2], dtype=dtype)
    check_decode(**arguments, **options)
    options["sink"] = options["sink"].to(dtype)               # the sink may have the dtype of q
    check_decode(**cached(device, [70, 0, 16], rows=3, dtype=dtype), **options)


def pattern(rows, keys, visible):
    """Probabilities of equal scores: row i spread evenly over visible[i]."""
    expected = torch.zeros(rows, keys)
    for row, seen in enumerate(visible):
        expected[row, list(seen)] = 1 / max(1, len(seen))
    return expected


@pytest.mark.parametrize("page_size", [None, 1, 2, 4])
@pytest.mark.parametrize("splits", [0, 1, 3])
@pytest.mark.parametrize("append", [False, True])
@pytest.mark.parametrize("rows, keys, options, visible", [
    (2, 5, {"causal": True}, [range(4), range(5)]),
    (5, 2, {"causal": True}, [[], [], [], [0], [0, 1]]),
    (3, 8, {"window": (2, 0)}, [range(3, 6), range(4, 7), range(5, 8)]),
    (3, 8, {"window": (2, None), "causal": True}, [range(3, 6), range(4, 7), range(5, 8)]),
    (8, 8, {"window": (2, 1)}, [range(max(0, i - 2), min(8, i + 2)) for i in range(8)]),
    (10, 10, {"window": (3, 0)}, [range(max(0, i - 3), i + 1) for i in range(10)]),
    (4, 9, {"window": (0, 0)}, [[5], [6], [7], [8]]),
    (4, 9, {"window": (100, 100)}, [range(9)] * 4),
    (4, 9, {"window": (-1, -1)}, [range(9)] * 4),
    (4, 9, {"window": (None, 1)}, [range(7), range(8), range(9), range(9)]),
    (4, 9, {"window": (1, None)}, [range(4, 9), range(5, 9), range(6, 9), range(7, 9)]),
    (6, 3, {"window": (1, 2)}, [[], [0], [0, 1], [0, 1, 2], [0, 1, 2], [1, 2]]),
], ids=lambda x: str(x) if isinstance(x, dict) else None)
def test_visible_keys(rows, keys, options, visible, append, splits, page_size, device):
    """With q = 0 and V the identity, out is the probability matrix and the LSE counts the visible keys."""
    new = min(rows, keys) if append else 0
    arguments = cached(device, [keys - new], rows=rows, new=new, heads=(4, 1), page_size=page_size)
    identity = torch.eye(keys, 16, device=device)
    if append:
        arguments["v_new"][0, :, 0] = identity[keys - new:]
    for key in range(keys - new):
        at = (0, key)
        if page_size is not None:
            at = int(arguments["page_table"][0, key // page_size]), key % page_size
        arguments["v_cache"][at][0] = identity[key]
    arguments["q"].zero_()
    out, lse = run(arguments, **options, num_splits=splits)
    expected = pattern(rows, keys, visible).to(device)
    counts = torch.tensor([float(len(seen)) for seen in visible], device=device)
    for head in range(4):
        assert torch.equal(out[0, :, head, :keys] == 0, expected == 0)
        torch.testing.assert_close(out[0, :, head, :keys], expected, rtol=1e-6, atol=0)
        torch.testing.assert_close(lse[0, head], counts.log(), rtol=1e-6, atol=1e-7)


def test_alibi_by_hand(device):
    arguments = cached(device, [4], heads=(2, 1))
    arguments["q"].zero_()
    arguments["v_cache"][0, :4, 0] = torch.eye(4, 16, device=device)
    slope = torch.full((2,), math.log(2), device=device)
    expected = torch.tensor([1.0, 2.0, 4.0, 8.0], device=device) / 15
    for slopes in (slope, slope.expand(1, 2)):
        out, _ = run(arguments, alibi_slopes=slopes)
        torch.testing.assert_close(out[0, 0, :, :4], expected.expand(2, 4), rtol=1e-6, atol=0)


def test_sink_by_hand(device):
    arguments = cached(device, [3], heads=(2, 2))
    arguments["q"].zero_()
    arguments["v_cache"][0, :3] = torch.eye(3, 16, device=device)[:, None]
    expected = ((0.0, 0.25, math.log(4)), (math.log(5), 0.125, math.log(8)), (-math.inf, 1 / 3, math.log(3)))
    for sink, share, log in expected:
        for splits in (1, 3):
            out, lse = run(arguments, sink=torch.full((2,), sink, device=device), num_splits=splits)
            torch.testing.assert_close(out[..., :3], torch.full_like(out[..., :3], share), rtol=1e-6, atol=0)
            torch.testing.assert_close(lse, torch.full_like(lse, log), rtol=1e-6, atol=0)


@pytest.mark.parametrize("cap, share", [(1.0, 0.723927), (30.0, 0.880486), (0.0, 0.880797)])
def test_softcap_by_hand(cap, share, device):
    """Scaled logits 2 and 0."""
    arguments = cached(device, [2], heads=(1, 1))
    arguments["q"].zero_()[..., 0] = 2
    arguments["k_cache"][0, :2] = torch.eye(2, 16, device=device)[:, None]
    arguments["v_cache"][0, :2] = torch.eye(2, 16, device=device)[:, None]
    out, _ = run(arguments, softcap=cap, scale=1.0)
    assert abs(out[0, 0, 0, 0].item() - share) < 1e-6


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_extreme_logits(dtype, device):
    """A lone key takes all the weight, however small its logit is, and hidden keys take none."""
    arguments = cached(device, [1], heads=(1, 1), dtype=dtype, capacity=2)
    arguments["q"].fill_(125)
    arguments["k_cache"][0, 0] = -125                         # logit -16 * 125^2 = -2.5e5 before the scale
    out, lse = run(arguments)
    assert torch.equal(out[0, 0, 0], arguments["v_cache"][0, 0, 0])
    assert abs(lse.item() + 62500) <= 0.01
    arguments["k_cache"][0, 1] = 125
    arguments["v_cache"][0, :, 0] = torch.tensor([[1.0], [100.0]], device=device)
    out, _ = run(arguments)                                   # key 1 lies past the length
    assert (out == 1).all()
    both = arguments | {"cache_seqlens": ints([2], device), "q": arguments["q"].expand(1, 2, 1, 16)}
    out, _ = run(both, causal=True)                           # query 0 does not see key 1
    assert (out[0, 0] == 1).all() and (out[0, 1] == 100).all()


@pytest.mark.parametrize("magnitude", [3, 30])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_large_inputs(magnitude, dtype, device):
    arguments = cached(device, [200, 1], rows=8, dims=(64, 64), dtype=dtype)
    for name in ("q", "k_cache", "v_cache"):
        arguments[name] = arguments[name] * magnitude
    check_decode(**arguments, num_splits=3)


# Splits, determinism, batch invariance ----------------------------------------------------------------------

@pytest.mark.parametrize("page_size", [None, 16])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (50, 0)}, {"softcap": 2.0}], ids=str)
def test_splits_agree(options, page_size, device):
    """More splits than keys, than pages, and splits outside the window change nothing but rounding."""
    arguments = cached(device, [300, 0, 1, 17], rows=2, page_size=page_size)
    sink = torch.randn(4, device=device)
    sink[0] = -math.inf                                       # none: a row without keys has LSE -inf
    reference_out, reference_lse = run(arguments, num_splits=1, sink=sink, **options)
    for splits in (0, 1, 2, 3, 7, 64, 1000):
        out, lse, *_ = check_decode(**arguments, num_splits=splits, sink=sink, **options)
        torch.testing.assert_close(out, reference_out, rtol=1e-5, atol=2e-6)
        torch.testing.assert_close(lse, reference_lse, rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize("splits", [0, 1, 3])
def test_repeats_are_bit_equal(splits, device):
    arguments = cached(device, [300, 40, 7], rows=2, new=2)
    first = run(arguments, num_splits=splits, causal=True)
    for _ in range(5):
        moved = {name: t.clone() for name, t in arguments.items()}
        for ours, expected in zip(run(moved, num_splits=splits, causal=True), first):
            assert_identical(ours, expected, "repeat")


@pytest.mark.parametrize("page_size", [None, 16])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 5])
def test_batch_invariance(rows, dtype, page_size, device):
    """A sequence has the same bits alone, among others, in any order, and beside longer packed queries."""
    lengths = [3000, 0, 65, 1, 17, 129]                       # the first is several splits
    arguments = cached(device, lengths, rows=rows, new=rows, heads=(4, 1), dtype=dtype, page_size=page_size)
    options = {"causal": True, "batch_invariant": True}
    out, lse = run(arguments, **options)
    per_sequence = ("q", "k_new", "v_new", "cache_seqlens", "page_table")
    if page_size is None:
        per_sequence += ("k_cache", "v_cache")
    for chosen in ([0], [2], [4, 2], [5, 4, 3, 2, 1, 0]):
        some = {name: t[chosen] if name in per_sequence else t for name, t in arguments.items()}
        ours, our_lse = run(some, **options)
        assert_identical(ours, out[chosen], f"out of {chosen}")
        assert_identical(our_lse, lse[chosen], f"lse of {chosen}")

    long = arguments["q"].new_empty(6, rows + 40, 4, 16).normal_()
    reading = {n: t for n, t in arguments.items() if n not in ("k_new", "v_new")}
    alone, alone_lse = run(reading, **options)
    mixed = reading | {"q": torch.cat([long[0], *reading["q"][1:]]),
                       "cu_seqlens_q": ints([0, *(rows + 40 + rows * n for n in range(6))], device),
                       "max_seqlen_q": rows + 40}
    ours, our_lse = run(mixed, **options)
    assert_identical(ours[rows + 40:], alone[1:].flatten(0, 1), "out beside a long one")
    expected = alone_lse[1:].transpose(0, 1).flatten(1)
    assert_identical(our_lse[:, rows + 40:], expected, "lse beside a long one")


# The calls of a serving loop --------------------------------------------------------------------------------

@pytest.mark.parametrize("window", [None, (6, 0)], ids=str)
@pytest.mark.parametrize("page_size", [None, 4])
@pytest.mark.parametrize("chunks", [[30], [1] * 30, [7, 1, 16, 6], [16, 14]], ids=str)
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_prefill_in_chunks(dtype, chunks, page_size, window, device):
    """Chunks of a causal prefill, each appended and attended, give the rows of the whole."""
    q, k, v = (torch.randn(2, 30, heads, 16, dtype=dtype, device=device) for heads in (4, 2, 2))
    caches = cached(device, [0, 0], new=30, dtype=dtype, page_size=page_size)
    caches = {name: caches[name] for name in ("k_cache", "v_cache", "page_table") if name in caches}
    slopes = torch.rand(4, device=device)
    options = {"causal": True, "window": window, "alibi_slopes": slopes}
    outs, lses, start = [], [], 0
    for size in chunks:
        at = slice(start, start + size)
        out, lse = flashattn.decode(q[:, at], **caches, k_new=k[:, at], v_new=v[:, at], cache_seqlens=start,
                                    **options, return_lse=True)
        outs.append(out)
        lses.append(lse)
        start += size
    oracle_out, oracle_lse, _ = reference.forward(q, k, v, **options)
    plain_out, _, _ = reference.forward(q, k, v, **options, dtype=dtype)
    assert_close_2x(torch.cat(outs, 1), oracle_out, plain_out, "out")
    torch.testing.assert_close(torch.cat(lses, 2).double(), oracle_lse, rtol=0, atol=2e-4)


def test_int_cache_seqlens(device):
    for new in (0, 2):
        arguments = cached(device, [11, 11], rows=2, new=new)
        expected = run(arguments, causal=True)
        for ours, tensor in zip(run(arguments | {"cache_seqlens": 11}, causal=True), expected):
            assert_identical(ours, tensor, "int")
        check_decode(**arguments | {"cache_seqlens": 11}, causal=True)
    check_decode(**packed(arguments, [0, 2, 3]) | {"cache_seqlens": 5})
    check_decode(**cached(device, [4, 4]) | {"cache_seqlens": 0})


@pytest.mark.parametrize("new", [0, 2])
@pytest.mark.parametrize("layout", DISTINCT)
def test_out(layout, new, device):
    arguments = cached(device, [30, 0], rows=2, new=new)
    expected, expected_lse = run(arguments, causal=True)
    out = laid_out(torch.full_like(expected, 7), layout)
    gaps = around(out)
    ours, lse = run(arguments, causal=True, out=out)
    assert ours.data_ptr() == out.data_ptr()
    assert_identical(out, expected, "out")
    assert_identical(lse, expected_lse, "lse")
    assert_identical(around(out), gaps, "memory around out")


def test_out_with_packed_queries(device):
    """Rows of out in no sequence keep what they hold."""
    arguments = packed(cached(device, [30, 0, 5], rows=3), [2, 5, 6, 8])
    out = torch.full((10, 4, 16), 7.0, device=device)
    run(arguments, out=out)
    expected, _ = run(arguments)
    assert_identical(out[2:8], expected[2:8], "out")
    assert (out[:2] == 7).all() and (out[8:] == 7).all()


def test_return_lse(device):
    arguments = cached(device, [30, 8], rows=2)
    out, lse = flashattn.decode(**arguments, return_lse=True)
    assert_identical(flashattn.decode(**arguments), out, "out")
    assert lse.shape == (2, 4, 2) and lse.dtype == F32


@pytest.mark.parametrize("name", ["q", "k_cache", "v_cache", "k_new", "v_new"])
def test_inference_only(name, device):
    """A gradient through decode is an error, never a silent zero."""
    arguments = cached(device, [30, 8], rows=2, new=2)
    if name.endswith("cache"):
        arguments = {n: t for n, t in arguments.items() if n not in ("k_new", "v_new")}
    expected, _ = run(arguments)
    arguments[name] = arguments[name].clone().requires_grad_()
    out, lse = flashattn.decode(**arguments, return_lse=True)
    assert_identical(out, expected, "out")
    for result in (out, lse):
        with pytest.raises(NotImplementedError, match="decode.*inference"):
            result.sum().backward(retain_graph=True)
    with torch.no_grad():
        assert not flashattn.decode(**arguments).requires_grad
    with torch.inference_mode():
        assert_identical(flashattn.decode(**arguments), expected, "out")


def test_no_gradient_wanted(device):
    assert not flashattn.decode(**cached(device, [3])).requires_grad
