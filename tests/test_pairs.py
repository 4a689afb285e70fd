"""Every pair of options at once: each case is right, forwards and backwards, or refused by naming an option.

A pairwise covering array holds each pair of values of each two factors in at least one case.  Faults that
need three options at once are met by chance: the arrays of several seeds differ in everything but the pairs.
"""

import itertools
import random

import torch

from cases import dense, ints, packed
from compare import check_backward

BATCH = 2
FACTORS = {
    "causal": (False, True),
    "window": (None, (17, 9), (20, None), (-1, 5)),
    "scale": (None, 0.2),
    "softcap": (0.0, 2.0),
    "alibi": (None, "H", "B H"),
    "bias": (None, "B H Sq Sk", "1 H Sq Sk", "B 1 1 Sk", "1 1 Sq Sk"),
    "bias dtype": ("of q", "float32"),
    "mask": (None, "B H Sq Sk", "B 1 1 Sk", "1 1 Sq Sk"),
    "sink": (None, "of q", "float32"),
    "dropout_p": (0.0, 0.3),
    "heads": ((2, 2), (4, 2), (6, 1)),
    "layout": ("dense", "packed"),
    "seqused": (None, "k", "q k"),
    "lengths": ((70, 130), (130, 70), (1, 65), (64, 64)),
    "dtype": (torch.float32, torch.bfloat16, torch.float16, torch.float64),
    "dims": ((16, 16), (64, 64), (40, 72), (128, 24)),
    "lse_grad": (False, True),
    "deterministic": (False, True),
    "batch_invariant": (False, True),
    "return_max_logit": (False, True),
}


def covering_array(factors: dict[str, tuple], seed: int) -> list[dict]:
    """Greedy: a case starts from a pair that is missing and adds the values that cover most missing pairs."""
    draw = random.Random(seed)
    missing = [((a, x), (b, y)) for a, b in itertools.combinations(factors, 2)
               for x in factors[a] for y in factors[b]]
    draw.shuffle(missing)
    missing = dict.fromkeys(map(frozenset, missing))                     # a set that keeps its order
    cases = []
    while missing:
        case = dict(next(iter(missing)))
        for name in draw.sample(list(factors), len(factors)):
            if name not in case:
                case[name] = max(draw.sample(factors[name], len(factors[name])), key=lambda value: sum(
                    frozenset(((name, value), other)) in missing for other in case.items()))
        for pair in itertools.combinations(case.items(), 2):
            missing.pop(frozenset(pair), None)
        cases.append({name: case[name] for name in factors})
    return cases


CASES = {f"{seed}-{number}": case for seed in range(4)
         for number, case in enumerate(covering_array(FACTORS, seed))}
# CUDA kernels are one for each range of head dims and have large tiles.
CUDA_FACTORS = FACTORS | {
    "dims": ((8, 8), (40, 72), (63, 65), (64, 64), (80, 80), (96, 96), (128, 128), (128, 24), (192, 128),
             (192, 192), (256, 256), (320, 512)),
    "lengths": ((1, 65), (64, 64), (70, 130), (130, 70), (129, 257), (255, 127), (17, 1025), (513, 300)),
    "dtype": (torch.float32, torch.bfloat16, torch.float16),
}


def pytest_generate_tests(metafunc):
    if "case" in metafunc.fixturenames:
        on_cpu = metafunc.config.getoption("--device") == "cpu"
        cases = CASES | ({} if on_cpu else {
            f"cuda-{number}": case for number, case in enumerate(covering_array(CUDA_FACTORS, 0))})
        metafunc.parametrize("case", cases.values(), ids=cases)


def test_every_pair_has_a_case():
    for (a, a_values), (b, b_values) in itertools.combinations(FACTORS.items(), 2):
        held = {(case[a], case[b]) for name, case in CASES.items() if name.startswith("0-")}
        assert held == set(itertools.product(a_values, b_values)), f"{a} and {b}"


def test_case(device, case):
    dtype, (len_q, len_k), heads = case["dtype"], case["lengths"], case["heads"]
    options = {name: case[name] for name in (
        "causal", "window", "scale", "softcap", "dropout_p", "lse_grad", "deterministic", "batch_invariant",
        "return_max_logit")}
    if case["layout"] == "dense":
        q, k, v = dense(device, dtype, batch=BATCH, len_q=len_q, len_k=len_k, heads=heads, dims=case["dims"])
        lens_q, lens_k = [len_q] * BATCH, [len_k] * BATCH
    else:
        lens_q, lens_k = (len_q, len_q // 2), (len_k // 3, len_k)
        q, k, v, layout = packed(device, lens_q, lens_k, dtype, heads=heads, dims=case["dims"])
        options |= layout

    def matrix(shape, dtype):
        sizes = {"1": 1, "B": BATCH, "H": heads[0], "Sq": len_q, "Sk": len_k}
        return torch.randn([sizes[size] for size in shape.split()], dtype=dtype, device=device)

    def dtype_of(name):
        return dtype if name == "of q" else torch.float32

    if case["alibi"]:
        options["alibi_slopes"] = matrix(case["alibi"], torch.float32).abs() / 4
    if case["bias"]:
        options["bias"] = matrix(case["bias"], dtype_of(case["bias dtype"]))
    if case["mask"]:
        options["mask"] = matrix(case["mask"], torch.float32) > -1
    if case["sink"]:
        options["sink"] = matrix("H", dtype_of(case["sink"]))
    if case["dropout_p"]:
        options["seed"] = 5
    for side, lengths in (("q", lens_q), ("k", lens_k)):
        if case["seqused"] and side in case["seqused"]:
            options[f"seqused_{side}"] = ints(device, lengths[0], lengths[1] * 2 // 3)
    try:
        check_backward(q, k, v, **options)
    except NotImplementedError as refusal:
        assert any(name in str(refusal) for name in options), str(refusal)
