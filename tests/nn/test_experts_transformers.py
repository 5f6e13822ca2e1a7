"""transformers' mixture-of-experts models train in every narrow recipe, with every experts implementation."""

import pytest
import torch

from narrowgauge import Engine

transformers = pytest.importorskip("transformers")
pytest.importorskip("transformers.integrations.moe")

SMALL = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
    "use_cache": False,
    "num_experts_per_tok": 2,
    "eos_token_id": 1,
    "bos_token_id": 0,
    "pad_token_id": 2,
}
FAMILIES = {
    "Mixtral": {"num_local_experts": 4, "output_router_logits": True},
    "Qwen3Moe": {"num_experts": 4, "moe_intermediate_size": 32, "head_dim": 16, "output_router_logits": True},
    "Olmoe": {"num_experts": 4, "output_router_logits": True},
    "DeepseekV3": {
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
        "q_lora_rank": 32,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
        "n_shared_experts": 1,
    },
}


def mixture(family, **more):
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**SMALL, **FAMILIES[family], **more)
    return getattr(transformers, f"{family}ForCausalLM")(config)


def train(family, recipe, way, steps=3):
    model = mixture(family)
    model.set_experts_implementation(way)
    engine = Engine(model, torch.optim.AdamW(model.parameters(), lr=1e-3), recipe)
    ids = torch.randint(128, (2, 16), generator=torch.Generator().manual_seed(1))
    losses, aux = [], None
    for _ in range(steps):
        with engine.forward():
            made = model(input_ids=ids, labels=ids)
        engine.backward(made.loss)
        assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
        assert engine.step().applied
        losses.append(made.loss.item())
        aux = getattr(made, "aux_loss", None)
    return losses, None if aux is None else aux.item()


@pytest.fixture(scope="module")
def exact():
    return {family: train(family, "fp32", "grouped_mm") for family in FAMILIES}


# Every family in BF16 and in FP8 with 16-bit weights; the other recipes with two families each.
CASES = [(family, recipe) for recipe in ("bf16", "fp8-lean") for family in FAMILIES]
CASES += [("Mixtral", "fp16"), ("DeepseekV3", "fp16"), ("Qwen3Moe", "fp8"), ("DeepseekV3", "fp8")]
CASES += [("Olmoe", "bf16-lean"), ("Mixtral", "bf16-lean")]


@pytest.mark.parametrize(("family", "recipe"), CASES)
def test_losses_and_the_balancing_loss_stay_near_fp32(family, recipe, exact):
    losses, aux = train(family, recipe, "grouped_mm")
    assert losses == pytest.approx(exact[family][0], rel=0.01)
    if aux is not None:
        assert aux == pytest.approx(exact[family][1], rel=0.01)


@pytest.mark.parametrize("way", ["eager", "batched_mm"])
@pytest.mark.parametrize("recipe", ["bf16", "fp8-lean"])
def test_other_ways_to_compute_experts_give_the_same(way, recipe, exact):
    losses, _ = train("Mixtral", recipe, way)
    assert losses == pytest.approx(exact["Mixtral"][0], rel=0.01)
