"""The backend of vLLM, by its interface: batches of requests against a paged cache, and what is refused."""

import importlib
import re
import types
from pathlib import Path

import pytest
import torch

import fake_vllm
from compare import assert_close_2x, assert_identical
from flashattn import reference

HEADS, KV_HEADS, DIM, PAGE, PAGES = 4, 2, 16, 8, 40


@pytest.fixture
def vllm(monkeypatch):
    """flashattn.integrations.vllm, beside a vLLM of the tests."""
    fake_vllm.install(monkeypatch)
    module = importlib.import_module("flashattn.integrations.vllm")
    yield module
    monkeypatch.delitem(importlib.sys.modules, "flashattn.integrations.vllm")


class Engine:
    """What vLLM does around a layer: pages for each request, batches, and the history to check against."""

    def __init__(self, backend, device, dtype, sharing=False, **options):
        self.device, self.options, self.dtype = device, options, dtype
        shape = backend.get_kv_cache_shape(PAGES, PAGE, KV_HEADS, DIM)
        self.cache = torch.full(shape, float("nan"), dtype=dtype, device=device)
        self.cache[:, 0] = 0                                             # the page of no request
        self.layer = backend.get_impl_cls()(HEADS, DIM, DIM**-0.5, KV_HEADS, **options)
        self.builder = backend.get_builder_cls()(None, ["layer"], None, device)
        self.reader = None
        if sharing:
            self.reader = backend.get_impl_cls()(HEADS, DIM, DIM**-0.5, KV_HEADS, **options,
                                                 kv_sharing_target_layer_name="layer")
        self.free = torch.randperm(PAGES - 1).add(1).tolist()
        self.table = torch.zeros(3, 10, dtype=torch.int32, device=device)
        self.history = [[torch.empty(0, KV_HEADS, DIM, dtype=dtype, device=device)] * 2 for _ in range(3)]

    def metadata(self, counts, padding):
        """Of a step that adds so many tokens to each request; extends the page table as it needs."""
        slots, lengths = [], []
        for request, count in enumerate(counts):
            length = len(self.history[request][0])
            for position in range(length, length + count):
                if position % PAGE == 0:
                    self.table[request, position // PAGE] = self.free.pop()
                slots.append(int(self.table[request, position // PAGE]) * PAGE + position % PAGE)
            lengths.append(length + count)
        starts = torch.tensor([0, *torch.tensor(counts).cumsum(0)], dtype=torch.int32)
        common = fake_vllm.CommonAttentionMetadata(
            query_start_loc=starts.to(self.device), query_start_loc_cpu=starts,
            seq_lens=torch.tensor(lengths, dtype=torch.int32, device=self.device), num_reqs=len(counts),
            num_actual_tokens=sum(counts), max_query_len=max(counts), max_seq_len=max(lengths),
            block_table_tensor=self.table,
            slot_mapping=torch.tensor(slots + [-1] * padding, device=self.device))
        return self.builder.build(0, common)

    def step(self, counts, padding=0, flat=False):
        """New tokens through the layer; the result of each request against the oracle."""
        total = sum(counts)
        qkv = torch.randn(total + padding, HEADS + 2 * KV_HEADS, DIM, dtype=self.dtype, device=self.device)
        q, k, v = qkv.split((HEADS, KV_HEADS, KV_HEADS), 1)
        metadata = self.metadata(counts, padding)
        shape = (total + padding, HEADS * DIM) if flat else q.shape
        out = torch.full(shape, 7.0, dtype=self.dtype, device=self.device)
        assert self.layer.forward(None, q, k, v, self.cache, metadata, out) is out
        assert (out[total:] == 7).all(), "padding is untouched"
        if self.reader:
            again = torch.empty_like(out)
            self.reader.forward(None, q, None, None, self.cache, metadata, again)
            assert_identical(again[:total], out[:total], "a layer that shares the cache")
        out = out.view(q.shape)
        for request, parts in enumerate(zip(*(t[:total].split(counts) for t in (q, k, v, out)))):
            self.check(request, *parts)

    def check(self, request, q, k, v, out):
        self.history[request] = [torch.cat([old, new]) for old, new in zip(self.history[request], (k, v))]
        if not len(q):
            return
        window, slopes = self.options.get("sliding_window"), self.options.get("alibi_slopes")
        options = {"causal": True, "softcap": self.options.get("logits_soft_cap") or 0.0,
                   "window": window and (window - 1, 0), "sink": self.options.get("sinks"),
                   "alibi_slopes": slopes and torch.tensor(slopes, device=self.device)}
        tensors = [t[None] for t in (q, *self.history[request])]
        exact, plain = (reference.forward(*tensors, **options, **precision)[0][0]
                        for precision in ({}, {"dtype": self.dtype}))
        assert_close_2x(out, exact, plain, f"request {request}", floor=1e-6)


OPTIONS = {
    "plain": {},
    "window": {"sliding_window": 11},
    "softcap": {"logits_soft_cap": 4.0},
    "alibi": {"alibi_slopes": [0.5, 0.25, 0.125, 0.0625]},
    "sinks": {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])},
    "all": {"sliding_window": 9, "logits_soft_cap": 4.0, "sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])},
    "a shared cache": {"sharing": True},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", OPTIONS)
def test_batches_of_requests(name, dtype, vllm, device):
    """Prefill, then chunks and single tokens in one batch, then decode, speculative tokens and padding."""
    options = {key: o.to(device) if isinstance(o, torch.Tensor) else o for key, o in OPTIONS[name].items()}
    engine = Engine(vllm.Backend, device, dtype, **options)
    engine.step((17, 8, 1))
    engine.step((1, 25, 1), padding=3)
    engine.step((1, 1, 0))
    engine.step((1, 1, 1), padding=5, flat=True)
    engine.step((4, 1, 3), flat=True)
    used = {int(page) for page in engine.table.unique()}
    unused = [page for page in range(PAGES) if page not in used]
    assert engine.cache[:, unused].isnan().all(), "pages of no request are untouched"


def test_cache_of_a_dummy_run_is_untouched(vllm, device):
    """vLLM runs batches without requests: their slots are -1, their pages anyone's."""
    engine = Engine(vllm.Backend, device, torch.float32)
    engine.step((9, 4, 2))
    before = engine.cache.clone()
    metadata = engine.metadata((0, 0, 0), 6)
    metadata.tokens, metadata.longest_query = 6, 2
    metadata.query_starts.copy_(torch.tensor([0, 2, 4, 6]))
    q = torch.randn(6, HEADS, DIM, device=device)
    k = v = torch.randn(6, KV_HEADS, DIM, device=device)
    engine.layer.forward(None, q, k, v, engine.cache, metadata, torch.empty_like(q))
    assert_identical(engine.cache[:, 1:], before[:, 1:], "cache")


def test_profiling_run(vllm, device):
    layer = vllm.Implementation(HEADS, DIM, 0.25, KV_HEADS)
    q = torch.randn(5, HEADS, DIM, device=device)
    k = torch.randn(5, KV_HEADS, DIM, device=device)
    out = layer.forward(None, q, k, k, torch.empty(0), None, torch.full_like(q, 3))
    assert not out.any()


@pytest.mark.parametrize(("options", "text"), [
    ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype is 'fp8'"),
    ({"attn_type": "encoder_only"}, "attn_type is 'encoder_only'"),
])
def test_layers_that_are_refused(options, text, vllm):
    with pytest.raises(NotImplementedError, match=text):
        vllm.Implementation(HEADS, DIM, 0.25, KV_HEADS, **options)


def test_context_parallelism_is_refused(vllm, monkeypatch):
    monkeypatch.setitem(fake_vllm.AttentionImpl.world_sizes, "dcp_world_size", 2)
    with pytest.raises(NotImplementedError, match="dcp_world_size is 2"):
        vllm.Implementation(HEADS, DIM, 0.25, KV_HEADS)


def test_calls_that_are_refused(vllm, device):
    engine = Engine(vllm.Backend, device, torch.float32)
    metadata = engine.metadata((2, 0, 0), 0)
    q, k = torch.randn(2, HEADS, DIM, device=device), torch.randn(2, KV_HEADS, DIM, device=device)
    for name in ("output_scale", "output_block_scale"):
        with pytest.raises(NotImplementedError, match=f"{name} is tensor"):
            engine.layer.forward(None, q, k, k, engine.cache, metadata, q, **{name: torch.ones(1)})
    common = types.SimpleNamespace(causal=False)
    with pytest.raises(NotImplementedError, match="causal is False"):
        engine.builder.build(0, common)
    common = types.SimpleNamespace(causal=True, mm_req_doc_ranges={0: [(1, 5)]})
    with pytest.raises(NotImplementedError, match="mm_req_doc_ranges is"):
        engine.builder.build(0, common)


def test_what_vllm_is_told(vllm):
    backend = vllm.Backend
    assert backend.get_name() == "CUSTOM" and fake_vllm.AttentionBackendEnum[backend.get_name()]
    assert backend.get_impl_cls() is vllm.Implementation and backend.get_builder_cls() is vllm.Builder
    assert backend.get_kv_cache_shape(7, 16, 2, 64) == (2, 7, 16, 2, 64)
    assert backend.supports_attn_type("decoder") and not backend.supports_attn_type("encoder_decoder")
    assert backend.supports_sink() and not backend.is_mla() and not backend.is_sparse()
    assert not backend.supports_non_causal() and not backend.supports_mm_prefix()
    assert torch.bfloat16 in backend.supported_dtypes and "fp8" not in backend.supported_kv_cache_dtypes


def test_the_plugin_registers_the_backend(vllm):
    """The entry point of the package leads to register(), and what that gives to vLLM to the backend."""
    project = (Path(__file__).parents[1] / "pyproject.toml").read_text()
    module, function = re.search(r'\[project.entry-points."vllm.general_plugins"\]\nflashattn = "(.*):(.*)"',
                                 project).groups()
    getattr(importlib.import_module(module), function)()
    path, _, name = fake_vllm.registered[fake_vllm.AttentionBackendEnum.CUSTOM].rpartition(".")
    assert getattr(importlib.import_module(path), name) is vllm.Backend
