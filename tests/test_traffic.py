"""flashattn.traffic against a count of every tensor that each library call and each tiled pass touches."""

import itertools

import pytest
import torch

from flashattn.traffic import traffic


def counted(sequences, q_heads, kv_heads, dim, dim_v, item, statistic, visible):
    """Bytes of standard and tiled forward, standard and tiled backward, from lists of touched tensors."""
    totals = [0, 0, 0, 0]
    for len_q, len_k in sequences:
        pairs = [(i, j) for i in range(len_q) for j in range(len_k) if visible(i, j, len_q, len_k)]
        def size(rows, keys):
            return {
                "Q": item * q_heads * rows * dim, "O": item * q_heads * rows * dim_v,
                "K": item * kv_heads * keys * dim, "V": item * kv_heads * keys * dim_v,
                "S": item * q_heads * rows * keys, "L": statistic * q_heads * rows}
        every, seen = size(len_q, len_k), size(len({i for i, _ in pairs}), len({j for _, j in pairs}))
        # Letters are sizes: dQ has the size of Q, dO of O, P, dP and dS of S, delta of the LSE (L).
        standard_forward = ("Q", "K", "S"), ("S", "S"), ("S", "V", "O")
        standard_backward = (
            ("O", "V", "S"), ("S", "O", "V"), ("S", "S", "S"), ("S", "K", "Q"), ("S", "Q", "K"))
        totals[0] += sum(every[x] for call in standard_forward for x in call)
        totals[1] += sum(seen[x] for x in "QKV") + sum(every[x] for x in "OL")
        totals[2] += sum(every[x] for call in standard_backward for x in call)
        totals[3] += sum(seen[x] for x in "OOL" "QKVOLL") + sum(every[x] for x in "QKV")
    return tuple(totals)


def moved(t):
    return t.standard_forward, t.tiled_forward, t.standard_backward, t.tiled_backward


@pytest.mark.parametrize("dim", [64, 128])
def test_headline_figures(dim):
    t = traffic((1, 8192, 1, dim), dtype=torch.float16)
    assert t.score_matrix == 2 * 8192**2 == 134_217_728
    assert t.standard_forward == 4 * 134_217_728 + 4 * 8192 * dim * 2      # 536.9 MB for S and P
    assert t.tiled_forward == 4 * 8192 * dim * 2 + 4 * 8192


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, (0, 0), (2, None), (None, 1), (3, 2), (0, -1)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_dense_counts(causal, window, dtype):
    left, right = (None if side in (None, -1) else side for side in window or (None, None))

    def visible(i, j, len_q, len_k):
        p = i + len_k - len_q
        return ((not causal or j <= p) and (left is None or j >= p - left)
                and (right is None or j <= p + right))

    for len_q, len_k in itertools.product((0, 1, 4, 9, 17), repeat=2):
        q, k, v = (torch.empty(shape, dtype=dtype, device="meta")
                   for shape in ((3, len_q, 6, 5), (3, len_k, 2, 5), (3, len_k, 2, 7)))
        got = traffic(q, k, v, causal=causal, window=window)
        statistic = 8 if dtype == torch.float64 else 4
        expected = counted([(len_q, len_k)] * 3, 6, 2, 5, 7, dtype.itemsize, statistic, visible)
        assert moved(got) == expected, (len_q, len_k)
        assert got.score_matrix == 3 * 6 * len_q * len_k * dtype.itemsize


def test_packed_counts_are_the_sum_of_the_sequences():
    cu_q, cu_k = torch.tensor([1, 4, 4, 13], dtype=torch.int32), [0, 2, 9, 14]
    got = traffic((20, 4, 8), (15, 1, 8), (15, 1, 16), dtype=torch.bfloat16, causal=True,
                  cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)
    parts = [traffic((1, n, 4, 8), (1, m, 1, 8), (1, m, 1, 16), dtype=torch.bfloat16, causal=True)
             for n, m in ((3, 2), (0, 7), (9, 5))]
    assert moved(got) == tuple(map(sum, zip(*map(moved, parts))))
    assert got.score_matrix == sum(p.score_matrix for p in parts)


def test_shapes_and_tensors_agree_and_the_table_names_the_figures():
    shape = (2, 100, 4, 32)
    tensor = torch.zeros(shape, dtype=torch.float16)
    expected = traffic(shape, dtype=torch.float16)
    assert traffic(shape) == traffic(tensor) == traffic(tensor, tensor, tensor) == expected
    text = str(traffic((1, 8192, 1, 64)))
    assert "134.2 MB" in text and "541.1 MB" in text and "forward" in text and "backward" in text
    assert "-" in str(traffic((0, 8, 1, 64)))


@pytest.mark.parametrize("error, arguments, options, word", [
    (ValueError, ((2, 8, 4),), {}, "q of shape"),
    (ValueError, ((2, 8, 4, 16), (2, 8, 3, 16)), {}, "multiple"),
    (ValueError, ((2, 8, 4, 16), (2, 8, 0, 16)), {}, "multiple"),
    (ValueError, ((2, 8, 4, 16), (3, 8, 4, 16)), {}, r"\(B, Sk, Hk, D\)"),
    (ValueError, ((2, 8, 4, 16), (2, 8, 4, 8)), {}, r"\(B, Sk, Hk, D\)"),
    (ValueError, ((2, 8, 4, 16), (2, 8, 4, 16), (2, 9, 4, 16)), {}, r"\(B, Sk, Hk, D\)"),
    (ValueError, ((2, 8, 4, 16),), {"window": (-2, 0)}, "window"),
    (TypeError, ((2, 8, 4, 16),), {"dtype": torch.int32}, "dtype"),
    (ValueError, ((8, 4, 16),), {"cu_seqlens_q": [0, 8]}, "both or neither"),
    (ValueError, ((8, 4, 16),), {"cu_seqlens_q": [0, 8], "cu_seqlens_k": [0, 9]}, "cu_seqlens_k"),
    (ValueError, ((8, 4, 16),), {"cu_seqlens_q": [0, 5, 3], "cu_seqlens_k": [0, 4, 8]}, "cu_seqlens_q"),
    (ValueError, ((8, 4, 16),), {"cu_seqlens_q": [0, 8], "cu_seqlens_k": [0, 4, 8]}, "entries"),
])
def test_errors_name_the_argument(error, arguments, options, word):
    with pytest.raises(error, match=word):
        traffic(*arguments, **options)
