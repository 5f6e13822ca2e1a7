"""Tiny Hugging Face folders, and a task that trains the model of one, for the tests of export."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from narrowgauge.pretrained.transformers_model import find_model
from narrowgauge.task import Task

SMALL = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 160, "max_position_embeddings": 32,
         "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}  # fmt: skip
FAMILIES = {"Llama": {}, "Qwen3": {"tie_word_embeddings": True}, "Gemma": {}}
"""Gemma ties its weights by default."""


def make_folder(folder: Path, family: str, **fields: Any) -> Path:
    """Make a folder with config, weights, generation settings and a tokenizer of single letters."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**SMALL, **FAMILIES.get(family, {}), **fields)
    model = getattr(transformers, f"{family}ForCausalLM")(config).bfloat16()
    model.save_pretrained(folder)
    letters = {name: number for number, name in enumerate(["<pad>", "<s>", "</s>", *"abcdefghijklmnopqrstuvwxyz"])}
    tokenizer = Tokenizer(models.WordLevel(letters, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    (folder / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
    (folder / "tokenizer_code.py").write_text("raise SystemExit('code of a model folder was run')")
    return folder


def make(source: str = "") -> Task:
    """A task that trains the model of a folder on random tokens."""
    found = find_model(source, {})

    def batch(step: int, split: str) -> torch.Tensor:
        return torch.randint(160, (2, 16), generator=torch.Generator().manual_seed(step))

    return Task(
        model=found.make,
        batch=batch,
        loss=lambda model, tokens: model(input_ids=tokens, labels=tokens).loss,
        name="hf",
        steps=2,
        eval_batches=1,
        learning_rate=1e-3,
    )
