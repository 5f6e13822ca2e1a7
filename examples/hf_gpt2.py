"""A new Hugging Face GPT-2 with a few million parameters, trained on the bytes of Python's own source.

narrowgauge validate examples/hf_gpt2.py:gpt2 --candidates bf16
narrowgauge train examples/hf_gpt2.py:gpt2 --recipe bf16

The model comes from transformers without any changes.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

import narrowgauge as ng
from narrowgauge.data import corpus

CONTEXT = 64


def gpt2(batch: int = 8, seed: int = 0, layers: int = 4, width: int = 256) -> ng.Task:
    text = corpus.load()
    data = {"train": torch.from_numpy(text.train.copy()), "eval": torch.from_numpy(text.eval.copy())}

    def make_model() -> nn.Module:
        config = GPT2Config(
            vocab_size=256,
            n_positions=CONTEXT,
            n_embd=width,
            n_layer=layers,
            n_head=width // 64,
            bos_token_id=0,
            eos_token_id=0,
        )
        config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
        return GPT2LMHeadModel(config)

    def make_batch(step: int, split: str) -> Tensor:
        source = data[split]
        generator = torch.Generator().manual_seed(step * 1000 + (seed if split == "train" else 0))
        starts = torch.randint(0, len(source) - CONTEXT, (batch,), generator=generator).tolist()
        return torch.stack([source[start : start + CONTEXT].long() for start in starts])

    def loss(model: nn.Module, tokens: Tensor) -> Tensor:
        mean: Tensor = model(input_ids=tokens, labels=tokens).loss
        return mean

    return ng.Task(
        name="hf-gpt2", model=make_model, batch=make_batch, loss=loss, items_per_batch=batch * CONTEXT, unit="token",
        learning_rate=5e-4, steps=80,
    )  # fmt: skip
