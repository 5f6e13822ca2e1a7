"""The recipe's field ``head``: the formats of layers that compute logits, in each kind of model."""

import pytest
import torch
from torch import nn

import narrowgauge as ng
from narrowgauge import hardware
from narrowgauge.models.gpt import GPT, GPTConfig
from narrowgauge.nn.products.gemm import ALL_BF16, ALL_FP8
from narrowgauge.nn.survey import survey_layers

VOCAB = 512
FORMATS = {"fp8": ALL_FP8, "bf16": ALL_BF16}


def gpt():
    return GPT(GPTConfig(layers=2, width=128, heads=4, context=64, vocab=VOCAB))


def llama(tied=False):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.LlamaConfig(**sizes, vocab_size=VOCAB, use_cache=False, tie_word_embeddings=tied)
    return transformers.LlamaForCausalLM(config)


def tied():
    return llama(tied=True)


def layers():
    """A head of its own: wide, and no part of a list."""
    return nn.Sequential(nn.Embedding(8192, 64), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8192))


def make(build, head):
    torch.manual_seed(0)
    model = build()
    recipe = f"fp8[products=all,first_forward=fp8,head={head}]"
    return ng.Engine(model, torch.optim.AdamW(model.parameters(), lr=1e-3), recipe)


def compute_loss(engine, device="cpu"):
    model, ids = engine.inner, torch.randint(3, VOCAB, (2, 32), generator=torch.Generator().manual_seed(1)).to(device)
    if isinstance(model, GPT):
        return model(ids, ids)
    if isinstance(model, nn.Sequential):
        return nn.functional.cross_entropy(model(ids).float().flatten(0, 1), ids.flatten())
    return model(input_ids=ids, labels=ids).loss


@pytest.mark.parametrize("head", FORMATS)
@pytest.mark.parametrize("build", [gpt, llama, tied, layers])
def test_only_the_head_changes(build, head):
    engine = make(build, head)
    found = {layer.path: layer.choice for layer in engine.conversion.layers}
    path = next(path for path in found if path in ("lm_head", "3"))
    assert found.pop(path) == FORMATS[head]
    assert set(found.values()) == {ALL_FP8}
    reason = next(layer.reason for layer in engine.conversion.layers if layer.path == path)
    assert ("the head" in reason) is (head == "bf16")


def get_choices(model, head):
    """Return the formats of a compiled model's layers."""
    recipe = ng.recipe(f"fp8[products=all,first_forward=fp8,head={head}]")
    found = survey_layers(model, recipe, hardware.detect("cpu"), 64, {}, lazy=False)
    return {layer.path: (layer.choice, layer.reason) for layer in found}


@pytest.mark.parametrize("build", [llama, tied])
def test_a_compiled_model_has_gradients_of_logits_in_bf16(build):
    """No loss of ours computes them there, which would round them so that they are right on average."""
    torch.manual_seed(0)
    model = build()
    for head, expected in (("fp8", ALL_FP8._replace(grad_input="bf16", grad_weight="bf16")), ("bf16", ALL_BF16)):
        found = get_choices(model, head)
        choice, reason = found.pop("lm_head")
        assert choice == expected and "BF16" in reason
        assert {choice for choice, _ in found.values()} == {ALL_FP8}


def test_a_wide_layer_of_a_compiled_model_may_be_no_head():
    assert {choice for choice, _ in get_choices(layers(), "fp8").values()} == {ALL_FP8}
    assert get_choices(layers(), "bf16")["3"][0] == ALL_BF16


@pytest.mark.parametrize("build", [gpt, llama, layers])
def test_training_in_each_format(build):
    losses = {}
    for head in FORMATS:
        engine = make(build, head)
        for _ in range(8):
            with engine.forward():
                loss = compute_loss(engine)
            engine.backward(loss)
            assert engine.step().applied
        losses[head] = loss.item()
    assert losses["fp8"] == pytest.approx(losses["bf16"], rel=0.02)
    assert losses["fp8"] != losses["bf16"]


def test_a_model_without_such_a_layer_is_an_error():
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 32))
    with pytest.raises(ng.UsageError, match="head=bf16 found no layer in Sequential that computes logits"):
        ng.Engine(model, torch.optim.AdamW(model.parameters()), "fp8[products=all,head=bf16]")
    ng.Engine(model, torch.optim.AdamW(model.parameters()), "fp8[products=all,head=fp8]")


def test_a_head_that_does_not_fit_fp8_is_in_bf16_already(monkeypatch):
    monkeypatch.setattr("test_head_format.VOCAB", 509)
    for head in FORMATS:
        found = {layer.path: layer.choice for layer in make(llama, head).conversion.layers}
        assert found["lm_head"] == ALL_BF16


def test_only_fp8_recipes_have_the_field():
    with pytest.raises(ng.UsageError, match="head"):
        ng.recipe("bf16[head=bf16]")
    with pytest.raises(ng.UsageError, match="expected one of fp8, bf16"):
        ng.recipe("fp8[head=fp32]")
