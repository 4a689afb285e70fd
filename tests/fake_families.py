"""Run by test_host.py in a process of its own, because an added family stays: what the dispatcher chooses
where the families of tests/host/fake_families.cpp are built, and then where those of the table are.  Prints
JSON; ``sys.path`` leads to them."""

import importlib
import itertools
import json

import fakes
import torch

import flashattn
from flashattn import _load, dispatch

extension = _load.extension()
try:
    extension.add_family(fakes.stale)
except ImportError as error:
    found = {"stale": str(error)}
before = extension.instances()
extension.add_family(fakes.sm75)
extension.add_family(fakes.sm80)
found["instances"] = [row for row in extension.instances() if row not in before]
found["cuda"] = extension.build_info()["cuda"]
found["device"] = extension.cuda_device(0)
found["families"] = dispatch.families()

CHIPS = {75: 64, 80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}  # KB of shared memory a block may have
found["choices"] = [
    [chip, dtype, head_dim, needs,
     extension.candidates("forward", "cuda", dtype, head_dim, head_dim, needs, chip, kilobytes << 10)]
    for (chip, kilobytes), dtype, head_dim, needs in itertools.product(
        CHIPS.items(), ("float16", "bfloat16", "float32"), (64, 128, 256),
        ([], ["many_queries", "addressing", "max_logit"], ["max_logit", "mask", "scale"]))]
with flashattn.force_family("sm75"):
    found["forced"] = extension.candidates("forward", "cuda", "float16", capability=90,
                                           shared_bytes=227 << 10)
found["decode"] = extension.candidates("decode", "cuda", "float16", capability=90)

extension.add_family(fakes.plain_cpu)
q = torch.randn(2, 4, 2, 16)
odd = torch.randn(2, 4, 2, 20)[..., 1:17]
many = torch.randn(1, 129, 1, 16)
calls = {
    "nothing": ((q, q, q), {}),
    "sink": ((q, q, q), {"sink": torch.zeros(2)}),
    "causal": ((q, q, q), {"causal": True}),
    "left": ((q, q, q), {"window": (3, None)}),
    "right": ((q, q, q), {"window": (None, 0)}),
    "one row": ((q[:1, :1, :1], odd[:1, :1, :1].clone(), q[:1, :1, :1]), {}),
    "128 queries": ((many[:, :128], many, many), {}),
    "129 queries": ((many, q[:1, :, :1], q[:1, :, :1]), {}),
    "softcap": ((q, q, q), {"softcap": 2.0}),
    "alibi_slopes": ((q, q, q), {"alibi_slopes": torch.ones(2)}),
    "bias": ((q, q, q), {"bias": torch.zeros(1, 1, 1, 4)}),
    "mask": ((q, q, q), {"mask": torch.ones(1, 1, 1, 4, dtype=torch.bool)}),
    "dropout": ((q, q, q), {"dropout_p": 0.5}),
    "scale": ((q, q, q), {"scale": -1.0}),
    "D": ((odd[..., :12], odd[..., :12], q), {}),
    "Dv": ((q, q, q[..., :12]), {}),
    "base": ((q, odd, q), {}),
    "strides": ((q, q, torch.randn(2, 4, 2, 18)[..., :16]), {}),
    "one batch": ((q[:1].expand(2, 4, 2, 16), q, q), {}),
    "one row of k": ((q, q[:, :1].expand(2, 4, 2, 16), q), {}),
    "one head of v": ((q, q, q[:, :, :1].expand(2, 4, 2, 16)), {}),
    "two": ((q, q, q), {"mask": torch.ones(1, 1, 1, 4, dtype=torch.bool), "softcap": 2.0, "causal": True}),
    "two of a layout": ((many, many[:, :1].expand(1, 129, 1, 16), many), {}),
}
large_q, large_k = torch.randn(1, 1024, 128, 16), torch.randn(1, 4096, 1, 16)
lengths = torch.tensor([0, 1024], dtype=torch.int32)
found["large"] = {
    name: flashattn.explain(some_q, some_k, some_k, **options).rejected.get("large")
    for name, some_q, some_k, options in (
        ("large", large_q, large_k, {}),
        ("fewer queries", large_q[:, :1023].repeat(1, 1, 2, 1), large_k, {}),
        ("fewer heads", large_q[:, :, :127], large_k, {}),
        ("more batches", large_q[:, :, :64].repeat(2, 1, 1, 1), large_k.repeat(2, 1, 1, 1), {}),
        ("just enough keys", large_q, large_k[:, :2048], {}),
        ("fewer keys", large_q, large_k[:, :2047], {}),
        ("just enough visible", large_q, large_k[:, :2559], {"causal": True}),
        ("fewer visible", large_q, large_k[:, :2558], {"causal": True}),
        ("just enough window", large_q, large_k, {"window": (2047, 0)}),
        ("smaller window", large_q, large_k, {"window": (2046, 0)}),
        ("batch_invariant", large_q, large_k, {"batch_invariant": True}),
        ("packed", large_q[0], large_k[0, :2048], {"cu_seqlens_q": lengths, "cu_seqlens_k": 2 * lengths}))}
with flashattn.force_family("large"):
    found["large"]["forced"] = flashattn.explain(q, q, q).rejected.get("large")
with flashattn.force_family("plain_cpu"):
    found["large"]["family"] = flashattn.explain(q, q, q).rejected.get("large")
state = torch.get_rng_state()
found["calls"] = {name: [flashattn.explain(*tensors, op=op, **options).rejected.get(row) for op, row in (
                      ("forward", "bare"), ("backward", "bare_backward"),
                      ("forward", "plain"), ("backward", "plain_backward"))]
                  for name, (tensors, options) in calls.items()}
found["out"] = flashattn.explain(q, q, q, out=odd).rejected.get("plain")
lse = torch.zeros(2, 2, 4)
found["dout"] = [extension.explain(lambda dout=dout: flashattn.backward(dout, q, q, q, q, lse))[:2]
                 for dout in (odd, q[:, :, :1].expand(2, 4, 2, 16))]
found["max_logit"] = [flashattn.explain(q, q, q, return_max_logit=True).rejected.get(row)
                      for row in ("bare", "plain")]
lengths = torch.tensor([0, 3, 8], dtype=torch.int32)
packed = flashattn.explain(*[q.flatten(0, 1)] * 3, cu_seqlens_q=lengths, cu_seqlens_k=lengths)
found["packed"] = [packed.kernel, packed.rejected["bare"]]
found["random state changed"] = not torch.equal(state, torch.get_rng_state())

q_wide, wide, odd_wide = (torch.randn(*shape) for shape in (
    (1, 1, 4, 320), (9, 192, 1, 320), (9, 192, 1, 322)))
caches = {  # pages or sequences, and values of their own
    "values in keys": (wide[:1], None), "a view of them": (wide[:1], wide[:1, ..., :256]),
    "other values": (wide[:1], wide[1:2, ..., :256]), "narrow keys": (wide[:1, ..., :256], None),
    "odd keys": (wide[:1, ..., :312], None),
    **{f"pages of {page}": (wide[:, :page], None) for page in (1, 8, 12, 16, 48, 192)},
    "one sequence of strided pages": (wide[::2, :64], None), "one page": (wide[:1, :64], None),
    "one sequence of odd pages": (odd_wide[:, :64, :, :320], None),
    "one sequence of an expanded cache": (wide[:1, :64].expand(3, 64, 1, 320), None),
    "one page of odd stride": (torch.randn(1, 64 * 320 + 2)[:, :-2].view(1, 64, 1, 320), None),
    "one row of a page, of odd stride": (odd_wide[:1, :1, :, :320], None)}
found["caches"] = {}
for name, (k_cache, v_cache) in caches.items():
    paged = {} if k_cache.shape[0] == 1 else {"page_table": torch.zeros(1, 2, dtype=torch.int32)}
    found["caches"][name] = flashattn.explain(
        q_wide[..., :k_cache.shape[3]], k_cache, v_cache, op="decode", **paged,
        **({} if v_cache is not None else {"v_head_dim": 256})).rejected.get("latent", "")

for family in _load.CUDA_FAMILIES:
    extension.add_family(importlib.import_module(f"_{family}").family)
found["table"] = [
    [chip, op, dtype, *dims, needs, next(name for name, why_not in extension.candidates(
        op, "cuda", dtype, *dims, needs, chip, kilobytes << 10) if not why_not)]
    for (chip, kilobytes), op, dtype, dims, needs in itertools.product(
        CHIPS.items(), ("forward", "backward"), ("bfloat16", "float32"),
        ((64, 64), (72, 72), (128, 128), (192, 128), (192, 192), (256, 256), (512, 512)),
        ([], ["many_queries"], ["many_queries", "small_tiles"], ["softcap", "many_queries"], ["alibi"],
         ["bias"], ["addressing"], ["alignment"]))]
found["table"] += [
    [90, "decode", "bfloat16", *dims, needs, next(name for name, why_not in extension.candidates(
        "decode", "cuda", "bfloat16", *dims, needs, 90, CHIPS[90] << 10) if not why_not)]
    for dims, needs in itertools.product(
        ((576, 512), (320, 256), (584, 512), (128, 128)),
        ([], ["many_queries", "many_rows"], ["own_values"], ["odd_pages"], ["alignment"],
         ["softcap", "many_queries", "many_rows"], ["own_values", "few_rows"],
         *(["own_values", "many_queries", "many_rows", *more] for more in ([], ["leftpad"]))))]
print(json.dumps(found))
