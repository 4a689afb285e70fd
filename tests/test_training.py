"""A small Llama-style model learns the same with our attention as with torch's.

Two runs from one seed drift apart even when only the order of sums differs: the measure is how far torch's
own backends drift from each other.
"""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import flashattn
from llama import Layer, rotary_tables, rotate

VOCABULARY = 64


def ours(q, k, v):
    return flashattn.forward(q, k, v, causal=True)


def torchs(q, k, v):
    return F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=True,
                                          enable_gqa=True).transpose(1, 2)


def texts(steps, batch, length, device):
    """Sequences whose next token follows from the last one and the one before, nine times out of ten."""
    generator = torch.Generator().manual_seed(7)
    table = torch.randint(VOCABULARY, (VOCABULARY, 4), generator=generator)
    x = torch.randint(VOCABULARY, (steps, batch, length + 1), generator=generator)
    chance = torch.rand(x.shape, generator=generator)
    for i in range(2, length + 1):
        x[..., i] = torch.where(chance[..., i] < 0.1, x[..., i], table[x[..., i - 1], x[..., i - 2] % 4])
    return x.to(device)


def losses(attend, setting, device, steps, width, heads, heads_k, dim, batch, length):
    torch.manual_seed(0)
    embedding, head = nn.Embedding(VOCABULARY, width), nn.Linear(width, VOCABULARY, bias=False)
    layers = nn.ModuleList(Layer(width, heads, heads_k, dim) for _ in range(3))
    model = nn.ModuleList([embedding, layers, head]).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95))
    tables = rotary_tables(length, dim, device)
    curve = []
    for tokens in texts(steps, batch, length, device):
        with setting(), torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            x = embedding(tokens[:, :-1])
            for layer in layers:
                x = layer(x, lambda q, k, v: attend(rotate(q, *tables), rotate(k, *tables), v))
            loss = F.cross_entropy(head(x).flatten(0, 1).float(), tokens[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        curve.append(loss.detach())
    return torch.stack(curve).cpu()


def distance(curve, other):
    return (curve - other).abs().mean().item()


@pytest.mark.parametrize("dim", [64, 128])
def test_a_model_learns_the_same(device, dim):
    on_card = device.type == "cuda"
    sizes = (200, 512, 512 // dim, 2, dim, 8, 512) if on_card else (25, 64, 4, 2, dim // 8, 2, 64)
    backends = ([SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION] if on_card
                else [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH])
    theirs = [losses(torchs, lambda backend=backend: sdpa_kernel(backend), device, *sizes)
              for backend in backends]
    mine = losses(ours, contextlib.nullcontext, device, *sizes)
    if on_card:
        assert mine[0] > 3.5 and mine[-20:].mean() < 2  # it learns something
    noise = distance(*theirs)
    for curve in theirs:
        assert distance(mine, curve) < 2 * noise + 1e-6
