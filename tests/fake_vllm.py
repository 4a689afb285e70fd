"""What flashattn.integrations.vllm takes from vLLM 0.33: names, signatures, abstract methods."""

from __future__ import annotations

import dataclasses
import enum
import sys
import types
from abc import ABC, abstractmethod
from typing import Generic, TypeVar

import torch

M = TypeVar("M")


class AttentionType(str, enum.Enum):
    DECODER = "decoder"
    ENCODER = "encoder"
    ENCODER_ONLY = "encoder_only"
    ENCODER_DECODER = "encoder_decoder"


class AttentionCGSupport(enum.Enum):
    ALWAYS = 3
    UNIFORM_BATCH = 2
    UNIFORM_SINGLE_TOKEN_DECODE = 1
    NEVER = 0


class AttentionBackend(ABC):
    forward_includes_kv_cache_update = True

    @staticmethod
    @abstractmethod
    def get_name(): ...

    @staticmethod
    @abstractmethod
    def get_impl_cls(): ...

    @staticmethod
    @abstractmethod
    def get_builder_cls(): ...

    @staticmethod
    @abstractmethod
    def get_kv_cache_shape(num_blocks, block_size, num_kv_heads, head_size, cache_dtype_str="auto"): ...


@dataclasses.dataclass
class CommonAttentionMetadata:
    query_start_loc: torch.Tensor
    query_start_loc_cpu: torch.Tensor
    seq_lens: torch.Tensor
    num_reqs: int
    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    block_table_tensor: torch.Tensor
    slot_mapping: torch.Tensor
    causal: bool | torch.Tensor = True
    mm_req_doc_ranges: dict | None = None


class AttentionMetadataBuilder(ABC, Generic[M]):
    _cudagraph_support = AttentionCGSupport.NEVER

    @abstractmethod
    def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
        self.kv_cache_spec, self.layer_names = kv_cache_spec, layer_names
        self.vllm_config, self.device = vllm_config, device

    @abstractmethod
    def build(self, common_prefix_len, common_attn_metadata, fast_build=False): ...


class AttentionImpl(ABC, Generic[M]):
    world_sizes = {"dcp_world_size": 1, "pcp_world_size": 1}  # of the process groups

    def __new__(cls, *args, **kwargs):
        self = super().__new__(cls)
        vars(self).update(cls.world_sizes)
        return self

    @abstractmethod
    def __init__(self, num_heads, head_size, scale, num_kv_heads=None, alibi_slopes=None, sliding_window=None,
                 kv_cache_dtype="auto", logits_soft_cap=None, attn_type=AttentionType.DECODER,
                 kv_sharing_target_layer_name=None): ...

    @abstractmethod
    def forward(self, layer, query, key, value, kv_cache, attn_metadata, output, output_scale=None,
                output_block_scale=None): ...


class AttentionBackendEnum(enum.Enum):
    FLASH_ATTN = "vllm.v1.attention.backends.flash_attn.FlashAttentionBackend"
    CUSTOM = None


registered = {}


def register_backend(backend, class_path=None, is_mamba=False):
    registered[backend] = class_path
    return lambda cls: cls


def install(monkeypatch) -> None:
    """Let ``import vllm`` find this until the test ends."""
    modules = {
        "vllm.v1.attention.backend": (AttentionBackend, AttentionCGSupport, AttentionImpl,
                                      AttentionMetadataBuilder, AttentionType, CommonAttentionMetadata),
        "vllm.v1.attention.backends.registry": (AttentionBackendEnum, register_backend),
    }
    for path, members in modules.items():
        parts = path.split(".")
        for end in range(1, len(parts) + 1):
            name = ".".join(parts[:end])
            if name not in sys.modules or not hasattr(sys.modules[name], "is_fake"):
                module = types.ModuleType(name)
                module.is_fake = True
                monkeypatch.setitem(sys.modules, name, module)
        for member in members:
            setattr(sys.modules[path], member.__name__, member)
    monkeypatch.delitem(sys.modules, "flashattn.integrations.vllm", raising=False)
