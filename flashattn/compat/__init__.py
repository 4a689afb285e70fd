"""FlashAttention's Python interface over this package: the same names, arguments and results.

``flash_attn`` and ``bert_padding``, ``layers.rotary`` stand for the package of FlashAttention-2 (2.8),
``flash_attn_interface`` for that of FlashAttention-3.  docs/flash_attn.md says which arguments are honoured,
which only tune, and which are refused.
"""
