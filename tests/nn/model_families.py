"""Small models of many families, as their libraries build them, with their options."""

from __future__ import annotations

from typing import Any

import torch
import transformers as hf
from torch import nn

VOCAB = 96
_SMALL = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": VOCAB,
}  # fmt: skip
_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def _hf(name: str, config: str, **options: Any) -> Any:
    def build(**more: Any) -> nn.Module:
        torch.manual_seed(0)
        settings = getattr(hf, config)(**{**_SMALL, **_TOKENS, **options, **more})
        model: nn.Module = getattr(hf, name)(settings)
        return model

    return build


class NanoBlock(nn.Module):
    """A block in nanoGPT's style: one projection for queries, keys and values, an MLP with c_fc and c_proj."""

    def __init__(self, width: int, heads: int, bias: bool) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width, bias=bias), nn.LayerNorm(width, bias=bias)
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width, bias=bias), nn.Linear(width, width, bias=bias)
        self.c_fc, self.c_out = nn.Linear(width, 4 * width, bias=bias), nn.Linear(4 * width, width, bias=bias)
        self.n_head = heads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        parts = self.c_attn(self.ln_1(x)).split(width, 2)
        q, k, v = (part.view(batch, length, self.n_head, -1).transpose(1, 2) for part in parts)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.c_out(nn.functional.gelu(self.c_fc(self.ln_2(x))))


class Nano(nn.Module):
    """A language model in nanoGPT's style: returns logits and loss, and ties its head to the embedding."""

    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        self.wte = nn.Embedding(VOCAB, 64)
        self.h = nn.ModuleList([NanoBlock(64, 4, bias), NanoBlock(64, 4, bias)])
        self.ln_f, self.lm_head = nn.LayerNorm(64, bias=bias), nn.Linear(64, VOCAB, bias=False)
        self.wte.weight = self.lm_head.weight

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        x = self.wte(input_ids)
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        loss = None
        if labels is not None:
            targets = torch.nn.functional.pad(labels, (0, 1), value=-1)[:, 1:]
            loss = nn.functional.cross_entropy(logits.view(-1, VOCAB), targets.reshape(-1), ignore_index=-1)
        return hf.modeling_outputs.CausalLMOutput(loss=loss, logits=logits)


def nano(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    return Nano(**options)


GROUPED = {"num_key_value_heads": 2}
LANGUAGE: dict[str, Any] = {
    "llama": _hf("LlamaForCausalLM", "LlamaConfig", **GROUPED),
    "llama-bias": _hf("LlamaForCausalLM", "LlamaConfig", attention_bias=True, mlp_bias=True),
    "mistral": _hf("MistralForCausalLM", "MistralConfig", **GROUPED, sliding_window=8),
    "qwen2": _hf("Qwen2ForCausalLM", "Qwen2Config", **GROUPED),
    "qwen3": _hf("Qwen3ForCausalLM", "Qwen3Config", **GROUPED, head_dim=32),
    "gemma2": _hf("Gemma2ForCausalLM", "Gemma2Config", **GROUPED, head_dim=16, sliding_window=8),
    "gemma3": _hf("Gemma3ForCausalLM", "Gemma3TextConfig", **GROUPED, head_dim=16, sliding_window=8),
    "phi3": _hf("Phi3ForCausalLM", "Phi3Config", **GROUPED),
    "phi": _hf("PhiForCausalLM", "PhiConfig"),
    "starcoder2": _hf("Starcoder2ForCausalLM", "Starcoder2Config", **GROUPED),
    "cohere": _hf("CohereForCausalLM", "CohereConfig"),
    "gpt2": _hf("GPT2LMHeadModel", "GPT2Config", n_embd=64, n_layer=2, n_head=4),
    "gpt-neox": _hf("GPTNeoXForCausalLM", "GPTNeoXConfig"),
    "bert": _hf("BertForMaskedLM", "BertConfig"),
    "roberta": _hf("RobertaForMaskedLM", "RobertaConfig"),
    "distilbert": _hf("DistilBertForMaskedLM", "DistilBertConfig", dim=64, hidden_dim=96, n_layers=2, n_heads=4),
    "nano": nano,
}
"""Families that map tokens to a loss."""
OTHERS: dict[str, Any] = {
    "vit": _hf("ViTModel", "ViTConfig", image_size=32, patch_size=8),
    "clip": _hf("CLIPVisionModel", "CLIPVisionConfig", image_size=32, patch_size=8),
    "siglip": _hf("SiglipVisionModel", "SiglipVisionConfig", image_size=32, patch_size=8),
}
"""Families that map images to hidden states."""


def without_dropout(model: nn.Module) -> nn.Module:
    """Set every probability of dropout to zero, also those that are not of a module."""
    for module in model.modules():
        for name, value in vars(module).items():
            if isinstance(value, float) and ("drop" in name or (isinstance(module, nn.Dropout) and name == "p")):
                setattr(module, name, 0.0)
    return model


def make_batch(seed: int = 0, rows: int = 2, length: int = 19) -> torch.Tensor:
    return torch.randint(3, VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))
