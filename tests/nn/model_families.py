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


class Encoder(nn.Module):
    """A language model of torch's own layers, causal by a mask."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(64, 4, 96, **options)
        self.wte, self.head = nn.Embedding(VOCAB, 64), nn.Linear(64, VOCAB)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.batch_first = layer.self_attn.batch_first

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None, **masks: Any) -> Any:
        x = self.wte(input_ids)
        x = x if self.batch_first else x.transpose(0, 1)
        causal = nn.Transformer.generate_square_subsequent_mask(input_ids.shape[1])
        x = self.encoder(x, **{"mask": causal, "is_causal": True, **masks})
        logits = self.head(x if self.batch_first else x.transpose(0, 1))
        loss = None
        if labels is not None:
            loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return hf.modeling_outputs.CausalLMOutput(loss=loss, logits=logits)


def encoder(**fixed: Any) -> Any:
    def build(**options: Any) -> nn.Module:
        torch.manual_seed(0)
        return Encoder(**{**fixed, **options})

    return build


class DropPath(nn.Module):
    """Drops the branch of whole samples, as in timm."""

    def __init__(self, drop_prob: float) -> None:
        super().__init__()
        self.drop_prob = drop_prob

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training or self.drop_prob == 0:
            return x
        kept = x.new_empty(len(x), *[1] * (x.dim() - 1)).bernoulli_(1 - self.drop_prob)
        return x * kept / (1 - self.drop_prob)


class LayerScale(nn.Module):
    """Multiplies a branch by a parameter."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.full((width,), 0.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.gamma


class ImageBlock(nn.Module):
    """A block in timm's style, with all that its options add."""

    def __init__(
        self, width: int, heads: int, qk_norm: bool = False, drop: float = 0.0, drop_path: float = 0.0
    ) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.q_norm, self.k_norm = (nn.LayerNorm(width // heads) if qk_norm else nn.Identity() for _ in range(2))
        self.fc1, self.act, self.fc2 = nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        self.drop, self.drop1, self.drop2 = nn.Dropout(drop), nn.Dropout(drop), nn.Dropout(drop)
        self.ls1, self.ls2 = LayerScale(width), LayerScale(width)
        self.drop_path1, self.drop_path2 = (DropPath(drop_path) if drop_path else nn.Identity() for _ in range(2))
        self.num_heads = heads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).reshape(batch, length, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(self.q_norm(q), self.k_norm(k), v)
        mixed = self.drop1(self.proj(mixed.transpose(1, 2).reshape(batch, length, width)))
        x = x + self.drop_path1(self.ls1(mixed))
        hidden = self.drop2(self.fc2(self.drop(self.act(self.fc1(self.norm2(x))))))
        return x + self.drop_path2(self.ls2(hidden))


class RotaryBlock(nn.Module):
    """A block in litGPT's style: cosines and sines [B, T, S] as arguments, one projection for grouped queries."""

    def __init__(self, width: int, heads: int, groups: int) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.RMSNorm(width, eps=1e-5), nn.RMSNorm(width, eps=1e-5)
        self.n_head, self.n_query_groups, self.head_size = heads, groups, width // heads
        self.qkv = nn.Linear(width, (heads + 2 * groups) * self.head_size, bias=False)
        self.proj = nn.Linear(width, width, bias=False)
        self.fc_1, self.fc_2, self.out = (nn.Linear(*s, bias=False) for s in ((width, 96), (width, 96), (96, width)))

    def forward(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        batch, length, width = x.shape
        parts = self.qkv(self.norm_1(x)).view(batch, length, -1, self.head_size).transpose(1, 2)
        q, k, v = parts.split((self.n_head, self.n_query_groups, self.n_query_groups), 1)
        q, k = (self.rotate(one, cos.unsqueeze(1), sin.unsqueeze(1)) for one in (q, k))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, enable_gqa=True)
        x = self.proj(mixed.transpose(1, 2).reshape(batch, length, width)) + x
        hidden = self.norm_2(x)
        return self.out(nn.functional.silu(self.fc_1(hidden)) * self.fc_2(hidden)) + x

    @staticmethod
    def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        if cos.dim() != 4:
            raise ValueError("cosines must have three dimensions")
        one, two = x.chunk(2, -1)
        return x * cos + torch.cat([-two, one], -1) * sin


class Stack(nn.Module):
    """Blocks between an embedding and a head, called as they want to be."""

    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.wte, self.blocks, self.head = nn.Embedding(VOCAB, 64), nn.ModuleList(blocks), nn.Linear(64, VOCAB)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
        x = self.wte(input_ids)
        places = torch.arange(x.shape[1], device=x.device)
        angles = torch.outer(places, torch.arange(1, 9, device=x.device) / 9).repeat(1, 2).expand(len(x), -1, -1)
        more = (angles.cos(), angles.sin()) if isinstance(self.blocks[0], RotaryBlock) else ()
        for block in self.blocks:
            x = block(x, *more)
        logits = self.head(x)
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return hf.modeling_outputs.CausalLMOutput(loss=loss, logits=logits)


def stack(make: Any, *args: Any, **fixed: Any) -> Any:
    def build(**options: Any) -> nn.Module:
        torch.manual_seed(0)
        return Stack([make(*args, **{**fixed, **options}) for _ in range(2)])

    return build


GROUPED = {"num_key_value_heads": 2}
_ENCODER_DECODER = {
    "d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 96, "decoder_ffn_dim": 96,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "decoder_start_token_id": 1,
}  # fmt: skip
_T5 = {"d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0}
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
    "olmo2": _hf("Olmo2ForCausalLM", "Olmo2Config"),
    "gpt-j": _hf("GPTJForCausalLM", "GPTJConfig", n_embd=64, n_layer=2, n_head=4, rotary_dim=8),
    "bloom": _hf("BloomForCausalLM", "BloomConfig", n_layer=2, n_head=4),
    "opt": _hf("OPTForCausalLM", "OPTConfig", ffn_dim=96, word_embed_proj_dim=64),
    "t5": _hf("T5ForConditionalGeneration", "T5Config", **_T5),
    "bart": _hf("BartForConditionalGeneration", "BartConfig", **_ENCODER_DECODER),
    "deepseek-dense": _hf(
        "DeepseekV3ForCausalLM",
        "DeepseekV3Config",
        q_lora_rank=32,
        kv_lora_rank=32,
        qk_nope_head_dim=16,
        qk_rope_head_dim=16,
        v_head_dim=16,
        first_k_dense_replace=2,
        num_key_value_heads=4,
    ),
    "torch-post": encoder(),
    "torch-pre": encoder(norm_first=True, batch_first=True, activation="gelu"),
    "timm-style": stack(ImageBlock, 64, 4),
    "litgpt-style": stack(RotaryBlock, 64, 4, 2),
}
"""Families that map tokens to a loss."""
BLOCKS = {"t5": 4, "bart": 4}
"""How many blocks a family has: two, and two more in a decoder."""
OTHERS: dict[str, Any] = {
    "vit": _hf("ViTModel", "ViTConfig", image_size=32, patch_size=8),
    "clip": _hf("CLIPVisionModel", "CLIPVisionConfig", image_size=32, patch_size=8),
    "siglip": _hf("SiglipVisionModel", "SiglipVisionConfig", image_size=32, patch_size=8),
    "dinov2": _hf("Dinov2Model", "Dinov2Config", image_size=32, patch_size=8, drop_path_rate=0.2),
    "t5-gated": _hf("T5EncoderModel", "T5Config", **_T5, feed_forward_proj="gated-gelu"),
    "timm-style-all": stack(ImageBlock, 64, 4, qk_norm=True, drop=0.1, drop_path=0.2),
}
"""Families that are recognized only, mostly of images."""


def without_dropout(model: nn.Module) -> nn.Module:
    """Set every probability of dropout to zero, also those that are not of a module."""
    for module in model.modules():
        for name, value in vars(module).items():
            if isinstance(value, float) and ("drop" in name or (isinstance(module, nn.Dropout) and name == "p")):
                setattr(module, name, 0.0)
    return model


def make_batch(seed: int = 0, rows: int = 2, length: int = 19) -> torch.Tensor:
    return torch.randint(3, VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))
