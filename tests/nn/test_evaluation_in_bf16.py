"""Evaluations of FP8 recipes multiply in BF16, in every kind of layer, and leave no trace in training."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import narrowgauge as ng
from narrowgauge.models.gpt import GPT, GPTConfig
from narrowgauge.models.moe import MoE, MoEConfig

VOCAB = 256


def gpt() -> nn.Module:
    return GPT(GPTConfig(layers=2, width=128, heads=4, context=64, vocab=VOCAB))


def moe() -> nn.Module:
    sizes = {"layers": 2, "width": 128, "heads": 4, "kv_heads": 2, "experts": 8, "chosen": 2, "hidden": 128}
    return MoE(MoEConfig(**sizes, context=64, vocab=VOCAB))


def layers() -> nn.Module:
    return nn.Sequential(nn.Embedding(VOCAB, 128), nn.Linear(128, 256), nn.GELU(), nn.Linear(256, VOCAB))


def llama() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, vocab_size=VOCAB, use_cache=False))


def olmoe() -> nn.Module:
    transformers = pytest.importorskip("transformers", minversion="5.0")
    sizes = {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    more = {"num_experts": 8, "num_experts_per_tok": 2, "eos_token_id": None, "pad_token_id": None, "use_cache": False}
    return transformers.OlmoeForCausalLM(transformers.OlmoeConfig(**sizes, **more, vocab_size=VOCAB))


MODELS = [gpt, moe, layers, llama, olmoe]
RECIPES = ["fp8[products=all]", "fp8-lean[products=all]", "fp8[products=all,granularity=row]"]


def tokens(seed: int) -> Tensor:
    return torch.randint(3, VOCAB, (2, 32), generator=torch.Generator().manual_seed(seed))


def compute_loss(model: nn.Module, ids: Tensor) -> Tensor:
    if hasattr(model, "config") and hasattr(model, "get_input_embeddings"):
        return model(input_ids=ids, labels=ids).loss
    if isinstance(model, GPT | MoE):
        return model(ids, ids)
    return F.cross_entropy(model(ids).float().flatten(0, 1), ids.flatten())


def make(build, recipe: str) -> ng.Engine:
    torch.manual_seed(0)
    model = build()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2.0) if parameter.dim() > 1 else None  # so that products matter
    return ng.Engine(model, torch.optim.AdamW(model.parameters(), lr=1e-3), recipe)


def train(engine: ng.Engine, seed: int) -> None:
    with engine.forward():
        loss = compute_loss(engine.model, tokens(seed))
    engine.backward(loss)
    assert engine.step().applied


def evaluate(engine: ng.Engine) -> float:
    with engine.evaluating():
        return compute_loss(engine.model, tokens(9)).item()


def evaluate_as_trained(engine: ng.Engine) -> float:
    engine.model.eval()
    with torch.no_grad(), engine.forward():
        loss = compute_loss(engine.model, tokens(9)).item()
    engine.model.train()
    return loss


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("build", MODELS)
def test_losses_are_those_of_the_weights_in_bf16(build, recipe):
    engine = make(build, recipe)
    for seed in range(2):
        train(engine, seed)
    found, in_fp8 = evaluate(engine), evaluate_as_trained(engine)
    weights = {name: value.float() for name, value in engine.state_dict()["model"].items()}
    alone = make(build, "bf16")
    alone.inner.load_state_dict(weights)
    expected = evaluate(alone)
    assert abs(found - expected) < 3e-4 * expected
    assert abs(in_fp8 - expected) > 2 * abs(found - expected)
    assert in_fp8 == evaluate_as_trained(engine)  # the context is closed


@pytest.mark.parametrize("build", MODELS)
def test_training_does_not_notice(build):
    engines = [make(build, "fp8[products=all]") for _ in range(2)]
    for seed in range(4):
        for engine in engines:
            train(engine, seed)
        evaluate(engines[0])
    one, other = (engine.state_dict() for engine in engines)
    for name, value in one["model"].items():
        assert torch.equal(value, other["model"][name]), name
    assert torch.equal(*(torch.stack([site.scale for site in e.conversion.scales.sites.values()]) for e in engines))


def test_weights_that_are_stored_in_fp8_stay_that():
    """The products of their bytes have no other form; a layer of its own widens them."""
    for build in (llama, layers):
        torch.manual_seed(0)
        model = build()
        for parameter in list(model.parameters())[:-2]:
            parameter.requires_grad_(False)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        engine = ng.Engine(model, torch.optim.AdamW(trained, lr=1e-3), "fp8[products=all,frozen=fp8]")
        assert engine.conversion.stored
        train(engine, 0)
        assert evaluate(engine) == pytest.approx(evaluate_as_trained(engine), rel=0.01)


def test_other_recipes_evaluate_as_they_train():
    for recipe in ("bf16", "fp32", "bf16[emulate=nvfp4]"):
        engine = make(layers, recipe)
        train(engine, 0)
        assert evaluate(engine) == evaluate_as_trained(engine)
