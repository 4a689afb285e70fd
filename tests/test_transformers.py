"""The registration with transformers: small random models against their own attention, and a real encoder.

The models run in float32; the oracle is the same model in float64 with eager attention, "plain" is eager
float32.  Where a batch is padded the oracle runs each sequence alone: eager attention with a float64 mask
turns rows without a visible key into NaN.
"""

import itertools

import pytest
import torch
import transformers
from transformers.masking_utils import causal_mask_function, sdpa_mask, sliding_window_causal_mask_function

from compare import assert_close_2x
from flashattn import demo, reference
from flashattn.integrations.transformers import attention, attention_mask, register

NAME = register()
SMALL = dict(vocab_size=97, hidden_size=48, intermediate_size=64, num_hidden_layers=3, num_attention_heads=6)
DECODER = SMALL | dict(num_key_value_heads=2, head_dim=8, max_position_embeddings=64, pad_token_id=0)


def build(kind, **changes):
    """A small randomly initialised model, in evaluation mode."""
    torch.manual_seed(1)
    if kind == "bert":
        model = transformers.BertModel(transformers.BertConfig(**SMALL))
    elif kind == "llama":
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**DECODER, **changes))
    elif kind == "mistral":
        model = transformers.MistralForCausalLM(transformers.MistralConfig(**DECODER, sliding_window=4))
    elif kind == "gemma2":
        model = transformers.Gemma2ForCausalLM(transformers.Gemma2Config(
            **DECODER, sliding_window=4, attn_logit_softcapping=2.0, query_pre_attn_scalar=3))
    elif kind == "gpt_oss":
        model = transformers.GptOssForCausalLM(transformers.GptOssConfig(
            **DECODER, num_local_experts=2, num_experts_per_tok=1, sliding_window=4))
        model.set_experts_implementation("eager")                        # the other ones refuse float64
    return model.eval()


def in_three_ways(model, run, run_eager=None):
    """run(model) with our attention in float32, then run_eager(model) with eager in float64 and float32."""
    results = []
    for implementation, dtype in ((NAME, torch.float32), ("eager", torch.float64), ("eager", torch.float32)):
        model.set_attn_implementation(implementation)
        chosen = run if implementation == NAME or run_eager is None else run_eager
        results.append(chosen(model.to(dtype)))
    model.to(torch.float32)
    return results


def padded_batch(side):
    """Token ids (3, 11), their padding mask and positions, and the three sequences alone."""
    sequences = [torch.randint(1, 97, (n,)) for n in (11, 4, 7)]
    ids, real = (torch.zeros(3, 11, dtype=torch.long) for _ in range(2))
    for b, sequence in enumerate(sequences):
        at = slice(0, len(sequence)) if side == "right" else slice(11 - len(sequence), 11)
        ids[b, at], real[b, at] = sequence, 1
    return ids, real, (real.cumsum(1) - 1).clamp(min=0), sequences


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("kind", ["bert", "llama", "mistral", "gemma2", "gpt_oss"])
def test_a_padded_batch_equals_each_sequence_alone(kind, side):
    ids, real, positions, sequences = padded_batch(side)
    model = build(kind)

    @torch.no_grad()
    def batch(m):
        states = m(ids, attention_mask=real, position_ids=positions, output_hidden_states=True).hidden_states
        return torch.stack(states)[:, real.bool()]

    @torch.no_grad()
    def alone(m):
        states = [torch.stack(m(s[None], output_hidden_states=True).hidden_states)[:, 0] for s in sequences]
        return torch.cat(states, dim=1)

    assert_close_2x(*in_three_ways(model, batch, alone), kind)


@pytest.mark.parametrize("side", ["left", "right"])
def test_gradients_of_a_padded_batch(side):
    ids, real, positions, sequences = padded_batch(side)
    model = build("llama")

    def gradients(m, losses):
        m.zero_grad()
        torch.stack(losses).sum().backward()
        return {name: p.grad.clone() for name, p in m.named_parameters()}

    def loss(logits, labels):
        return torch.nn.functional.cross_entropy(logits[:-1], labels[1:], reduction="sum")

    def batch(m):
        logits = m(ids, attention_mask=real, position_ids=positions).logits
        return gradients(m, [loss(logits[b, real[b].bool()], s) for b, s in enumerate(sequences)])

    def alone(m):
        return gradients(m, [loss(m(s[None]).logits[0], s) for s in sequences])

    ours, oracle, plain = in_three_ways(model, batch, alone)
    for name in ours:
        assert_close_2x(ours[name], oracle[name], plain[name], name)


def test_position_bias_gradient_and_cross_attention():
    torch.manual_seed(1)
    model = transformers.T5ForConditionalGeneration(transformers.T5Config(
        vocab_size=97, d_model=48, d_kv=8, d_ff=64, num_layers=2, num_heads=6, dropout_rate=0.0,
        decoder_start_token_id=0)).eval()
    ids, real, _, _ = padded_batch("right")
    labels = torch.randint(1, 97, (3, 6))

    def run(m):
        m.zero_grad()
        out = m(input_ids=ids, attention_mask=real, labels=labels)
        out.loss.backward()
        bias = [p.grad.clone() for name, p in m.named_parameters() if "relative_attention_bias" in name]
        assert len(bias) == 2
        return out.logits, *bias

    for name, *tensors in zip(("logits", "encoder bias", "decoder bias"), *in_three_ways(model, run)):
        assert_close_2x(*tensors, name)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("kind", ["llama", "mistral", "gemma2", "gpt_oss"])
def test_generation_from_left_padded_prompts_equals_each_prompt_alone(kind, cache):
    ids, real, _, sequences = padded_batch("left")
    model = build(kind)

    def generate(m, prompts, mask, cache):
        out = m.generate(prompts, attention_mask=mask, max_new_tokens=6, do_sample=False, eos_token_id=None,
                         cache_implementation=cache, return_dict_in_generate=True, output_logits=True)
        return out.sequences[:, prompts.shape[1]:], torch.stack(out.logits, dim=1)

    def batch(m):
        return generate(m, ids, real, cache)

    def alone(m):
        parts = [generate(m, s[None], torch.ones_like(s)[None], "dynamic") for s in sequences]
        return tuple(map(torch.cat, zip(*parts)))

    ours, oracle, plain = in_three_ways(model, batch, alone)
    assert torch.equal(ours[0], oracle[0]) and torch.equal(plain[0], oracle[0])
    assert_close_2x(ours[1], oracle[1], plain[1], "logits")


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_a_prompt_in_chunks_equals_the_whole_prompt(cache):
    ids = torch.randint(1, 97, (2, 12))
    model = build("llama")

    @torch.no_grad()
    def chunks(m):
        past = transformers.DynamicCache() if cache == "dynamic" else transformers.StaticCache(m.config, 20)
        return torch.cat([m(part, cache=past).logits for part in ids.split([5, 1, 4, 2], dim=1)], dim=1)

    @torch.no_grad()
    def whole(m):
        return m(ids).logits

    ours = in_three_ways(model, chunks)[0]
    assert_close_2x(ours, *in_three_ways(model, whole)[1:], "logits")


def test_packed_sequences_by_position_ids():
    lengths = (5, 3, 4)
    ids = torch.randint(1, 97, (1, sum(lengths)))
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    model = build("llama")

    @torch.no_grad()
    def packed(m):
        return m(ids, position_ids=positions, use_cache=False).logits

    @torch.no_grad()
    def apart(m):
        return torch.cat([m(part, use_cache=False).logits for part in ids.split(lengths, dim=1)], dim=1)

    ours = in_three_ways(model, packed)[0]
    assert_close_2x(ours, *in_three_ways(model, apart)[1:], "logits")


def test_a_decoder_made_bidirectional_by_its_configuration():
    ids = torch.randint(1, 97, (2, 9))
    model = build("llama", is_causal=False)

    @torch.no_grad()
    def run(m):
        return m.model(ids).last_hidden_state

    ours, oracle, plain = in_three_ways(model, run)
    assert_close_2x(ours, oracle, plain, "states")
    model.config.is_causal = True
    assert (in_three_ways(model, run)[0] - ours).abs().max() > 1e-3      # the flag changes the answer


@pytest.mark.parametrize("floating", [False, True])
def test_masks_made_by_the_user(floating):
    ids = torch.randint(1, 97, (2, 9))
    visible = torch.rand(2, 1, 9, 9) < 0.5
    visible |= torch.eye(9, dtype=torch.bool)
    model = build("llama")

    @torch.no_grad()
    def run(m):
        if m.config._attn_implementation == NAME and not floating:
            return m(ids, attention_mask=visible).logits
        additive = torch.zeros(visible.shape, dtype=m.dtype).masked_fill(~visible, torch.finfo(m.dtype).min)
        return m(ids, attention_mask=additive).logits                    # the one form that eager understands

    assert_close_2x(*in_three_ways(model, run), "logits")


def test_the_real_encoder_on_a_padded_batch():
    eager, sdpa, ours = (demo.embed(demo.SENTENCES, name) for name in ("eager", "sdpa", NAME))
    theirs = (sdpa - eager).abs().max().item()
    assert 0 < theirs < 1e-5
    assert (ours - eager).abs().max().item() <= 2 * theirs
    alone = torch.cat([demo.embed((sentence,), NAME) for sentence in demo.SENTENCES[:3]])
    assert (ours[:3] - alone).abs().max().item() <= 1e-6                 # padding changes only rounding


class Layer(torch.nn.Module):
    is_causal = True


def qkv(len_q=5, len_k=5, dim_v=8, dtype=torch.float32):
    return (torch.randn(2, 6, len_q, 8, dtype=dtype), torch.randn(2, 2, len_k, 8, dtype=dtype),
            torch.randn(2, 2, len_k, dim_v, dtype=dtype))


@pytest.mark.parametrize("options, meaning", [
    ({}, {}),
    ({"scaling": 0.7}, {"scale": 0.7}),
    ({"softcap": 1.5}, {"softcap": 1.5}),
    ({"softcap": None, "sliding_window": None, "output_attentions": False, "indices": None}, {}),
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


@pytest.mark.parametrize("keyword, value", [
    ("indices", torch.zeros(2, 5, 3, dtype=torch.long)),
    ("block_indices", torch.zeros(2, 5, 1, dtype=torch.long)),
    ("sinks", torch.zeros(2, 6, 5, 1)),
    ("cu_seq_lens_q", torch.tensor([0, 5])),
    ("cu_seq_lens_k", torch.tensor([0, 5])),
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


def test_a_mask_is_left_out_only_where_bottom_right_causality_says_the_same():
    left_out = 0
    functions = ((None, causal_mask_function), (3, sliding_window_causal_mask_function(3)))
    sizes = itertools.product((1, 2, 5), (1, 2, 5, 7), (0, 1, 3), (0, 2))
    for q_length, kv_length, q_offset, kv_offset in sizes:
        for padding in (None, torch.ones(2, kv_length + kv_offset, dtype=torch.bool),
                        torch.arange(kv_length + kv_offset) >= torch.tensor([[0], [1]])):
            for local_size, function in functions:
                for skip in (True, False):
                    arguments = dict(batch_size=2, q_length=q_length, kv_length=kv_length, q_offset=q_offset,
                                     kv_offset=kv_offset, mask_function=function, attention_mask=padding,
                                     local_size=local_size)
                    expected = sdpa_mask(**arguments, allow_is_causal_skip=False)
                    got = attention_mask(**arguments, allow_is_causal_skip=skip)
                    if got is None:
                        assert skip
                        left_out += 1
                        got = torch.ones(q_length, kv_length, dtype=torch.bool).tril(kv_length - q_length)
                    assert torch.equal(got.expand_as(expected), expected), arguments
    assert left_out > 10
    assert attention_mask(2, 1, 9, torch.tensor(4)) is not None          # a static cache's offset: a tensor


@pytest.mark.parametrize("name", ["flashattn", "my/attention", "paged|exact", "sdpa_exact", "flex_attention"])
def test_names_that_transformers_would_misread_are_refused(name):
    with pytest.raises(ValueError, match="name="):
        register(name)
