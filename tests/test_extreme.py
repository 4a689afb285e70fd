"""The forward where an online softmax can go wrong: logits far from 0, and keys that come late or not at all.

The Hopper kernels visit the keys from last to first: a key at a low position comes late.  While no largest
logit of a warp is negative they compare integers, of which each block's logits are the bits
(csrc/sm90/softmax.cuh).
"""

import pytest
import torch

import flashattn
from cases import dense
from compare import check_forward

SCALE = 0.125
LN_2 = 0.6931471805599453
OUTLIERS = (0, 1, 15, 16, 47, 48, 63, 64, 79, 80, 95, 96, 127, 128, 129)

each_dtype = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
each_dim = pytest.mark.parametrize("dims", [(64, 64), (128, 128), (256, 256), (192, 128)], ids=str)
each_range = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    """More would mostly wait for each other: on the CPU the tensors are small."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def sizes(device) -> list[tuple[int, int]]:
    """(Sq, Sk); on a card for kernels of few and of many queries.  Causal, query 0 sees Sk - Sq + 1 keys."""
    return [(24, 140)] if device.type == "cpu" else [(100, 500), (300, 700)]


def tensors(device, dtype, len_q, len_k, dims):
    heads = (2, 1) if device.type == "cpu" else (4, 2)
    return dense(device, dtype, batch=1, len_q=len_q, len_k=len_k, heads=heads, dims=dims)


def check(q, k, v, **options):
    """check_forward at that scale, with the largest logit and without; on the CPU it makes no difference."""
    for asked in (True,) if q.device.type == "cpu" else (True, False):
        results = check_forward(q, k, v, **{"scale": SCALE} | options, return_max_logit=asked)
    return results[:2]


def shift(q, k, logit, keys=slice(None)):
    """Adds this logit at these keys, by the last column: 16 * logit / 2 * SCALE."""
    q[..., -1] = 16
    k[:, keys, :, -1] = logit / 2


# ---- large logits, and single large ones ----

@each_dtype
@each_dim
@each_range
@pytest.mark.parametrize("factor", [6, 20, 60])
def test_large_queries(device, dtype, dims, causal, factor):
    for lengths in sizes(device):
        q, k, v = tensors(device, dtype, *lengths, dims)
        check(q * factor, k, v, causal=causal, scale=None)


def give_each_query_an_outlier(q, k, gap):
    """Each query gets one key whose logit is about `gap` above all others.

    The first columns belong to one such key each.  A query has gap / 2 in the column of its key and 0 in
    those of the others, the key has 16 in its own column and 0 in the others, and all other keys have 0: the
    product, times SCALE, is the gap.  The rest of the columns gives ordinary logits.  Queries of even heads
    take the keys in turn, so that the 16 rows of a warp differ; those of odd heads 16 queries at a time, so
    that warps differ.
    """
    len_k = k.shape[1]
    keys = torch.tensor([*OUTLIERS, len_k // 2, len_k - 2, len_k - 1], device=k.device)
    count, query = len(keys), torch.arange(q.shape[1], device=q.device)
    own = torch.stack([query % count, query // 16 % count], dim=1)[:, torch.arange(q.shape[2]) % 2]
    q[..., :count] = gap / 2 * torch.nn.functional.one_hot(own, count)
    k[..., :count] = 0
    k[:, keys, :, :count] = 16 * torch.eye(count, dtype=k.dtype, device=k.device)[:, None]


@each_dtype
@each_dim
@each_range
@pytest.mark.parametrize("gap", [9, 40, 150, 1000])
def test_one_key_above_all_others(device, dtype, dims, causal, gap):
    """At every place in its tile."""
    for lengths in sizes(device):
        q, k, v = tensors(device, dtype, *lengths, dims)
        give_each_query_an_outlier(q, k, gap)
        _, lse = check(q, k, v, causal=causal)
        assert (lse.amax(-1) > gap - 8).all()


# ---- all logits far from 0 ----

@each_dtype
@each_dim
@each_range
@pytest.mark.parametrize("logit", [-9984, 9984])
def test_all_logits_far_from_zero(device, dtype, dims, causal, logit):
    """Plain code in 16 bits loses the differences between such logits, so that the rule says little; but the
    results are nearly those of logits around 0."""
    for lengths in sizes(device):
        q, k, v = tensors(device, dtype, *lengths, dims)
        shift(q, k, 0)
        around_zero = flashattn.forward(q, k, v, causal=causal, scale=SCALE)
        shift(q, k, logit)
        out, _ = check(q, k, v, causal=causal)
        assert (out - around_zero).abs().max() < 0.05


@each_dtype
@each_dim
@each_range
@pytest.mark.parametrize("logit", [-9984, 9984])
def test_one_key_around_zero(device, dtype, dims, causal, logit):
    """It has the only weight, or none.  All queries see it."""
    for len_q, len_k in sizes(device):
        for key in (0, len_k - len_q) if causal else (0, len_k - len_q, len_k - 1):
            q, k, v = tensors(device, dtype, len_q, len_k, dims)
            shift(q, k, logit)
            shift(q, k, 0, key)
            check(q, k, v, causal=causal)


@each_dtype
@each_dim
@pytest.mark.parametrize("exponent", [-300, -60, -28, -20, -10, 10, 14, 20, 60, 240])
def test_the_reference_moves(device, dtype, dims, exponent):
    """All logits are about `exponent`, in powers of two: relative to 0, weights would be 2^240, infinite in
    float32, or 2^-300, which is 0 there as 2^-28 is in float16.  Those below 0 take the path for negative
    largest logits."""
    for lengths in sizes(device):
        q, k, v = tensors(device, dtype, *lengths, dims)
        q /= 4
        shift(q, k, 0)
        around_zero = flashattn.forward(q, k, v, scale=SCALE)
        shift(q, k, exponent * LN_2)
        out, lse = check(q, k, v)
        assert out.isfinite().all() and lse.isfinite().all()
        assert (out - around_zero).abs().max() < 2 * torch.finfo(dtype).eps * (1 + around_zero.abs().max())


@each_dtype
@pytest.mark.parametrize("dims", [(40, 40), (72, 72), (96, 96), (192, 192), (40, 72)], ids=str)
@pytest.mark.parametrize("exponent", [-300, 240])
def test_the_reference_moves_at_other_head_dims(device, dtype, dims, exponent):
    """Each width of a tile is another kernel."""
    test_the_reference_moves(device, dtype, dims, exponent)


# ---- the first tile of keys: hidden or different ----

RANGES = [  # Sq, Sk, options
    (75, 50, {"causal": True}), (80, 1, {"causal": True}), (65, 64, {"causal": True}),
    (40, 129, {"causal": True}), (33, 145, {"causal": True}), (20, 17, {}), (20, 81, {}),
    (70, 70, {"window": (0, 0)}), (50, 81, {"window": (3, 0)}), (81, 81, {"window": (0, 5)}),
    (90, 100, {"window": (40, 20)}), (90, 50, {"window": (9, 5)}), (40, 100, {"window": (None, 5)}),
    (60, 90, {"window": (20, None)}), (50, 130, {"causal": True, "window": (40, None)})]
LARGE_RANGES = [
    (500, 300, {"causal": True}), (700, 33, {"causal": True}), (300, 777, {"causal": True}), (300, 513, {}),
    (600, 600, {"window": (0, 0)}), (600, 600, {"window": (129, 0)}), (600, 900, {"window": (0, 200)}),
    (400, 600, {"window": (None, 50)}), (600, 400, {"window": (100, 100)}), (500, 500, {"window": (300, 17)}),
    (520, 1000, {"causal": True, "window": (64, None)})]


@each_dtype
@each_dim
@pytest.mark.parametrize("factor", [1, 20])
def test_rows_that_do_not_see_the_first_tile(device, dtype, dims, factor):
    """The last keys are hidden from some queries of a tile, everything from others."""
    for len_q, len_k, options in RANGES if device.type == "cpu" else RANGES + LARGE_RANGES:
        q, k, v = tensors(device, dtype, len_q, len_k, dims)
        check(q * factor, k, v, **options, scale=None)


@each_dtype
@each_dim
@each_range
@pytest.mark.parametrize("logit", [-5000, -300, -60, -30, 30, 300])
def test_the_last_keys_are_different(device, dtype, dims, causal, logit):
    """More than a tile of them, far below the others or far above; each query sees others too."""
    for len_q, len_k in sizes(device):
        q, k, v = tensors(device, dtype, len_q, len_k, dims)
        shift(q, k, 0)
        shift(q, k, logit, slice(-min(len_k // 2, 200), None))
        check(q, k, v, causal=causal)


# ---- options that change logits ----

@each_dtype
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (256, 256)], ids=str)
@pytest.mark.parametrize("softcap", [0.5, 5.0, 30.0, 50.0, 200.0])
def test_softcap(device, dtype, dims, softcap):
    """The products are small or huge, around 0 or all of one sign.

    So the Hopper kernels use each of their ways to compute tanh (SoftcapPolynomial in csrc/sm90/softmax.cuh,
    its bounds in csrc/sm90/launch.cuh).  At the reference 0 the near polynomial serves softcaps 50 and 200,
    the far one 30, none 0.5 and 5; at softcap 50 and products around 25 the far one follows, around 400 none
    does.  Where all products of a row are negative, neither may serve: their weights count, but lie outside
    its interval.
    """
    lengths = sizes(device)[-1]
    for logit in (-400, -40, -25, -8, 0, 8, 25, 40, 400):
        for factor, causal in ((1, False), (20, True)):
            q, k, v = tensors(device, dtype, *lengths, dims)
            shift(q.mul_(factor), k, logit)
            check(q, k, v, causal=causal, softcap=softcap)


@each_dtype
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (256, 256)], ids=str)
@pytest.mark.parametrize("softcap", [0.0, 30.0])
def test_alibi(device, dtype, dims, softcap):
    """A negative slope makes each tile of keys outweigh those before it."""
    lengths = sizes(device)[-1]
    for slope in (0.01, 1.0, 30.0, 300.0, -0.05, -1.0):
        for causal in (False, True):
            q, k, v = tensors(device, dtype, *lengths, dims)
            slopes = torch.full((q.shape[2],), slope, device=device)
            check(q, k, v, causal=causal, softcap=softcap, alibi_slopes=slopes)


@each_dtype
@pytest.mark.parametrize("dims", [(64, 64), (192, 128)], ids=str)
@each_range
def test_sink(device, dtype, dims, causal):
    """Far below, among and far above the logits."""
    lengths = sizes(device)[-1]
    for logit in (-9984, -150, -10, 0, 10, 150, 9984):
        for sink in (-80, 0, 80) if abs(logit) > 80 else (0, 20, 60):    # no result below 1e-37
            q, k, v = tensors(device, dtype, *lengths, dims)
            shift(q, k, logit)
            check(q, k, v, causal=causal, sink=torch.full((q.shape[2],), sink, device=device, dtype=dtype))


@each_dtype
@each_range
def test_everything_at_once(device, dtype, causal):
    """Large slopes, a low softcap and a sink over outliers."""
    for lengths in sizes(device):
        q, k, v = tensors(device, dtype, *lengths, (128, 128))
        give_each_query_an_outlier(q, k, 150)
        check(q, k, v, causal=causal, softcap=50.0, sink=torch.full((q.shape[2],), 30.0, device=device),
              alibi_slopes=torch.full((q.shape[2],), 0.5, device=device))
