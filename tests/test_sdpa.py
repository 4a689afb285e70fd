"""torch's scaled_dot_product_attention: what these kernels serve, what goes to torch, and how it ends."""

import functools
import math

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
import torch.nn.functional as F
from torch._dynamo.backends.common import aot_autograd
from torch.nn.attention import SDPBackend, sdpa_kernel

from cases import DTYPES
from compare import assert_close_2x, assert_identical
from flashattn import functional
from flashattn.integrations import sdpa


@pytest.fixture
def calls(monkeypatch):
    """The arguments of each call of flashattn.forward, which is still made."""
    made = []

    @functools.wraps(functional.forward)
    def forward(q, k, v, **options):
        made.append((q, k, v, options))
        return real(q, k, v, **options)

    real = functional.forward
    monkeypatch.setattr(functional, "forward", forward)
    return made


@pytest.fixture(autouse=True)
def _undone():
    """No test leaves an override behind."""
    yield
    assert sdpa.Registration._library is None


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def heads_first(device, dtype=torch.float32, batch=2, heads=(4, 4), lengths=(33, 33), dims=(32, 32)):
    """Random q, k, v (B, H, S, D)."""
    shapes = (heads[0], lengths[0], dims[0]), (heads[1], lengths[1], dims[0]), (heads[1], lengths[1], dims[1])
    return tuple(torch.randn(batch, *shape, dtype=dtype, device=device) for shape in shapes)


def exact(q, k, v, attn_mask=None, **options):
    """torch's unfused code in float64."""
    mask = attn_mask.double() if attn_mask is not None and attn_mask.is_floating_point() else attn_mask
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(q.double(), k.double(), v.double(), mask, **options)


def plain(q, k, v, attn_mask=None, is_causal=False, scale=None, enable_gqa=False):
    """Every step in the dtype of q."""
    if enable_gqa:
        k, v = (t.repeat_interleave(q.shape[-3] // k.shape[-3], -3) for t in (k, v))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    scores = q @ (k * scale).transpose(-2, -1)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attn_mask, -math.inf)
    elif attn_mask is not None:
        scores = scores + attn_mask
    return torch.nan_to_num(scores.softmax(-1), 0.0).to(v.dtype) @ v


def gradients(attend, tensors, dout):
    inputs = [t.detach().requires_grad_() for t in tensors]
    out = attend(*inputs)
    return out.detach(), *torch.autograd.grad(out, inputs, dout.to(out.dtype))


def check(calls, tensors, **options):
    """One call served by these kernels; result and gradients of all tensors against torch's in float64.

    The fourth tensor is a float attn_mask, which needs a gradient too.
    """
    q, _, v, *_ = tensors
    dout = torch.randn(*q.shape[:-1], v.shape[-1], device=q.device)
    attend = functools.partial(F.scaled_dot_product_attention, **options)
    with sdpa.register():
        ours = gradients(attend, tensors, dout)
    assert len(calls) == 1, "torch served it"
    wanted = gradients(functools.partial(exact, **options), tensors, dout)
    baseline = gradients(functools.partial(plain, **options), tensors, dout)
    for name, *results in zip(("out", "dq", "dk", "dv", "dmask"), ours, wanted, baseline):
        # A gradient that is 0 is a sum of D products less the same sum.
        floor = 2 * q.shape[-1] * torch.finfo(q.dtype).eps if q.dtype == torch.float32 else 0.0
        assert_close_2x(*results, name, floor=floor)
    assert len(calls) == 1, "the reference was served here"
    return calls[0]


# What is served ---------------------------------------------------------------------------------------------

@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (4, 1)], ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_dtypes_heads_and_causal(dtype, heads, causal, device, calls):
    tensors = heads_first(device, dtype, heads=heads)
    check(calls, tensors, is_causal=causal, enable_gqa=heads[0] != heads[1])


@pytest.mark.parametrize("lengths", [(1, 1), (1, 40), (40, 1), (17, 90), (90, 17), (65, 64)], ids=str)
def test_causal_is_top_left(lengths, device, calls):
    """Query i sees the keys up to i, whatever the lengths."""
    *_, options = check(calls, heads_first(device, lengths=lengths), is_causal=True)
    assert not options.get("mask"), "no mask in memory"


@pytest.mark.parametrize("dims", [(8, 24), (40, 16), (7, 5), (64, 64)], ids=str)
@pytest.mark.parametrize("scale", [None, 0.3, 1, 0.0, -0.2], ids=str)
def test_head_dims_and_scale(dims, scale, device, calls):
    check(calls, heads_first(device, dims=dims), scale=scale)


@pytest.mark.parametrize(("rank", "shape"), [
    *((rank, shape) for rank in (3, 4) for shape in ((33, 40), (1, 40), (1, 33, 40))), (3, (2, 33, 40)),
    (3, (2, 1, 40)), (4, (4, 1, 40)), (4, (4, 33, 40)), (4, (2, 4, 33, 40)), (4, (1, 4, 1, 40)),
    (4, (2, 1, 33, 40))], ids=str)
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_masks(shape, rank, kind, device, calls):
    """Every way to leave out or broadcast a dimension but the keys; a float one with its gradient."""
    tensors = heads_first(device, lengths=(33, 40))
    if rank == 3:
        tensors = tuple(t[:, 0] for t in tensors)
    mask = torch.randn(shape, device=device)
    if kind == "float":
        check(calls, (*tensors, mask))
    else:
        check(calls, tensors, attn_mask=mask > -0.8)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_bias_of_low_precision(dtype, device, calls):
    tensors = heads_first(device, dtype, lengths=(33, 40))
    check(calls, (*tensors, torch.randn(2, 4, 33, 40, dtype=dtype, device=device)))


def test_hidden_by_minus_infinity(device, calls):
    mask = torch.randn(33, 40, device=device).masked_fill(torch.rand(33, 40, device=device) > 0.5, -math.inf)
    check(calls, heads_first(device, lengths=(33, 40)), attn_mask=mask)


@pytest.mark.parametrize("kind", ["bool", "float"])
def test_rows_without_a_visible_key_are_zero(kind, device, calls):
    tensors = heads_first(device, lengths=(33, 40))
    mask = torch.ones(33, 40, dtype=torch.bool, device=device)
    mask[[0, 7]] = False
    if kind == "float":
        mask = torch.zeros(33, 40, device=device).masked_fill(~mask, -math.inf)
    dout = torch.randn_like(tensors[0])
    with sdpa.register():
        out, dq, *_ = gradients(functools.partial(F.scaled_dot_product_attention, attn_mask=mask), tensors,
                                dout)
    assert len(calls) == 1
    assert not out[:, :, [0, 7]].any() and not dq[:, :, [0, 7]].any() and out[:, :, 1:7].all()


def layouts(t):
    """(B, H, S, D) as models leave it, and worse."""
    return {"rows first": t.transpose(1, 2).contiguous().transpose(1, 2),
            "columns first": t.mT.contiguous().mT, "broadcast": t[:1].expand_as(t),
            "sliced": torch.cat([t, t], -1)[..., :t.shape[-1]], "heads of one": t[:, :1].expand_as(t)}


@pytest.mark.parametrize("layout", layouts(torch.zeros(1, 1, 1, 1)))
def test_strides(layout, device, calls):
    tensors = [layouts(t)[layout] for t in heads_first(device)]
    mask = torch.randn(33, 33, device=device).t()                        # columns are not contiguous
    check(calls, tensors, attn_mask=mask)


def test_three_dimensions(device, calls):
    q, k, v = (t[:, 0] for t in heads_first(device, lengths=(20, 50)))
    check(calls, (q, k, v), is_causal=True)


def test_dropout(device, calls):
    """Weights are dropped at this rate and scaled up; the same generator state repeats the draw."""
    q, k, _ = heads_first(device, lengths=(64, 64))
    v = torch.eye(64, device=device).expand(2, 4, 64, 64)
    weights = exact(q, k, v).float()
    with sdpa.register():
        torch.manual_seed(1)
        first, second = (F.scaled_dot_product_attention(q, k, v, dropout_p=0.25) for _ in range(2))
        torch.manual_seed(1)
        again = F.scaled_dot_product_attention(q, k, v, dropout_p=0.25)
    assert len(calls) == 3
    assert_identical(again, first, "the same generator state")
    assert not torch.equal(first, second)
    kept = first != 0
    assert 0.73 < kept.float().mean() < 0.77
    torch.testing.assert_close(first[kept], (weights / 0.75)[kept], rtol=1e-3, atol=1e-5)


def test_autocast(device, calls):
    tensors = heads_first(device)
    with sdpa.register(), torch.autocast(device.type, torch.bfloat16):
        out = F.scaled_dot_product_attention(*tensors)
    assert out.dtype == torch.bfloat16 and calls[0][0].dtype == torch.bfloat16


def test_inference_mode(device, calls):
    tensors = heads_first(device)
    wanted = exact(*tensors)
    with sdpa.register(), torch.inference_mode():
        inside = F.scaled_dot_product_attention(*tensors)
        made_inside = F.scaled_dot_product_attention(*(t.clone() for t in tensors))
    assert len(calls) == 2
    for out in (inside, made_inside):
        assert_close_2x(out, wanted, plain(*tensors), "out", floor=2e-6)


def test_second_derivatives(device):
    """torch's fused backward has none."""
    tensors = [t.double().requires_grad_() for t in heads_first(device, lengths=(3, 4), dims=(3, 2))]
    with sdpa.register():
        assert torch.autograd.gradgradcheck(F.scaled_dot_product_attention, tensors)


# What goes to torch -----------------------------------------------------------------------------------------

def left_to_torch(device):
    q, k, v = heads_first(device)
    mask = torch.randn(33, 33, device=device)
    numbers = torch.zeros(33, 33, dtype=torch.int32, device=device)
    return {
        "a batch that broadcasts": ((q, k[:1], v[:1]), {}),
        "one KV head without enable_gqa": ((q, k[:, :1], v[:, :1]), {}),
        "five dimensions": (tuple(t[None] for t in (q, k, v)), {}),
        "two dimensions": (tuple(t[0, 0] for t in (q, k, v)), {}),
        "no queries": ((q[:, :, :0], k, v), {}),
        "no keys": ((q, k[:, :, :0], v[:, :, :0]), {}),
        "a mask that broadcasts over keys": ((q, k, v), {"attn_mask": mask[:, :1]}),
        "a mask and is_causal": ((q, k, v), {"attn_mask": mask, "is_causal": True}),
        "other head dims": ((q, k[..., :8], v), {}),
        "other dtypes": ((q, k.double(), v), {}),
        "a mask of numbers": ((q, k, v), {"attn_mask": numbers}),
        "a vector as mask": ((q, k, v), {"attn_mask": mask[0]}),
        "GQA with a remainder": ((q[:, :3], k[:, :2], v[:, :2]), {"enable_gqa": True}),
        "dropout of 1.5": ((q, k, v), {"dropout_p": 1.5}),
    }


def outcome(call):
    """What it returns, or says: torch has refusals of its own."""
    try:
        return call()
    except (RuntimeError, ValueError, IndexError) as refusal:  # NotImplementedError is a RuntimeError
        return f"{type(refusal)} {refusal}"


def assert_same_outcome(ours, wanted):
    assert type(ours) is type(wanted)
    assert ours == wanted if isinstance(ours, str) else torch.equal(ours, wanted)


@pytest.mark.parametrize("case", left_to_torch("cpu"))
def test_left_to_torch(case, device, calls):
    """The bits of torch, or its error."""
    tensors, options = left_to_torch(device)[case]
    attend = functools.partial(F.scaled_dot_product_attention, *tensors, **options)
    wanted = outcome(attend)
    with sdpa.register():
        assert_same_outcome(outcome(attend), wanted)
    assert not calls


def test_gradients_of_what_is_left_to_torch(device, calls):
    tensors, _ = left_to_torch(device)["a batch that broadcasts"]
    dout = torch.randn_like(tensors[0])
    wanted = gradients(F.scaled_dot_product_attention, tensors, dout)
    with sdpa.register():
        for ours, expected in zip(gradients(F.scaled_dot_product_attention, tensors, dout), wanted,
                                  strict=True):
            assert_identical(ours, expected, "result")
    assert not calls


def test_a_chosen_backend_is_obeyed(device, calls):
    tensors = heads_first(device)
    with sdpa.register(), sdpa_kernel(SDPBackend.MATH):
        F.scaled_dot_product_attention(*tensors)
        assert not calls
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            F.scaled_dot_product_attention(*tensors)
    assert len(calls) == 1


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
def test_nested_tensors(layout, device, calls):
    parts = [torch.randn(n, 4, 16, device=device) for n in (5, 9)]
    with sdpa.register():
        nested = torch.nested.nested_tensor(parts, layout=layout).transpose(1, 2)
        nested = nested.contiguous() if layout == torch.strided else nested
        outs = F.scaled_dot_product_attention(nested, nested, nested).transpose(1, 2).unbind()
    assert not any(q.is_nested for q, *_ in calls)
    for out, part in zip(outs, parts, strict=True):
        t = part.transpose(0, 1)
        torch.testing.assert_close(out, exact(t, t, t).transpose(0, 1).float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("transform", ["vmap", "grad", "jvp", "dual"])
def test_transforms_are_left_to_torch(transform, device, calls):
    """Torch's result, or its refusal."""
    q, k, v = heads_first(device)

    def attend(v):
        return F.scaled_dot_product_attention(q, k, v)

    def run():
        if transform == "vmap":
            return torch.vmap(attend)(torch.stack([v, 2 * v]))
        if transform == "grad":
            return torch.func.grad(lambda v: attend(v).square().sum())(v)
        if transform == "jvp":
            return torch.func.jvp(attend, (v,), (v,))[1]
        with forward_ad.dual_level():
            return forward_ad.unpack_dual(attend(forward_ad.make_dual(v, v))).tangent

    wanted = outcome(run)
    with sdpa.register():
        assert_same_outcome(outcome(run), wanted)
    assert not calls


def test_tensor_subclasses_are_left_to_torch(device, calls):
    class Marked(torch.Tensor):
        pass

    tensors = heads_first(device)
    with sdpa.register():
        out = F.scaled_dot_product_attention(*(t.as_subclass(Marked) for t in tensors))
    assert type(out) is Marked and not calls


# Registering ------------------------------------------------------------------------------------------------

def served(calls, tensors):
    before = len(calls)
    F.scaled_dot_product_attention(*tensors)
    return len(calls) > before


def test_the_end_of_a_registration(device, calls):
    tensors = heads_first(device)
    before = F.scaled_dot_product_attention(*tensors)
    assert not calls
    outer = sdpa.register()
    with sdpa.register():
        assert served(calls, tensors)
    assert served(calls, tensors), "another registration lasts"
    outer.remove()
    outer.remove()
    assert not served(calls, tensors)
    assert_identical(F.scaled_dot_product_attention(*tensors), before, "torch's own again")
    with pytest.raises(ZeroDivisionError), sdpa.register():
        1 / 0  # noqa: B018
    assert not served(calls, tensors)


@pytest.mark.skipif(not hasattr(torch.nn.attention, "activate_flash_attention_impl"),
                    reason="this torch has no registry of implementations")
def test_torchs_registry(device, calls):
    from torch.nn import attention

    assert "flashattn" in attention.list_flash_attention_impls()
    tensors = heads_first(device)
    attention.activate_flash_attention_impl("flashattn")
    try:
        assert attention.current_flash_attention_impl() == "flashattn" and served(calls, tensors)
    finally:
        attention.restore_flash_attention_impl()
    assert not served(calls, tensors)


# Users ------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("mask", [None, "causal", "padding"])
def test_multihead_attention(mask, device, calls):
    layer = torch.nn.MultiheadAttention(32, 4, batch_first=True, device=device)
    x = torch.randn(2, 9, 32, device=device)
    options = {"need_weights": False}
    if mask == "causal":
        hidden = torch.nn.Transformer.generate_square_subsequent_mask(9, device=device)
        options |= {"attn_mask": hidden, "is_causal": True}
    elif mask == "padding":
        lengths = torch.tensor([[9], [6]], device=device)
        options["key_padding_mask"] = torch.arange(9, device=device) >= lengths

    def run():
        layer.zero_grad()
        leaf = x.clone().requires_grad_()
        out, _ = layer(leaf, leaf, leaf, **options)
        out.square().mean().backward()
        return out.detach(), leaf.grad, layer.in_proj_weight.grad

    wanted = run()
    with sdpa.register():
        for ours, expected in zip(run(), wanted, strict=True):
            torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)
    assert len(calls) == 1


def test_transformer_encoder_trains_as_before(device, calls):
    """Three steps of a layer with dropout 0, causal and not: the same losses."""
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True, device=device)
    start = {name: t.clone() for name, t in layer.state_dict().items()}
    x, y = torch.randn(2, 2, 9, 32, device=device)
    causal = torch.nn.Transformer.generate_square_subsequent_mask(9, device=device)

    def losses():
        layer.load_state_dict(start)
        optimizer, seen = torch.optim.SGD(layer.parameters(), lr=0.1), []
        for mask in (None, causal, None):
            loss = (layer(x, src_mask=mask, is_causal=mask is not None) - y).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            seen.append(loss.item())
        return seen

    wanted = losses()
    with sdpa.register():
        assert losses() == pytest.approx(wanted, rel=1e-4)
    assert len(calls) == 3


@pytest.mark.parametrize("dynamic", [True, None])
def test_compiled_user(dynamic, device, calls):
    """The graph holds this operator, forward and backward, and stays right at other lengths."""
    seen = []

    def inspect(graph, _):
        seen.extend(str(node.target) for node in graph.graph.nodes)
        return graph

    def attend(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True) + 1

    compiled = torch.compile(attend, fullgraph=True, dynamic=dynamic,
                             backend=aot_autograd(fw_compiler=inspect, bw_compiler=inspect))
    for length in (9, 12, 20):
        tensors = heads_first(device, lengths=(length, length))
        dout = torch.randn_like(tensors[0])
        with sdpa.register():
            ours = gradients(compiled, tensors, dout)
            for result, eager in zip(ours, gradients(attend, tensors, dout), strict=True):
                assert_identical(result, eager, "result")
    assert {"flashattn.forward.default", "flashattn.backward.default"} <= set(seen)
    assert not any("scaled_dot_product" in name for name in seen)


def test_exported_user(device, calls):
    """An exported program keeps torch's operator: who serves it is decided where it runs."""
    class Layer(torch.nn.Module):
        def forward(self, q, k, v):
            return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    tensors = heads_first(device, heads=(4, 2))
    program = torch.export.export(Layer(), tensors).module()
    wanted = program(*tensors)
    assert not calls
    with sdpa.register():
        again = torch.export.export(Layer(), tensors).module()
        calls.clear()
        ours = program(*tensors)
    assert len(calls) == 1
    torch.testing.assert_close(ours, wanted, rtol=1e-5, atol=1e-5)
    assert_identical(again(*tensors), wanted, "torch's own again")
