"""A small Llama-style model generates the same tokens over our KV cache as without any, in float32."""

import functools

import pytest
import torch
from torch import nn

import flashattn
from cases import NAN, ints
from llama import Layer, rotary_tables, rotate

VOCABULARY, WIDTH, HEADS, KV_HEADS, DIM, LAYERS = 97, 64, 8, 2, 16, 3
PROMPTS, TOKENS = (37, 20), 128                               # lengths of the prompts, what is generated
PAGES = 11                                                    # of 16 keys, for each sequence


@pytest.fixture(autouse=True)
def _one_thread():
    """The matrices are so small that threads would only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Model(nn.Module):
    """Tokens of any shape to logits; attend(layer, q, k, v) gets (..., heads, DIM), not rotated yet."""

    def __init__(self):
        super().__init__()
        self.embedding, self.norm = nn.Embedding(VOCABULARY, WIDTH), nn.RMSNorm(WIDTH)
        self.layers = nn.ModuleList(Layer(WIDTH, HEADS, KV_HEADS, DIM) for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        for weight in self.parameters():
            if weight.dim() == 2:                             # large enough for sharp attention
                nn.init.normal_(weight, std=1.5 * weight.shape[1] ** -0.5)

    def forward(self, tokens, attend):
        x = self.embedding(tokens)
        for number, layer in enumerate(self.layers):
            x = layer(x, functools.partial(attend, number))
        return self.head(self.norm(x))


@functools.cache
def model_and_prompts(device):
    torch.manual_seed(0)
    model = Model()
    prompts = [torch.randint(VOCABULARY, (length,)) for length in PROMPTS]
    return model.to(device), [prompt.to(device) for prompt in prompts]


def tables(device):
    """cos and sin, (positions, DIM / 2)."""
    return tuple(table.to(device) for table in rotary_tables(16 * PAGES, DIM, "cpu"))


def turn(x, positions):
    """x (..., heads, DIM) at positions (...)."""
    return rotate(x, *(table[positions] for table in tables(x.device)))


# ---- without a cache ----

def plain(hidden, _, q, k, v):
    """Standard causal attention of one sequence, without the first keys."""
    positions = torch.arange(len(q), device=q.device)
    q, k = turn(q, positions), turn(k, positions)
    k, v = (t.repeat_interleave(HEADS // KV_HEADS, dim=1) for t in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * DIM**-0.5
    visible = (positions <= positions[:, None]) & (positions >= hidden)
    weights = scores.masked_fill(~visible, float("-inf")).softmax(-1).nan_to_num()
    return torch.einsum("hqk,khd->qhd", weights, v)


@functools.cache
def expected(device, hidden=0, tokens=TOKENS):
    """Logits (2, tokens, VOCABULARY) of greedy generation that computes the whole text for every token."""
    model, prompts = model_and_prompts(device)
    logits = []
    with torch.inference_mode():
        for text in prompts:
            for _ in range(tokens):
                logits.append(model(text, functools.partial(plain, hidden))[-1])
                text = torch.cat([text, logits[-1].argmax()[None]])
    return torch.stack(logits).unflatten(0, (2, tokens))


# ---- with one ----

class Cache:
    """Keys and values of each layer for two sequences, NaN where there are none yet."""

    def __init__(self, device, paged, rotary):
        shape = (2 * PAGES + 3, 16) if paged else (2, 16 * PAGES)
        self.layers = [[torch.full((*shape, KV_HEADS, DIM), NAN, device=device) for _ in range(2)]
                       for _ in range(LAYERS)]
        self.lengths = ints(device, 0, 0)
        self.options = {"causal": True}
        if paged:
            order = torch.randperm(shape[0], device=device).int()
            self.options["page_table"] = order[: 2 * PAGES].view(2, PAGES)
        self.rotates = rotary == "in the call"
        if self.rotates:
            self.options |= zip(("rotary_cos", "rotary_sin"), tables(device))

    def attend(self, sizes, number, q, k, v):
        """sizes: new tokens of each sequence; q, k, v are packed unless both have one."""
        packing, starts = {}, self.lengths.tolist()
        if q.dim() == 3:
            packing = {"cu_seqlens_q": ints(q.device, 0, sizes[0], sum(sizes)), "max_seqlen_q": max(sizes)}
        if not self.rotates:
            positions = torch.cat([torch.arange(start, start + n) for start, n in zip(starts, sizes)])
            positions = positions.to(q.device).view(q.shape[:-2])
            q, k = turn(q, positions), turn(k, positions)
        k_cache, v_cache = self.layers[number]
        return flashattn.decode(q, k_cache, v_cache, k_new=k, v_new=v, cache_seqlens=self.lengths,
                                **self.options, **packing)

    def run(self, model, sizes, tokens):
        logits = model(tokens, functools.partial(self.attend, sizes))
        self.lengths += ints(self.lengths.device, *sizes)
        return logits


def generate(model, prompts, cache, chunk):
    """As expected(): the prompts side by side, in chunks, then token by token."""
    last = [None, None]
    for start in range(0, max(PROMPTS), chunk):
        parts = [prompt[start : start + chunk] for prompt in prompts]
        sizes = [len(part) for part in parts]
        for b, rows in enumerate(cache.run(model, sizes, torch.cat(parts)).split(sizes)):
            last[b] = rows[-1] if sizes[b] else last[b]
    logits = [torch.stack(last)]
    while len(logits) < TOKENS:
        logits.append(cache.run(model, [1, 1], logits[-1].argmax(-1)[:, None])[:, 0])
    return torch.stack(logits, 1)


@pytest.mark.parametrize("paged", [False, True], ids=["contiguous", "paged"])
@pytest.mark.parametrize("chunk", [max(PROMPTS), 13], ids=["one prefill", "chunks"])
@pytest.mark.parametrize("rotary", ["in the call", "before it"])
def test_the_same_tokens(device, paged, chunk, rotary):
    model, prompts = model_and_prompts(device)
    with torch.inference_mode():
        logits = generate(model, prompts, Cache(device, paged, rotary), chunk)
    wanted = expected(device)
    assert logits.argmax(-1).equal(wanted.argmax(-1))
    best = wanted.topk(2).values
    assert (best[..., 0] - best[..., 1]).min() > 20 * (logits - wanted).abs().max()


def test_the_tokens_depend_on_every_key(device):
    """They vary, and without the very first key they are others."""
    tokens, others = expected(device).argmax(-1), expected(device, hidden=1, tokens=40).argmax(-1)
    for ours, theirs in zip(tokens, others):
        assert len(ours.unique()) > 40
        assert not ours[:40].equal(theirs)
