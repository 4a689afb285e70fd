"""flashattn as an attention backend of vLLM (written against the interface of 0.33).

An installed flashattn registers itself through vLLM's plugins, as the backend that vLLM calls CUSTOM:

    vllm serve MODEL --attention-backend CUSTOM

It serves self-attention of decoders, prefill, chunked prefill and decode mixed in a batch, against the paged
cache: grouped-query heads, sliding windows, soft caps, ALiBi, sinks, caches that layers share.  vLLM is told
of what is not served before a model is loaded; what it asks for nevertheless is an error by name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
)

import flashattn

CACHE_DTYPES = ("auto", "float16", "bfloat16", "float32")  # the cache is in the dtype of the keys


def register() -> None:
    """Make this the backend CUSTOM.  vLLM's plugins call it (entry point ``vllm.general_plugins``)."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(AttentionBackendEnum.CUSTOM, f"{__name__}.{Backend.__name__}")


class Backend(AttentionBackend):
    """What vLLM asks before it loads a model."""

    accept_output_buffer: bool = True
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[str]] = list(CACHE_DTYPES)

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[Implementation]:
        return Implementation

    @staticmethod
    def get_builder_cls() -> type[Builder]:
        return Builder

    @staticmethod
    def get_kv_cache_shape(num_blocks: int, block_size: int, num_kv_heads: int, head_size: int,
                           cache_dtype_str: str = "auto") -> tuple[int, ...]:
        """Keys and values, pages of any size."""
        return 2, num_blocks, block_size, num_kv_heads, head_size

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return attn_type == AttentionType.DECODER

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_non_causal(cls) -> bool:
        return False

    @classmethod
    def supports_mm_prefix(cls) -> bool:
        return False

    @classmethod
    def is_mla(cls) -> bool:
        return False

    @classmethod
    def is_sparse(cls) -> bool:
        return False


@dataclass
class Metadata:
    """A batch of R requests with T tokens, for all layers.

    Attributes:
        tokens: T, without padding.
        longest_query: most tokens of a request.
        query_starts: (R + 1) int32, the first token of each request.
        lengths: (R) int32, tokens of each request that will be in the cache.
        pages: (R, pages) int32, the page of the cache for each page of a request.
        slots: (T) int64, where a token goes in the cache, counted over its pages; -1: nowhere.
    """

    tokens: int
    longest_query: int
    query_starts: Tensor
    lengths: Tensor
    pages: Tensor
    slots: Tensor


class Builder(AttentionMetadataBuilder[Metadata]):
    """Hands over vLLM's own tensors, which lie where they are in every replay of a CUDA graph.

    Graphs are for batches with one number of tokens a request: the longest query is a number of the host.
    """

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH

    def __init__(self, kv_cache_spec, layer_names: list[str], vllm_config, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata,
              fast_build: bool = False) -> Metadata:
        """A common prefix needs no treatment of its own: its pages are read through the page table.

        Raises:
            NotImplementedError: the batch is not causal, or asks for spans without causality.
        """
        common = common_attn_metadata
        _refuse(common.causal is not True, "causal", common.causal, "True")
        spans = getattr(common, "mm_req_doc_ranges", None)
        _refuse(bool(spans), "mm_req_doc_ranges", spans, "None")
        return Metadata(common.num_actual_tokens, common.max_query_len, common.query_start_loc,
                        common.seq_lens, common.block_table_tensor, common.slot_mapping)


class Implementation(AttentionImpl[Metadata]):
    """Attention of one layer.

    Raises:
        NotImplementedError: an argument asks for what is not served; the text names it.
    """

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        _refuse(kv_cache_dtype not in CACHE_DTYPES, "kv_cache_dtype", kv_cache_dtype,
                f"one of {CACHE_DTYPES}")
        _refuse(attn_type != AttentionType.DECODER, "attn_type", attn_type, "self-attention of a decoder")
        for name in ("dcp_world_size", "pcp_world_size"):
            size = getattr(self, name, 1)
            _refuse(size != 1, name, size, "1: context parallelism is not implemented")
        self.num_heads, self.head_size, self.scale = num_heads, head_size, scale
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        window = None if sliding_window is None else (sliding_window - 1, 0)  # its own key counts
        self.options = {
            "causal": True, "window": window, "scale": float(scale), "softcap": float(logits_soft_cap or 0),
            "sink": sinks,
            "alibi_slopes": None if alibi_slopes is None else torch.tensor(alibi_slopes, dtype=torch.float32),
        }

    def forward(
        self,
        layer: torch.nn.Module,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        kv_cache: Tensor,
        attn_metadata: Metadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Write the new keys and values into the cache, then attend to all of it.

        Args:
            layer: has nothing that is needed here.
            query: (tokens, Hq, D); rows from attn_metadata.tokens on are padding.
            key, value: (tokens, Hk, D); None where the cache is another layer's.
            kv_cache: (2, pages, page_size, Hk, D).
            attn_metadata: None in vLLM's profiling run.
            output: (tokens, Hq, D) or (tokens, Hq * D), receives the result; padding is not written.

        Returns: output.
        """
        _refuse(output_scale is not None, "output_scale", output_scale, "None")
        _refuse(output_block_scale is not None, "output_block_scale", output_block_scale, "None")
        if attn_metadata is None:
            return output.fill_(0)
        batch, caches = attn_metadata, kv_cache.unbind(0)
        if key is not None and value is not None and self.kv_sharing_target_layer_name is None:
            # Slots of no token become slot 0: page 0 belongs to no request.
            slots = batch.slots[:batch.tokens].clamp(min=0)
            for cache, new in zip(caches, (key, value)):
                cache.flatten(0, 1).index_copy_(0, slots, new[:batch.tokens].view(-1, *cache.shape[2:]))
        slopes = self.options["alibi_slopes"]
        if slopes is not None and slopes.device != query.device:
            self.options["alibi_slopes"] = slopes.to(query.device)
        rows = (batch.tokens, self.num_heads, self.head_size)
        flashattn.decode(query[:batch.tokens].view(rows), *caches, cache_seqlens=batch.lengths,
                         page_table=batch.pages, cu_seqlens_q=batch.query_starts,
                         max_seqlen_q=batch.longest_query, out=output[:batch.tokens].view(rows),
                         **self.options)
        return output


def _refuse(refused: bool, name: str, value: object, accepted: str) -> None:
    if refused:
        raise NotImplementedError(f"{name} is {value!r}: flashattn's backend of vLLM expects {accepted}")
