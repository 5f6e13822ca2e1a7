"""Plain, readable language models: GPT, Llama and MoE. The recipe decides their precision, not this code."""

from __future__ import annotations

from narrowgauge.models.gpt import GPT, GPTConfig
from narrowgauge.models.llama import Llama, LlamaConfig
from narrowgauge.models.moe import MoE, MoEConfig
from narrowgauge.models.weights import VOCAB_MULTIPLE, init_weights, pad_vocab

__all__ = [
    "GPT",
    "VOCAB_MULTIPLE",
    "GPTConfig",
    "Llama",
    "LlamaConfig",
    "MoE",
    "MoEConfig",
    "init_weights",
    "pad_vocab",
]
