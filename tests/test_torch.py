"""The operators as torch sees them: opcheck, compile, export, fakes, autocast, autograd, determinism."""

import copy
import functools
import io
import itertools
import math
import pickle

import numpy as np
import pytest
import torch
import torch._dynamo.testing
import torch.autograd.forward_ad as forward_ad
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import flashattn
from cases import DTYPES, dense, ints, packed
from compare import assert_close_2x, assert_identical
from flashattn import _load, reference
from layouts import laid_out
from llama import Block

OPS = torch.ops.flashattn
DEFAULTS = {"softcap": 0.0, "causal": False, "window_left": -1, "window_right": -1, "dropout_p": 0.0,
            "deterministic": False, "batch_invariant": False, "return_max_logit": True, "bias_grad": True,
            "rotary_interleaved": False, "num_splits": 0}


def positional(op, **given):
    """The arguments of an operator in the order of its schema, which has no defaults."""
    names = [argument.name for argument in op.default._schema.arguments]
    assert set(given) <= set(names), f"{set(given) - set(names)} are no arguments of {op}"
    return tuple(given.get(name, DEFAULTS.get(name)) for name in names)


def small(device, dtype=torch.float32, **sizes):
    return dense(device, dtype, **{"len_q": 9, "len_k": 11, "dims": (16, 8)} | sizes)


def everything(device, dtype=torch.float32):
    """Options that use every tensor argument of small()."""
    return {"bias": torch.randn(2, 1, 9, 11, dtype=dtype, device=device),
            "sink": torch.randn(4, dtype=dtype, device=device),
            "mask": torch.rand(1, 4, 9, 11, device=device) > 0.2,
            "alibi_slopes": torch.rand(2, 4, device=device),
            "seqused_q": ints(device, 9, 4), "seqused_k": ints(device, 6, 11),
            "dropout_p": 0.3, "seed": torch.tensor([5], device=device)}


def leaves(tensors, needed=None):
    """Detached, same memory layout; those whose index is in ``needed`` (default: all) require a gradient."""
    return [t.detach().requires_grad_(needed is None or i in needed) for i, t in enumerate(tensors)]


def value_and_grads(function, tensors, needed=None):
    """The results of function(*tensors) and the gradients for fixed random gradients of the results."""
    inputs = leaves(tensors, needed)
    results = function(*inputs)
    results = results if isinstance(results, tuple) else (results,)
    differentiable = [r for r in results if r.requires_grad]
    generator = torch.Generator(results[0].device).manual_seed(1)
    seeds = [torch.randn(r.shape, generator=generator, device=r.device).to(r.dtype) for r in differentiable]
    grads = torch.autograd.grad(differentiable, [t for t in inputs if t.requires_grad], seeds)
    return *(r.detach() for r in results), *grads


def assert_all_identical(ours, expected):
    assert len(ours) == len(expected)
    for i, (a, b) in enumerate(zip(ours, expected)):
        assert_identical(a, b, f"result {i}")


def decode_arguments(device, dtype=torch.float32, new=2, **sizes):
    """q, k_cache, v_cache and, if new, k_new, v_new; two sequences with 5 and 9 keys."""
    q, k_cache, v_cache = small(device, dtype, **{"len_q": 2, "len_k": 16} | sizes)
    arguments = {"q": q, "k_cache": k_cache, "v_cache": v_cache, "cache_seqlens": ints(device, 5, 9)}
    if new:
        _, k_new, v_new = small(device, dtype, len_k=new)
        arguments |= {"k_new": k_new, "v_new": v_new}
    return arguments


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


# opcheck ----------------------------------------------------------------------------------------------------

# Layouts of q, k and v.
MIXES = {
    "contiguous": ("contiguous", "contiguous", "contiguous"),
    "heads first": ("heads first", "heads first", "heads first"),
    "packed slice": ("interleaved", "interleaved", "interleaved"),
    "mixed": ("contiguous", "heads first", "interleaved"),
    "one head": ("contiguous", "one head", "padded columns"),
}


def mixed(tensors, mix):
    return [laid_out(t, layout) for t, layout in zip(tensors, MIXES[mix], strict=True)]


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("mix", MIXES)
def test_opcheck_forward(mix, grad, device):
    q, k, v = mixed(small(device), mix)
    given = {"q": q, "k": k, "v": v, "scale": 0.3, "causal": True}
    for t in (q, k, v) if grad else ():
        t.requires_grad_()
    torch.library.opcheck(OPS.forward, positional(OPS.forward, **given))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_opcheck_forward_with_everything(dtype, device):
    q, k, v = leaves(small(device, dtype))
    options = everything(device, dtype)
    options |= {name: options[name].requires_grad_() for name in ("bias", "sink")}
    torch.library.opcheck(OPS.forward, positional(OPS.forward, q=q, k=k, v=v, **options))
    torch.library.opcheck(OPS.forward, positional(OPS.forward, q=q, k=k, v=v, return_max_logit=False))


def test_opcheck_forward_packed(device):
    q, k, v, options = packed(device, (3, 0, 5), (4, 2, 6), dims=(16, 8))
    q, k, v = leaves((q, k, v))
    torch.library.opcheck(OPS.forward, positional(OPS.forward, q=q, k=k, v=v, **options))


@pytest.mark.parametrize("mix", MIXES)
def test_opcheck_forward_out(mix, device):
    q, k, v = mixed(small(device), mix)
    out = laid_out(torch.zeros(2, 9, 4, 8, device=device), "heads first")
    torch.library.opcheck(OPS.forward_out, positional(OPS.forward_out, q=q, k=k, v=v, out=out))


@pytest.mark.parametrize(("mix", "grad"), [*((mix, False) for mix in MIXES), ("mixed", True)])
def test_opcheck_backward(mix, grad, device):
    q, k, v = mixed(small(device), mix)
    out, lse = flashattn.forward(q, k, v, return_lse=True)
    given = {"q": q, "k": k, "v": v, "out": out, "lse": lse, "dout": torch.randn_like(out)}
    for t in (given["dout"], q, k, v) if grad else ():
        t.requires_grad_()
    torch.library.opcheck(OPS.backward, positional(OPS.backward, **given))


def test_opcheck_backward_with_everything(device):
    q, k, v = small(device)
    options = everything(device)
    out, lse = flashattn.forward(q, k, v, **options, return_lse=True)
    given = {"q": q, "k": k, "v": v, "out": out, "lse": lse, "dout": torch.randn_like(out),
             "dlse": torch.randn_like(lse), **options}
    for bias_grad in (False, True):
        torch.library.opcheck(OPS.backward, positional(OPS.backward, **given, bias_grad=bias_grad))
    q, k, v, options = packed(device, (3, 0, 5), (4, 2, 6), dims=(16, 8))
    out, lse = flashattn.forward(q, k, v, **options, return_lse=True)
    given = {"q": q, "k": k, "v": v, "out": out, "lse": lse, "dout": torch.randn_like(out), **options}
    torch.library.opcheck(OPS.backward, positional(OPS.backward, **given))


@pytest.mark.parametrize("mix", MIXES)
def test_opcheck_decode(mix, device):
    arguments = decode_arguments(device, new=0)
    names = ("q", "k_cache", "v_cache")
    arguments |= zip(names, mixed([arguments[name] for name in names], mix))
    torch.library.opcheck(OPS.decode, positional(OPS.decode, **arguments))


@pytest.mark.parametrize("mix", ["contiguous", "heads first", "packed slice", "mixed"])
def test_opcheck_decode_in_place(mix, device):
    arguments = decode_arguments(device)
    names = ("q", "k_cache", "v_cache")
    arguments |= zip(names, mixed([arguments[name] for name in names], mix))
    arguments["out"] = torch.zeros(2, 2, 4, 8, device=device)
    torch.library.opcheck(OPS.decode_, positional(OPS.decode_, **arguments))


def test_opcheck_decode_paged_packed_and_mla(device):
    paged = {"k_cache": torch.randn(6, 4, 2, 16, device=device),
             "v_cache": torch.randn(6, 4, 2, 8, device=device),
             "page_table": ints(device, 5, 2, 0, 1, 3, 4).view(2, 3), "leftpad": ints(device, 1, 0),
             "sink": torch.randn(4, device=device), "alibi_slopes": torch.rand(4, device=device),
             "rotary_cos": torch.randn(12, 4, device=device), "rotary_sin": torch.randn(12, 4, device=device)}
    arguments = decode_arguments(device) | paged | {"out": torch.zeros(2, 2, 4, 8, device=device)}
    torch.library.opcheck(OPS.decode_, positional(OPS.decode_, **arguments))
    arguments |= {"q": torch.randn(4, 4, 16, device=device), "out": torch.zeros(4, 4, 8, device=device),
                  "k_new": torch.randn(4, 2, 16, device=device), "v_new": torch.randn(4, 2, 8, device=device),
                  "cu_seqlens_q": ints(device, 0, 1, 4), "max_seqlen_q": 3}
    torch.library.opcheck(OPS.decode_, positional(OPS.decode_, **arguments))
    mla = decode_arguments(device, new=0) | {"v_cache": None, "v_head_dim": 8}
    torch.library.opcheck(OPS.decode, positional(OPS.decode, **mla))
    mla |= {"k_new": torch.randn(2, 2, 2, 16, device=device), "out": torch.zeros(2, 2, 4, 8, device=device)}
    torch.library.opcheck(OPS.decode_, positional(OPS.decode_, **mla))


# Operators as functions of the module -----------------------------------------------------------------------

def test_an_eager_call_is_the_operator(device):
    """Modes of torch.dispatch and torch.function see torch's operator, under its name."""
    class Names(TorchDispatchMode):
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            names.append(str(op))
            return op(*args, **kwargs or {})

    class Functions(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            names.append(str(function))
            return function(*args, **kwargs or {})

    wanted = flashattn.forward(*small(device))
    for mode in (Names(), Functions()):
        names = []
        torch.manual_seed(0)
        with mode:
            out = flashattn.forward(*small(device))
        assert any("flashattn.forward" in name for name in names), names
        assert out.shape == wanted.shape
    with torch.profiler.profile() as profile:
        flashattn.forward(*small(device))
    assert "flashattn::forward" in {event.key for event in profile.key_averages()}


def test_tensor_subclasses_are_asked(device):
    class Asked(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            asked.append(str(function))
            return super().__torch_function__(function, types, args, kwargs or {})

    asked = []
    q, k, v = small(device)
    out = flashattn.forward(q.as_subclass(Asked), k, v)
    assert isinstance(out, Asked) and any("flashattn.forward" in name for name in asked)
    assert_identical(out.as_subclass(torch.Tensor), flashattn.forward(q, k, v), "out")


def test_what_is_no_plain_argument_goes_to_torch(device):
    """Numbers that are equal are the same; what the schema does not take is torch's error."""
    q, k, v = small(device)
    options = {"scale": 2.0, "softcap": 3.0, "causal": True, "window": (4, 2)}
    alike = {"scale": 2, "softcap": 3, "causal": True, "window": (np.int64(4), np.int32(2))}
    assert_identical(flashattn.forward(q, k, v, **alike), flashattn.forward(q, k, v, **options), "out")
    for name, value in (("causal", "yes"), ("bias", [1.0]), ("scale", "big"), ("max_seqlen_k", 2.5),
                        ("max_seqlen_k", 2**64)):
        with pytest.raises((TypeError, RuntimeError), match=f"(?s)flashattn.*{name}|overflow|too large"):
            flashattn.forward(q, k, v, **{name: value})
    with pytest.raises(RuntimeError, match="flashattn::forward"):
        _load.extension().forward(q, k, v)


# torch.compile ----------------------------------------------------------------------------------------------

def compile_cases(device):
    slopes = torch.rand(4, device=device)
    return {
        "plain": {},
        "causal": {"causal": True, "scale": 0.4, "softcap": 2.0},
        "window": {"window": (5, 2), "alibi_slopes": slopes},
        "used": {"seqused_k": ints(device, 6, 11), "deterministic": True, "batch_invariant": True},
        "dropout with an int": {"dropout_p": 0.3, "seed": 7},
        "dropout with a tensor": {"dropout_p": 0.3, "seed": torch.tensor([7], device=device)},
        "everything": everything(device),
    }


@pytest.mark.parametrize("case", compile_cases("cpu"))
def test_compile(case, device):
    """One graph, forward and backward; the same bits as eager."""
    options = compile_cases(device)[case]
    extra = [options.pop(name) for name in ("bias", "sink") if name in options]

    def attend(q, k, v, *extra):
        trained = dict(zip(("bias", "sink"), extra))
        return flashattn.forward(q, k, v, **trained, **options, return_lse=True, return_max_logit=True)

    tensors = (*small(device), *extra)
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    assert_all_identical(value_and_grads(compiled, tensors), value_and_grads(attend, tensors))


@pytest.mark.parametrize("mix", MIXES)
def test_compile_keeps_strides(mix, device):
    tensors = mixed(small(device), mix)
    compiled = torch.compile(flashattn.forward, fullgraph=True, backend="aot_eager")
    assert_all_identical(value_and_grads(compiled, tensors), value_and_grads(flashattn.forward, tensors))


def test_compile_packed(device):
    q, k, v, options = packed(device, (3, 0, 5), (4, 2, 6), dims=(16, 8))

    def attend(q, k, v):
        return flashattn.forward(q, k, v, **options, causal=True, return_lse=True)

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    assert_all_identical(value_and_grads(compiled, (q, k, v)), value_and_grads(attend, (q, k, v)))


def test_compile_draws_a_seed(device):
    """seed=None inside a graph: another mask on each call, the same one after the same manual_seed."""
    q, k, v = small(device)
    compiled = torch.compile(lambda q, k, v: flashattn.forward(q, k, v, dropout_p=0.5), fullgraph=True,
                             backend="aot_eager")
    torch.manual_seed(3)
    first, second = compiled(q, k, v), compiled(q, k, v)
    torch.manual_seed(3)
    assert_identical(compiled(q, k, v), first, "the same seed")
    assert not torch.equal(first, second)


def test_compile_autocast(device):
    q, k, v = small(device)

    def attend(q, k, v):
        with torch.autocast(device.type, torch.bfloat16):
            return flashattn.forward(q, k, v)

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    assert_all_identical(value_and_grads(compiled, (q, k, v)), value_and_grads(attend, (q, k, v)))


@pytest.mark.slow
def test_compile_with_inductor(device):
    """A whole attention layer with its training step, through the default backend."""
    torch.manual_seed(0)
    project = torch.nn.Linear(32, 3 * 32, device=device)

    def layer(x, weight, bias):
        qkv = torch.nn.functional.linear(x, weight, bias).view(2, -1, 3, 4, 8)
        return flashattn.forward(*qkv.unbind(2), causal=True).flatten(2)

    tensors = (torch.randn(2, 20, 32, device=device), project.weight, project.bias)
    compiled = torch.compile(layer, fullgraph=True)
    for ours, eager in zip(value_and_grads(compiled, tensors), value_and_grads(layer, tensors), strict=True):
        torch.testing.assert_close(ours, eager, rtol=1e-5, atol=1e-5)


LENGTHS = (17, 18, 20, 33, 40, 64, 65, 100, 129, 200)


@pytest.mark.parametrize("dynamic", [True, None])
def test_ten_lengths_compile_at_most_twice(dynamic, device):
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(flashattn.forward, fullgraph=True, dynamic=dynamic, backend=counter)
    for length in LENGTHS:
        tensors = small(device, len_q=length, len_k=length + 3)
        assert_all_identical(value_and_grads(compiled, tensors), value_and_grads(flashattn.forward, tensors))
    assert counter.frame_count <= 2


def test_ten_packed_lengths_compile_at_most_twice(device):
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(flashattn.forward, fullgraph=True, dynamic=True, backend=counter)
    for length in LENGTHS:
        q, k, v, options = packed(device, (length, 3), (5, length + 1), dims=(16, 8))
        assert_identical(compiled(q, k, v, **options), flashattn.forward(q, k, v, **options), "out")
    assert counter.frame_count <= 2


def test_ten_cache_lengths_compile_at_most_twice(device):
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(flashattn.decode, fullgraph=True, dynamic=True, backend=counter)
    for length in LENGTHS:
        arguments = decode_arguments(device, len_k=length)
        copies = {name: t.clone() for name, t in arguments.items()}
        assert_identical(compiled(**arguments), flashattn.decode(**copies), "out")
        assert_identical(arguments["k_cache"], copies["k_cache"], "k_cache")
    assert counter.frame_count <= 2


@pytest.mark.parametrize("kind", ["reading", "append", "append from the start", "paged", "packed", "mla",
                                  "out", "rotary"])
def test_compile_decode(kind, device):
    """The caches that a graph appends to hold what eager puts there."""
    arguments = decode_arguments(device, new=0 if kind == "reading" else 2)
    arguments |= {
        "append from the start": {"cache_seqlens": 0},
        "paged": {"page_table": ints(device, 5, 2, 0, 1, 3, 4).view(2, 3),
                  "k_cache": torch.randn(6, 4, 2, 16, device=device),
                  "v_cache": torch.randn(6, 4, 2, 8, device=device)},
        "packed": {"q": torch.randn(5, 4, 16, device=device), "k_new": torch.randn(5, 2, 16, device=device),
                   "v_new": torch.randn(5, 2, 8, device=device), "cu_seqlens_q": ints(device, 0, 1, 5),
                   "max_seqlen_q": 4},
        "mla": {"v_cache": None, "v_new": None, "v_head_dim": 8},
        "out": {"out": torch.zeros(2, 2, 4, 8, device=device)},
        "rotary": dict(zip(("rotary_cos", "rotary_sin"), torch.randn(2, 16, 8, device=device))),
    }.get(kind, {})
    copies = {name: t.clone() if isinstance(t, torch.Tensor) else t for name, t in arguments.items()}

    def step(**arguments):
        return flashattn.decode(**arguments, causal=True, return_lse=True)

    ours = torch.compile(step, fullgraph=True, backend="aot_eager")(**arguments)
    assert_all_identical(ours, step(**copies))
    for name, t in arguments.items():
        if isinstance(t, torch.Tensor):
            assert_identical(t, copies[name], name)


def test_compile_two_appends_in_one_graph(device):
    """The second step reads what the first one appended: the mutation is in the graph, in order."""
    arguments = decode_arguments(device)
    copies = {name: t.clone() for name, t in arguments.items()}

    def steps(q, k_cache, v_cache, k_new, v_new, cache_seqlens):
        first = flashattn.decode(q, k_cache, v_cache, k_new=k_new, v_new=v_new, cache_seqlens=cache_seqlens)
        second = flashattn.decode(q, k_cache, v_cache, k_new=-k_new, v_new=2 * v_new,
                                  cache_seqlens=cache_seqlens + 2)
        return first, second, k_cache.sum()

    ours = torch.compile(steps, fullgraph=True, backend="aot_eager")(**arguments)
    assert_all_identical(ours, steps(**copies))
    for name in ("k_cache", "v_cache"):
        assert_identical(arguments[name], copies[name], name)


def test_compile_forward_out(device):
    q, k, v = small(device)
    expected = flashattn.forward(q, k, v)

    def attend(q, k, v, out):
        flashattn.forward(q, k, v, out=out)
        return out * 1

    out = torch.full_like(expected, 7)
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    assert_identical(compiled(q, k, v, out), expected, "result")
    assert_identical(out, expected, "out")


# torch.export, fake and meta tensors ------------------------------------------------------------------------

class Attend(torch.nn.Module):
    def forward(self, q, k, v):
        return flashattn.forward(q, k, v, causal=True, return_lse=True)


class Step(torch.nn.Module):
    def forward(self, q, k_cache, v_cache, k_new, v_new, cache_seqlens):
        return flashattn.decode(q, k_cache, v_cache, k_new=k_new, v_new=v_new, cache_seqlens=cache_seqlens)


def test_export(device):
    length = torch.export.Dim("length", min=2, max=512)
    q, k, v = small(device, len_q=12, len_k=12)
    program = torch.export.export(Attend(), (q, k, v), dynamic_shapes=({1: length},) * 3)
    for size in (12, 5, 130):
        tensors = small(device, len_q=size, len_k=size)
        assert_all_identical(program.module()(*tensors), Attend()(*tensors))


def test_export_decode(device):
    arguments = decode_arguments(device)
    program = torch.export.export(Step(), (), arguments)
    copies = {name: t.clone() for name, t in arguments.items()}
    assert_identical(program.module()(**arguments), Step()(**copies), "out")
    assert_identical(arguments["k_cache"], copies["k_cache"], "k_cache")


@pytest.mark.slow
def test_ahead_of_time_packages(device, tmp_path):
    """A forward of any length and a decode step, compiled by AOTInductor, saved and loaded."""
    def packaged(module, name, *given, **options):
        with torch.no_grad():
            program = torch.export.export(module, *given, **options)
        path = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / name))
        return torch._inductor.aoti_load_package(path)

    length = torch.export.Dim("length", min=2, max=512)
    attend = packaged(Attend(), "attend.pt2", small(device, len_q=12, len_k=12),
                      dynamic_shapes=({1: length},) * 3)
    for size in (12, 5, 130):
        tensors = small(device, len_q=size, len_k=size)
        assert_all_identical(attend(*tensors), Attend()(*tensors))
    arguments = decode_arguments(device)
    step = packaged(Step(), "step.pt2", (), arguments)
    copies = {name: t.clone() for name, t in arguments.items()}
    assert_identical(step(**arguments), Step()(**copies), "out")
    for name in ("k_cache", "v_cache"):
        assert_identical(arguments[name], copies[name], name)


def test_modules_are_copied_and_pickled(device):
    """A block of a model by copy.deepcopy, pickle and torch.save: the same results and gradients."""
    block = Block().to(device)
    x = torch.randn(2, 9, Block.WIDTH, device=device)
    file = io.BytesIO()
    torch.save(block, file)
    file.seek(0)
    copies = copy.deepcopy(block), pickle.loads(pickle.dumps(block)), torch.load(file, weights_only=False)
    wanted = value_and_grads(block, (x,))
    for other in copies:
        assert_all_identical(value_and_grads(other, (x,)), wanted)


def properties(results):
    return [(r.shape, r.stride(), r.dtype) for r in results]


@pytest.mark.parametrize("where", ["fake", "meta"])
@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_fake_results_are_like_real_ones(dtype, mix, where, device):
    """Shapes, strides and dtypes of forward, backward and decode, without touching memory."""
    def call(q, k, v, bias, sink):
        options = {"bias": bias, "sink": sink, "causal": True}
        results = flashattn.forward(q, k, v, **options, return_lse=True, return_max_logit=True)
        return *results, *flashattn.backward(results[0], q, k, v, *results[:2], **options), \
            *flashattn.decode(q, k, v, return_lse=True)

    tensors = (*mixed(small(device, dtype), mix), torch.randn(1, 4, 9, 11, dtype=dtype, device=device),
               torch.randn(4, device=device))
    expected = properties(call(*tensors))
    if where == "meta":
        stand_ins = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta") for t in tensors]
        results = call(*stand_ins)
        assert all(r.is_meta for r in results)
    else:
        with FakeTensorMode() as mode:
            results = call(*(mode.from_tensor(t) for t in tensors))
        assert all(r.device == tensors[0].device for r in results)
    assert properties(results) == expected


def test_fake_packed_results(device):
    q, k, v, options = packed(device, (3, 0, 5), (4, 2, 6), dims=(16, 8))
    expected = properties(flashattn.forward(q, k, v, **options, return_lse=True))
    with FakeTensorMode() as mode:
        fake = {n: mode.from_tensor(o) if isinstance(o, torch.Tensor) else o for n, o in options.items()}
        results = flashattn.forward(*(mode.from_tensor(t) for t in (q, k, v)), **fake, return_lse=True)
    assert properties(results) == expected


# Autocast ---------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast(dtype, device):
    """As if q, k, v were cast by hand: the same bits, gradients in the dtype of the leaves."""
    tensors = (*small(device), torch.randn(2, 4, 9, 11, device=device), torch.randn(4, device=device))

    def cast(q, k, v, bias, sink):
        with torch.autocast(device.type, dtype):
            return flashattn.forward(q, k, v, bias=bias, sink=sink, return_lse=True)

    def by_hand(q, k, v, bias, sink):
        return flashattn.forward(q.to(dtype), k.to(dtype), v.to(dtype), bias=bias, sink=sink, return_lse=True)

    ours = value_and_grads(cast, tensors)
    assert_all_identical(ours, value_and_grads(by_hand, tensors))
    assert ours[0].dtype == dtype and all(grad.dtype == torch.float32 for grad in ours[2:])


def test_autocast_casts_what_differs(device):
    """Mixed inputs are made equal; bias and sink of a third dtype are cast; what fits is left alone."""
    q, k, v = small(device)
    bias, sink = torch.randn(2, 4, 9, 11, device=device), torch.randn(4, device=device)
    bf16 = torch.bfloat16
    with torch.autocast(device.type, bf16):
        ours = flashattn.forward(q.to(bf16), k, v.half(), bias=bias.half(), sink=sink.half())
    expected = flashattn.forward(q.to(bf16), k.to(bf16), v.half().to(bf16), bias=bias.half().to(bf16),
                                 sink=sink.half().to(bf16))
    assert_identical(ours, expected, "out")
    with torch.autocast(device.type, bf16), torch.autocast(device.type, enabled=False):
        assert flashattn.forward(q, k, v).dtype == torch.float32
    with pytest.raises(TypeError, match="k.*BFloat16|k.*bfloat16"):
        flashattn.forward(q, k.to(bf16), v)


# Autograd ---------------------------------------------------------------------------------------------------

def attend_all(options):
    def attend(q, k, v, bias, sink):
        return flashattn.forward(q, k, v, bias=bias, sink=sink, **options, return_lse=True)
    return attend


def five(device, dtype=torch.float32):
    return (*small(device, dtype), torch.randn(2, 1, 9, 11, dtype=dtype, device=device),
            torch.randn(4, dtype=dtype, device=device))


@pytest.mark.parametrize(
    "needed", [subset for n in (1, 2, 3, 4) for subset in itertools.combinations(range(5), n)], ids=str)
def test_gradients_of_any_subset(needed, device):
    """Whatever needs a gradient gets the one that it has when everything does."""
    attend, tensors = attend_all({"causal": True, "deterministic": True}), five(device)
    everything = value_and_grads(attend, tensors)
    expected = everything[:2] + tuple(everything[2 + i] for i in needed)
    assert_all_identical(value_and_grads(attend, tensors, needed), expected)


def saved_tensors(function):
    """How many tensors autograd keeps for the call."""
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        result = function()
    return len(kept), result


def test_nothing_is_saved_when_nothing_requires_grad(device):
    tensors = five(device)
    count, (out, lse) = saved_tensors(lambda: attend_all({})(*tensors))
    assert count == 0 and not out.requires_grad and not lse.requires_grad
    with torch.no_grad():
        count, (out, lse) = saved_tensors(lambda: attend_all({})(*leaves(tensors)))
    assert count == 0 and not out.requires_grad and not lse.requires_grad
    count, (out, lse) = saved_tensors(lambda: attend_all({})(*leaves(tensors)))
    assert count > 0 and out.requires_grad and lse.requires_grad


def test_inference_mode_then_training(device):
    attend, tensors = attend_all({"causal": True}), five(device)
    expected = value_and_grads(attend, tensors)
    with torch.inference_mode():
        results = attend(*leaves(tensors))
        assert_all_identical(results, expected[:2])
        assert all(r.is_inference() for r in results)
    with torch.no_grad():
        assert_all_identical(attend(*leaves(tensors)), expected[:2])
    assert_all_identical(value_and_grads(attend, tensors), expected)


def test_max_logit_has_no_gradient(device):
    q, k, v = leaves(small(device))
    _, max_logit = flashattn.forward(q, k, v, return_max_logit=True)
    assert not max_logit.requires_grad


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint_with_dropout(reentrant, device):
    """The recomputation draws the mask of the first run."""
    def attend(q, k, v):
        return flashattn.forward(q, k, v, dropout_p=0.4)

    def checkpointed(q, k, v):
        return checkpoint(attend, q, k, v, use_reentrant=reentrant)

    def train(function):
        torch.manual_seed(5)
        inputs = leaves(tensors)
        out = function(*inputs)
        out.square().sum().backward()
        return out.detach(), *(t.grad for t in inputs)

    tensors = small(device)
    assert_all_identical(train(checkpointed), train(attend))


GRADCHECK = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window": (3, 1)},
    "softcap": {"softcap": 1.5, "scale": 0.7},
    "dropout": {"dropout_p": 0.4, "seed": 11},
    "deterministic": {"deterministic": True, "causal": True},
}


def tiny(device):
    """q, k, v, bias and sink in float64, so small that a Jacobian is cheap."""
    shapes = ((2, 3, 2, 3), (2, 4, 1, 3), (2, 4, 1, 2), (1, 2, 3, 4), (2,))
    return [torch.randn(shape, dtype=torch.float64, device=device).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("case", GRADCHECK)
def test_gradcheck(case, device):
    assert torch.autograd.gradcheck(attend_all(GRADCHECK[case]), tiny(device))


@pytest.mark.parametrize("case", GRADCHECK)
def test_gradgradcheck(case, device):
    assert torch.autograd.gradgradcheck(attend_all(GRADCHECK[case]), tiny(device))


@pytest.mark.parametrize("check", [torch.autograd.gradcheck, torch.autograd.gradgradcheck])
def test_gradients_of_packed_calls(check, device):
    options = {"cu_seqlens_q": ints(device, 0, 2, 2, 5), "cu_seqlens_k": ints(device, 0, 3, 4, 8),
               "max_seqlen_q": 3, "max_seqlen_k": 4, "causal": True,
               "alibi_slopes": torch.rand(3, 2, device=device)}
    shapes = ((5, 2, 3), (8, 1, 3), (8, 1, 2), (3, 2, 3, 4), (2,))
    tensors = [torch.randn(shape, dtype=torch.float64, device=device).requires_grad_() for shape in shapes]
    assert check(attend_all(options), tensors)


def test_gradcheck_without_bias_and_sink(device):
    q, k, v, *_ = tiny(device)
    for options in ({}, {"causal": True}, {"mask": torch.rand(2, 2, 3, 4, device=device) > 0.3}):
        attend = functools.partial(flashattn.forward, **options)
        assert torch.autograd.gradcheck(attend, (q, k, v))
        assert torch.autograd.gradgradcheck(attend, (q, k, v))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradient_penalty(dtype, device):
    """Second derivatives in the usual dtypes, against autograd through the oracle."""
    def penalty(attend, tensors):
        q, k, v = tensors
        dq, dk = torch.autograd.grad(attend(q, k, v).square().sum(), (q, k), create_graph=True)
        return torch.autograd.grad(dq.square().sum() + dk.square().sum(), tensors)

    tensors = small(device, dtype)
    ours = penalty(lambda *t: flashattn.forward(*t, causal=True), leaves(tensors))
    exact = penalty(lambda *t: reference.forward(*t, causal=True)[0], leaves([t.double() for t in tensors]))
    plain = penalty(lambda *t: reference.forward(*t, causal=True, dtype=dtype)[0], leaves(tensors))
    for name, *results in zip(("q", "k", "v"), ours, exact, plain, strict=True):
        assert_close_2x(*results, f"second derivative by {name}")


def test_forward_mode_is_refused(device):
    q, k, v = small(device)
    named = "(?i)forward.?mode|forward ad|jvp"
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match=named):
        flashattn.forward(forward_ad.make_dual(q, torch.ones_like(q)), k, v)
    with pytest.raises(NotImplementedError, match=named):
        torch.func.jvp(lambda q: flashattn.forward(q, k, v), (q,), (torch.ones_like(q),))


@pytest.mark.parametrize("transform", ["grad", "vjp", "vmap", "jacrev"])
def test_func_transforms_work_or_say_so(transform, device):
    """torch.func gives the right answer, or an error that names the operator or the transform."""
    q, k, v = small(device)
    leaf = q.clone().requires_grad_()
    expected, = torch.autograd.grad(flashattn.forward(leaf, k, v).sum(), leaf)
    try:
        if transform == "grad":
            ours = torch.func.grad(lambda q: flashattn.forward(q, k, v).sum())(q)
        elif transform == "vjp":
            out, pull = torch.func.vjp(lambda q: flashattn.forward(q, k, v), q)
            ours, = pull(torch.ones_like(out))
        elif transform == "jacrev":
            ours = torch.func.jacrev(lambda q: flashattn.forward(q, k, v).sum())(q)
        else:
            batches = [torch.stack([t, 2 * t]) for t in (q, k, v)]
            expected = torch.stack([flashattn.forward(*(t[i] for t in batches)) for i in range(2)])
            ours = torch.vmap(flashattn.forward)(*batches)
    except (NotImplementedError, RuntimeError) as refusal:
        assert any(word in str(refusal) for word in ("flashattn", "functorch", "vmap", "torch.func")), refusal
    else:
        torch.testing.assert_close(ours, expected)


# Randomness and determinism ---------------------------------------------------------------------------------

def test_generator_is_untouched_without_dropout(device):
    q, k, v = small(device)
    for options in ({}, {"seed": 3}, {"dropout_p": 0.5, "seed": 3},
                    {"dropout_p": 0.5, "seed": torch.tensor([3], device=device)}):
        before = torch.get_rng_state()
        leaf = q.clone().requires_grad_()
        flashattn.forward(leaf, k, v, **options).sum().backward()
        assert torch.equal(torch.get_rng_state(), before), options
    arguments = decode_arguments(device)
    before = torch.get_rng_state()
    flashattn.decode(**arguments)
    assert torch.equal(torch.get_rng_state(), before)


def test_seed(device):
    """None draws another mask each time from torch's generator; a seed, int or tensor, repeats one."""
    q, k, v = small(device)

    def drop(seed):
        return flashattn.forward(q, k, v, dropout_p=0.5, seed=seed)

    torch.manual_seed(1)
    first, second = drop(None), drop(None)
    torch.manual_seed(1)
    assert_identical(drop(None), first, "the same generator state")
    assert not torch.equal(first, second)
    assert_identical(drop(3), drop(torch.tensor([3], device=device)), "an int and a tensor")
    assert_identical(drop(3), drop(torch.tensor(3, device=device)), "a 0-d tensor")
    assert not torch.equal(drop(3), drop(4)) and not torch.equal(drop(3), drop(3 + 2**32))
    assert_identical(drop(-1), drop(-1), "a negative seed")


@pytest.fixture
def threads():
    """Sets the number of threads; the old one comes back after the test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def busy_call(options, **flags):
    """A call with several tiles on every axis and, for the backward, several partial sums of dq."""
    def call():
        torch.manual_seed(0)
        q, k, v = dense("cpu", torch.float32, len_q=300, len_k=333, heads=(6, 2), dims=(32, 24))
        bias = torch.randn(1, 6, 300, 333)

        def attend(q, k, v, bias):
            return flashattn.forward(q, k, v, bias=bias, **options, **flags, return_lse=True)

        return value_and_grads(attend, (q, k, v, bias))
    return call


BUSY = {"causal": {"causal": True}, "window": {"window": (100, 7)}, "dropout": {"dropout_p": 0.2, "seed": 5}}


@pytest.mark.parametrize("case", BUSY)
def test_deterministic_repeats_and_threads(case, threads):
    """deterministic=True: the same bits on every run and on one, two and five threads."""
    call = busy_call(BUSY[case], deterministic=True)
    threads(1)
    expected = call()
    for count in (1, 2, 2, 5):
        threads(count)
        assert_all_identical(call(), expected)


def test_deterministic_packed(threads):
    torch.manual_seed(0)
    q, k, v, options = packed("cpu", (200, 0, 33, 90), (150, 7, 0, 222), heads=(6, 2), dims=(32, 32))

    def attend(q, k, v):
        return flashattn.forward(q, k, v, **options, causal=True, deterministic=True)

    threads(1)
    expected = value_and_grads(attend, (q, k, v))
    for count in (1, 2, 3):
        threads(count)
        assert_all_identical(value_and_grads(attend, (q, k, v)), expected)


def test_use_deterministic_algorithms_is_obeyed(threads):
    threads(2)
    expected = busy_call({"causal": True}, deterministic=True)()
    torch.use_deterministic_algorithms(True)
    try:
        for _ in range(3):
            assert_all_identical(busy_call({"causal": True})(), expected)
    finally:
        torch.use_deterministic_algorithms(False)


def test_forward_has_the_same_bits_without_the_flag(threads):
    threads(1)
    expected = busy_call({"causal": True})()[:2]
    for count in (1, 2, 2, 4):
        threads(count)
        assert_all_identical(busy_call({"causal": True})()[:2], expected)


def test_decode_threads(threads):
    """A given or invariant split has the same bits on any number of threads."""
    torch.manual_seed(0)
    q, k, v = dense("cpu", len_q=2, len_k=3000, heads=(6, 2), dims=(32, 32))
    for options in ({"num_splits": 3}, {"num_splits": 1}, {"batch_invariant": True}):
        threads(1)
        expected = flashattn.decode(q, k, v, **options, return_lse=True)
        for count in (2, 5):
            threads(count)
            assert_all_identical(flashattn.decode(q, k, v, **options, return_lse=True), expected)


# out= -------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("layout", ["contiguous", "heads first", "interleaved", "odd offset"])
def test_forward_out(layout, device):
    q, k, v = small(device)
    expected = flashattn.forward(q, k, v, return_lse=True, return_max_logit=True)
    out = laid_out(torch.full_like(expected[0], math.nan), layout)
    ours = flashattn.forward(q, k, v, out=out, return_lse=True, return_max_logit=True)
    assert ours[0] is out
    assert_all_identical(ours, expected)
    with torch.no_grad():
        assert flashattn.forward(*leaves((q, k, v)), out=out) is out
