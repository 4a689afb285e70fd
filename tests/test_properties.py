"""Drawn shapes, strides, options and lengths against the oracle, by the accuracy rule of compare.py.

What is drawn is a small description (sizes, names of layouts, options), so that a failure prints what repeats
it; the numbers in the tensors come from the drawn seed.  Memory that must not be read holds NaN.
"""

import math

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cases import DTYPES
from compare import check_backward, check_decode, check_forward
from layouts import DISTINCT, REPEATED, laid_out

CI = settings(max_examples=500, derandomize=True, deadline=None, database=None,
              suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])

F32 = torch.float32
# Mostly short, sometimes at the edges of the tiles.
LENGTHS = st.one_of(st.integers(0, 12), st.sampled_from([15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129]))
DIMS = st.one_of(st.integers(1, 20), st.sampled_from([24, 31, 32, 33, 40, 64]))
HEADS = st.tuples(st.integers(1, 3), st.sampled_from([1, 1, 2, 3, 4]))  # KV heads, query heads of each
SIDES = st.one_of(st.none(), st.just(-1), st.integers(0, 10))
LAYOUTS = st.sampled_from(DISTINCT + REPEATED)
# Equal keys or equal values make gradients that are exactly 0, so that only rounding would be compared.
TRAINED_LAYOUTS = LAYOUTS.filter(lambda layout: layout != "one row")


@st.composite
def attention(draw, kv_layouts=LAYOUTS) -> dict:
    """A description of a call of flashattn.forward."""
    packed, batch = draw(st.booleans()), draw(st.integers(0, 3))
    lengths = st.lists(LENGTHS, min_size=batch, max_size=batch)
    dim, broadcast = draw(DIMS), st.none() | st.tuples(st.booleans(), st.booleans(), st.booleans())
    return {
        "seed": draw(st.integers(0, 2**16)),
        "dtype": draw(st.sampled_from(DTYPES)),
        "packed": packed,
        # packed: the sequences lie one after another, with rows of no sequence before and after
        "len_q": draw(lengths) if packed else [draw(LENGTHS)] * batch,
        "len_k": draw(lengths) if packed else [draw(LENGTHS)] * batch,
        "margins": draw(st.tuples(st.integers(0, 2), st.integers(0, 2))),
        "heads": draw(HEADS),
        "dims": (dim, draw(st.just(dim) | DIMS)),
        "layouts": draw(st.tuples(LAYOUTS, kv_layouts, kv_layouts)),
        "bias": draw(broadcast), "bias is float32": draw(st.booleans()),
        "mask": draw(broadcast),
        "alibi": draw(st.sampled_from([None, "head", "batch and head"])),
        "sink": draw(st.sampled_from([None, "dtype of q", "float32"])),
        "used": draw(st.tuples(st.booleans(), st.booleans())),
        "max_seqlen": draw(st.booleans()),
        "options": {
            "causal": draw(st.booleans()),
            "window": draw(st.none() | st.tuples(SIDES, SIDES)),
            "scale": draw(st.sampled_from([None, 0.1, -0.15, 0.0])),
            "softcap": draw(st.sampled_from([0.0, 0.0, 1.5])),
            "dropout_p": draw(st.sampled_from([0.0, 0.0, 0.25])),
            "deterministic": draw(st.booleans()),
            "batch_invariant": draw(st.booleans()),
            "return_max_logit": draw(st.booleans()),
        },
    }


def randn(*shape: int, dtype: torch.dtype = F32) -> torch.Tensor:
    return torch.randn(shape, dtype=F32).to(dtype)


def ints(values) -> torch.Tensor:
    return torch.tensor(list(values), dtype=torch.int32)


def slopes(case: dict, batch: int, heads: int) -> torch.Tensor:
    """Small: the backward recomputes weights from the LSE, whose own rounding grows with its magnitude."""
    return 0.05 * randn(*([batch] if case["alibi"] == "batch and head" else []), heads)


def build(case: dict) -> tuple[list[torch.Tensor], dict]:
    """(q, k, v) and the options that the description stands for."""
    torch.manual_seed(case["seed"])
    dtype, (kv_heads, ratio), (dim, dim_v) = case["dtype"], case["heads"], case["dims"]
    heads, batch, (before, after) = kv_heads * ratio, len(case["len_q"]), case["margins"]
    options, tensors, longest = dict(case["options"]), [], []
    layouts = iter(case["layouts"])
    for side, n_heads, widths in (("q", heads, [dim]), ("k", kv_heads, [dim, dim_v])):
        lengths = case[f"len_{side}"]
        longest.append(max(lengths, default=0))
        counted = list(lengths)
        if case["used"][side == "k"]:
            counted = [int(torch.randint(0, n + 1, ())) for n in lengths]
            options[f"seqused_{side}"] = ints(counted)
        if case["packed"]:
            offsets = [before + sum(lengths[:b]) for b in range(batch + 1)]
            options[f"cu_seqlens_{side}"] = ints(offsets)
            unread = torch.ones(before + sum(lengths) + after, dtype=torch.bool)
            for start, n in zip(offsets, counted):
                unread[start: start + n] = False
            on_cuda = torch.get_default_device().type == "cuda"     # which asks for it
            if case["max_seqlen"] or case["bias"] or case["mask"] or on_cuda:
                longest[-1] += case["max_seqlen"]             # it may be larger than the longest sequence
                options[f"max_seqlen_{side}"] = longest[-1]
        else:
            unread = torch.arange(longest[-1]) >= torch.tensor(counted, dtype=torch.long)[:, None]
        for width in widths:
            t, layout = randn(*unread.shape, n_heads, width, dtype=dtype), next(layouts)
            if layout in DISTINCT:                            # a repeated slice is read somewhere
                t[unread] = math.nan
            tensors.append(laid_out(t, layout))

    def score_shape(broadcast):
        return [1 if b else n for b, n in zip(broadcast, (batch, heads, longest[0]))] + [longest[1]]

    if case["bias"]:
        options["bias"] = randn(*score_shape(case["bias"]), dtype=F32 if case["bias is float32"] else dtype)
    if case["mask"]:
        options["mask"] = randn(*score_shape(case["mask"])) > -0.5
    if case["alibi"]:
        options["alibi_slopes"] = slopes(case, batch, heads)
    if case["sink"]:
        options["sink"] = randn(heads, dtype=F32 if case["sink"] == "float32" else dtype)
    if options["dropout_p"]:
        options["seed"] = case["seed"] << 30
    return tensors, options


@CI
@given(attention())
def test_forward(device, case):
    with device:
        tensors, options = build(case)
    check_forward(*tensors, **options)


@CI
@given(attention(TRAINED_LAYOUTS), st.booleans())
def test_backward(device, case, lse_grad):
    with device:
        tensors, options = build(case)
    check_backward(*tensors, **options, lse_grad=lse_grad)


@st.composite
def decoding(draw) -> dict:
    """A description of a call of flashattn.decode."""
    batch, dim, packed = draw(st.integers(0, 3)), draw(DIMS), draw(st.booleans())
    rows = st.one_of(st.integers(0, 5), st.sampled_from([15, 16, 17, 33]))
    keys = st.one_of(LENGTHS, st.sampled_from([200, 256, 257, 400]))  # long enough for several splits
    return {
        "seed": draw(st.integers(0, 2**16)),
        "dtype": draw(st.sampled_from(DTYPES)),
        "lengths": draw(st.lists(keys, min_size=batch, max_size=batch)),
        "int length": draw(st.booleans()),
        "packed": packed,
        "rows": draw(st.lists(rows, min_size=batch, max_size=batch)) if packed else [draw(rows)] * batch,
        "margins": draw(st.tuples(st.integers(0, 2), st.integers(0, 2))),
        "new": draw(st.none() | st.integers(0, 4)),           # rows of k_new; as many as q has, if packed
        "spare": draw(st.integers(0, 20)),
        "page_size": draw(st.sampled_from([None, None, 1, 2, 4, 16])),
        "indexed": draw(st.booleans()),
        "leftpad": draw(st.booleans()),
        "heads": draw(HEADS),
        "dims": (dim, draw(st.just(dim) | DIMS)),
        "mla": draw(st.booleans()),
        "rotary": draw(st.none() | st.integers(1, 10)),       # pairs of columns
        "rotary is float32": draw(st.booleans()),
        "layouts": draw(st.tuples(*[LAYOUTS] * 5)),
        "alibi": draw(st.sampled_from([None, "head", "batch and head"])),
        "sink": draw(st.sampled_from([None, "dtype of q", "float32"])),
        "out": draw(st.none() | st.sampled_from(DISTINCT)),
        "options": {
            "causal": draw(st.booleans()),
            "window": draw(st.none() | st.tuples(SIDES, SIDES)),
            "scale": draw(st.sampled_from([None, 0.1, -0.15, 0.0])),
            "softcap": draw(st.sampled_from([0.0, 0.0, 1.5])),
            "rotary_interleaved": draw(st.booleans()),
            **draw(st.fixed_dictionaries({"num_splits": st.sampled_from([0, 1, 2, 3, 9])})
                   | st.just({"batch_invariant": True})),
        },
    }


def build_decode(case: dict) -> tuple[tuple[torch.Tensor, ...], dict]:
    """(q, k_cache, v_cache) and the options that the description stands for."""
    torch.manual_seed(case["seed"])
    dtype, (kv_heads, ratio), (dim, dim_v) = case["dtype"], case["heads"], case["dims"]
    dim_v = min(dim, dim_v) if case["mla"] else dim_v
    heads, batch, rows, (before, after) = kv_heads * ratio, len(case["rows"]), case["rows"], case["margins"]
    lengths = case["lengths"][:1] * batch if case["int length"] else case["lengths"]
    appends, options, layouts = case["new"] is not None, dict(case["options"]), iter(case["layouts"])
    fresh = [(n if case["packed"] else case["new"]) if appends else 0 for n in rows]
    total = [length + n for length, n in zip(lengths, fresh)]
    capacity, page_size = max(total, default=0) + case["spare"], case["page_size"]

    options["cache_seqlens"] = lengths[0] if case["int length"] and batch else ints(lengths)
    pads = [int(torch.randint(0, n + 1, ())) if case["leftpad"] else 0 for n in lengths]
    if case["leftpad"]:
        options["leftpad"] = ints(pads)
    if page_size:
        width = -(-capacity // page_size)
        shape = (batch * width + 1, page_size)
        table = torch.randperm(shape[0])[: batch * width].view(batch, width).int()
        for b in range(batch):
            table[b, -(-total[b] // page_size):] = -1
        options["page_table"] = table
        slots = [(table[b].long().repeat_interleave(page_size), torch.arange(width * page_size) % page_size)
                 for b in range(batch)]
    else:
        index = torch.randperm(batch + 1)[:batch] if case["indexed"] else torch.arange(batch)
        if case["indexed"]:
            options["cache_batch_idx"] = index.int()
        shape = (batch + case["indexed"], capacity)
        slots = [(index[b].expand(capacity), torch.arange(capacity)) for b in range(batch)]
    # Appended caches have a place for every element, and check_decode makes its own copies of them.
    caches = []
    for columns in [dim] if case["mla"] else [dim, dim_v]:
        t = torch.full((*shape, kv_heads, columns), math.nan, dtype=dtype)
        for b in range(batch):
            at = tuple(index[pads[b]: lengths[b]] for index in slots[b])
            # Values around 1: a mean of hundreds of them does not cancel to the size of its rounding error.
            t[at] = randn(len(at[0]), kv_heads, columns, dtype=dtype) + len(caches)
        layout = next(layouts)
        caches.append(laid_out(t, layout if layout in DISTINCT else "contiguous"))
    if case["mla"]:
        caches.append(None)
        options["v_head_dim"] = dim_v

    def query_like(count: list[int], n_heads: int, columns: int) -> torch.Tensor:
        if not case["packed"]:
            rows_of_each = count[0] if count else 1
            return laid_out(randn(batch, rows_of_each, n_heads, columns, dtype=dtype), next(layouts))
        t, layout = randn(before + sum(count) + after, n_heads, columns, dtype=dtype), next(layouts)
        if layout in DISTINCT:
            t[:before], t[before + sum(count):] = math.nan, math.nan
        return laid_out(t, layout)

    if case["packed"]:
        options["cu_seqlens_q"] = ints(before + sum(rows[:b]) for b in range(batch + 1))
        if options["cu_seqlens_q"].is_cuda:
            options["max_seqlen_q"] = max(rows, default=0)
    q = query_like(rows, heads, dim)
    if appends:
        options["k_new"] = query_like(fresh, kv_heads, dim)
        options["v_new"] = None if case["mla"] else query_like(fresh, kv_heads, dim_v)
    if case["rotary"] and 2 * case["rotary"] <= dim and all(n <= keys for n, keys in zip(rows, total)):
        angles = torch.randn(max(total, default=0) + 1, case["rotary"], dtype=torch.float64) * 3
        table_dtype = F32 if case["rotary is float32"] and dtype != torch.float64 else dtype
        options |= {"rotary_cos": angles.cos().to(table_dtype), "rotary_sin": angles.sin().to(table_dtype)}
    if case["alibi"]:
        options["alibi_slopes"] = slopes(case, batch, heads)
    if case["sink"]:
        options["sink"] = randn(heads, dtype=F32 if case["sink"] == "float32" else dtype)
    if case["out"] and not case["packed"]:                    # packed, it keeps rows that the oracle has as 0
        options["out"] = laid_out(torch.full((*q.shape[:-1], dim_v), math.nan, dtype=dtype), case["out"])
    return (q, *caches), options


@CI
@given(decoding())
def test_decode(device, case):
    with device:
        tensors, options = build_decode(case)
    check_decode(*tensors, **options)
