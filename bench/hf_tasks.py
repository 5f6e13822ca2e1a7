"""Hugging Face models as tasks, with random weights and tokens, padding, dropout and their own loss.

usage: narrowgauge bench bench/hf_tasks.py:llama_500m --recipes bf16,fp8 --peers torch,torchao
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from narrowgauge.task import Task


def bert(batch: int = 32) -> Task:
    """BERT base."""
    return _task("bert", lambda t: t.BertForMaskedLM(t.BertConfig()), batch, 512, 30522)


def gpt2(batch: int = 16) -> Task:
    """GPT-2 124M, with its vocabulary of 50,257."""
    return _task("hf-gpt2", lambda t: t.GPT2LMHeadModel(t.GPT2Config(use_cache=False)), batch, 1024, 50257)


def llama(batch: int = 16) -> Task:
    """A Llama with 12 layers and a width of 1,024."""
    return _task("hf-llama", lambda t: t.LlamaForCausalLM(_llama(t, 1024, 2816, 12, 16)), batch, 1024, 32000)


def llama_500m(batch: int = 8) -> Task:
    """A Llama with 8 layers and a width of 2,048, without padding."""
    return _task("hf-llama-500m", lambda t: t.LlamaForCausalLM(_llama(t, 2048, 5632, 8, 16)), batch, 2048, 32000, False)


def _llama(transformers: Any, width: int, hidden: int, layers: int, heads: int) -> Any:
    return transformers.LlamaConfig(
        hidden_size=width, intermediate_size=hidden, num_hidden_layers=layers, num_attention_heads=heads,
        use_cache=False,
    )  # fmt: skip


def _task(name: str, make: Callable[[Any], Any], batch: int, context: int, words: int, padded: bool = True) -> Task:
    def model() -> Any:
        import transformers

        return make(transformers)

    def synthetic(step: int) -> tuple[torch.Tensor, torch.Tensor]:
        ids = torch.randint(0, words, (batch, context), generator=torch.Generator().manual_seed(step))
        mask = torch.ones_like(ids)
        mask[:, -context // 8 :] = 0
        return ids, mask

    def loss(model: Any, both: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        ids, mask = both
        found: torch.Tensor = model(input_ids=ids, attention_mask=mask if padded else None, labels=ids).loss
        return found

    return Task(
        name=name, model=model, batch=lambda step, split: synthetic(step), synthetic=synthetic,
        loss=loss, items_per_batch=batch * context, unit="token",
    )  # fmt: skip
