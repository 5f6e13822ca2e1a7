"""A NaN in one expert, and an overflow inside experts, are located in the built-in mixture and in transformers'."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from replay_steps import capture_and_replay

from narrowgauge.models.moe import MoE, MoEConfig

SMALL = MoEConfig(layers=2, width=32, heads=2, kv_heads=2, experts=4, chosen=2, hidden=32, context=16, vocab=100)
BATCH = torch.arange(64).view(4, 16)


def make_mixtral() -> Any:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    tokens = {"vocab_size": 100, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "use_cache": False}
    config = transformers.MixtralConfig(
        **sizes, **tokens, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2
    )
    return transformers.MixtralForCausalLM(config)


def own_loss(model: Any, batch: Any) -> Any:
    return model(batch, batch)


def mixtral_loss(model: Any, batch: Any) -> Any:
    return model(input_ids=batch, labels=batch).loss


@pytest.mark.parametrize(("recipe", "size"), [("fp32", 32), ("bf16", 32), ("fp8", 32), ("fp8", 128)])
def test_a_nan_in_one_expert(tmp_path: Path, recipe: str, size: int) -> None:
    """With sizes that are multiples of 128, experts run in FP8: a cast reads their stack as one matrix."""

    def make() -> MoE:
        model = MoE(replace(SMALL, width=size, hidden=size))
        with torch.no_grad():
            model.blocks[1].mixture.experts.down_proj[2, 5, 7] = math.nan
        return model

    found = capture_and_replay(make, tmp_path, BATCH, own_loss, recipe)
    name = "blocks.1.mixture.experts.down_proj"
    assert found.module == "blocks.1.mixture.experts"
    assert found.message == f"step 1: parameter {name} (expert 2 of 4) contains NaN before the step"


def test_a_nan_in_two_experts_of_transformers(tmp_path: Path) -> None:
    def make() -> Any:
        model = make_mixtral()
        with torch.no_grad():
            model.model.layers[0].mlp.experts.gate_up_proj[1:3, 0, 0] = math.nan
        return model

    found = capture_and_replay(make, tmp_path, BATCH, mixtral_loss, "bf16")
    assert "model.layers.0.mlp.experts.gate_up_proj (experts 1, 2 of 4) contains NaN" in found.message


@pytest.mark.parametrize("family", ["own", "mixtral"])
def test_an_overflow_inside_of_experts_names_their_module(tmp_path: Path, family: str) -> None:
    """Weights of one expert are so large that its product is beyond FP16."""

    def make() -> Any:
        model = MoE(SMALL) if family == "own" else make_mixtral()
        experts = model.blocks[1].mixture.experts if family == "own" else model.model.layers[1].mlp.experts
        with torch.no_grad():
            experts.gate_up_proj[3] = 6e4
        return model

    loss = own_loss if family == "own" else mixtral_loss
    found = capture_and_replay(make, tmp_path, BATCH, loss, "fp16[loss_scale=1.0]")
    assert found.module == ("blocks.1.mixture.experts" if family == "own" else "model.layers.1.mlp.experts")
    assert found.op_survives_fp32


def test_all_experts_are_not_listed(tmp_path: Path) -> None:
    def make() -> MoE:
        model = MoE(SMALL)
        with torch.no_grad():
            model.blocks[1].mixture.experts.down_proj[:, 0, 0] = math.inf
        return model

    found = capture_and_replay(make, tmp_path, BATCH, own_loss)
    assert "blocks.1.mixture.experts.down_proj contains inf" in found.message
