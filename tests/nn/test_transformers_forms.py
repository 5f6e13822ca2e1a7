"""Models of transformers whose blocks have a form of their own: fused, and their gradients are those of the original.

OLMo and nanochat have norms without weights, GPT-OSS and Llama 4 mixtures that return a tuple, Llama 4 and DeepSeek-V2
angles as complex numbers, GPT-OSS half of them. Granite multiplies branches and scores by numbers.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from model_families import make_batch
from torch import nn

import narrowgauge as ng
from narrowgauge.nn.fused.modules import FusedBlock
from narrowgauge.nn.module_changes import find_change

transformers = pytest.importorskip("transformers", minversion="5.0")
SIZES = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 16,
    "num_key_value_heads": 2, "vocab_size": 256, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
MIXTURE = {"num_local_experts": 4, "num_experts_per_tok": 2, "attn_implementation": "eager"}
LATENT = {
    "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "kv_lora_rank": 16, "q_lora_rank": 16,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "first_k_dense_replace": 1, "moe_intermediate_size": 32,
    "head_dim": None, "num_key_value_heads": 4,
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any], list[tuple[str, str]]]] = {
    "Olmo": ("OlmoConfig", {}, [("pre", "rotary")] * 2),
    "NanoChat": ("NanoChatConfig", {}, [("pre", "own")] * 2),
    "GptOss": ("GptOssConfig", MIXTURE, [("half", "own")] * 2),
    "Llama4": (
        "Llama4TextConfig", {**MIXTURE, "interleave_moe_layer_step": 2, "intermediate_size_mlp": 128},
        [("pre", "own"), ("half", "own")],
    ),
    "DeepseekV2": ("DeepseekV2Config", LATENT, [("pre", "own"), ("half", "own")]),
    "Granite": (
        "GraniteConfig", {"residual_multiplier": 0.22, "attention_multiplier": 0.015625, "embedding_multiplier": 12.0},
        [("pre", "rotary")] * 2,
    ),
    "GraniteMoe": (
        "GraniteMoeConfig", {**MIXTURE, "residual_multiplier": 0.22, "attention_multiplier": 0.015625},
        [("half", "rotary")] * 2,
    ),
}  # fmt: skip
"""The configuration's class, its options, and the order and attention of each block."""


def make(name: str) -> nn.Module:
    config, options, _ = MODELS[name]
    settings = {key: value for key, value in {**SIZES, **options}.items() if value is not None}
    kind = getattr(transformers, f"{name}ForCausalLM", None)
    if kind is None:
        pytest.skip(f"this transformers has no {name}")
    torch.manual_seed(0)
    model: nn.Module = kind(getattr(transformers, config)(**settings)).train()
    with torch.no_grad():  # some initialize nothing but linear layers
        for parameter in model.parameters():
            if parameter.dim() > 1 or not bool(parameter.isfinite().all()) or not bool(parameter.any()):
                parameter.copy_(torch.randn_like(parameter) * 0.05)
    return model


@pytest.mark.parametrize("recipe", ["bf16", "fp8[products=all]", "fp8-lean[products=all]"])
@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_those_of_the_original(name: str, recipe: str) -> None:
    model = make(name)
    written = copy.deepcopy(model)
    engine = ng.Engine(model, torch.optim.AdamW(model.parameters(), 1e-3), recipe, fused=True)
    changes = [find_change(model.get_submodule(path), FusedBlock) for path in engine.conversion.blocks]
    specs = [change.plan.spec for change in changes if change is not None]
    assert [(spec.order, spec.attention.kind) for spec in specs] == MODELS[name][2]
    ids = make_batch(0, rows=2, length=24)
    with engine.forward():
        loss = model(input_ids=ids, labels=ids).loss
    engine.backward(loss)
    wanted = written(input_ids=ids, labels=ids).loss
    wanted.backward()
    rough = "fp8" in recipe
    assert loss.item() == pytest.approx(wanted.item(), rel=0.01 if rough else 2e-3)
    pairs = [
        (one.grad.float().flatten(), other.grad.flatten())
        for one, other in zip(model.parameters(), written.parameters(), strict=True)
        if one.grad is not None and other.grad is not None and bool(other.grad.any())
    ]
    assert len(pairs) > 10
    found, exact = (torch.cat(parts) for parts in zip(*pairs, strict=True))
    assert ((found - exact).norm() / exact.norm()).item() < (0.2 if rough else 0.03)
    assert engine.step().applied and not engine.conversion.as_written.reasons


def test_the_scores_of_a_router_are_still_seen() -> None:
    """A mixture that returns a tuple has its scores read by hooks."""
    model = make("GptOss")
    written = copy.deepcopy(model)
    engine = ng.Engine(model, torch.optim.AdamW(model.parameters(), 1e-3), "bf16", fused=True)
    ids = make_batch(0, rows=2, length=24)
    with engine.forward():
        found = model(input_ids=ids, labels=ids, output_router_logits=True)
    wanted = written(input_ids=ids, labels=ids, output_router_logits=True)
    assert found.aux_loss.item() == pytest.approx(wanted.aux_loss.item(), rel=0.02)
    assert len(found.router_logits) == len(wanted.router_logits) == 2
