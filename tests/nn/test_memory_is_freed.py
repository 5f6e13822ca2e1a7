"""A model's memory is free when its last name is deleted, without a search for cycles: the next model may need it."""

import functools
import gc
import weakref

import pytest
import torch
import transformers
from model_families import LANGUAGE, make_batch, without_dropout

import narrowgauge as ng
from narrowgauge.models.gpt import GPT, GPTConfig


@pytest.fixture
def no_collection():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def make_gpt():
    torch.manual_seed(0)
    return GPT(GPTConfig(layers=2, width=64, heads=4, vocab=96, context=32))


def make_mixtral():
    torch.manual_seed(0)
    config = transformers.MixtralConfig(
        vocab_size=96, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4, experts_implementation="grouped_mm",
    )  # fmt: skip
    return transformers.MixtralForCausalLM(config)


MODELS = {**LANGUAGE, "gpt": make_gpt, "mixtral": make_mixtral}


def compute_loss(model, ids):
    if ids.dtype is torch.long and isinstance(model, GPT):
        return model(ids[:, :-1].contiguous(), ids[:, 1:].contiguous())
    return model(input_ids=ids, labels=ids).loss


def watch(*objects):
    return {f"{type(one).__name__} {number}": weakref.ref(one) for number, one in enumerate(objects)}


def list_alive(watched):
    return [name for name, one in watched.items() if one() is not None]


def list_tensors(model):
    return [tensor for p in model.parameters() for tensor in (p, p.grad) if tensor is not None]


RECIPES = ["fp32", "fp8[products=all]", "fp8-lean[products=all]", "fp8[products=all,granularity=row]", "emulated-mxfp8"]


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("family", ["gpt", "llama", "gpt2", "t5", "bart", "gemma3", "mixtral"])
def test_nothing_stays_after_training(no_collection, family, recipe):
    model = MODELS[family]()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    engine = ng.Engine(model, optimizer, recipe, clip_norm=1.0)
    for step in range(2):
        with engine.forward():
            loss = compute_loss(model, make_batch(step))
        engine.backward(loss)
        engine.step()
    with engine.evaluating():
        compute_loss(model, make_batch(3))
    watched = watch(engine, model, optimizer, *model.modules(), *list_tensors(model))
    del engine, model, optimizer, loss
    assert list_alive(watched) == []


def test_nothing_stays_after_settings_changed(no_collection):
    """Blocks that were described again hold their forms."""
    model = without_dropout(LANGUAGE["llama"]())
    engine = ng.Engine(model, torch.optim.SGD(model.parameters(), 1e-3), "fp8[products=all]")
    for scale in (0.25, 0.5, 0.25):
        for block in model.model.layers:
            block.self_attn.scaling = scale
        with engine.forward():
            loss = compute_loss(model, make_batch())
        engine.backward(loss)
        engine.step()
    watched = watch(engine, model, *model.modules(), *list_tensors(model))
    del engine, model, loss, block
    assert list_alive(watched) == []


@pytest.mark.parametrize("recipe", ["fp32", "fp8[products=all]"])
def test_nothing_stays_after_watched_steps(no_collection, recipe):
    model = make_gpt()
    engine = ng.Engine(model, torch.optim.AdamW(model.parameters(), 1e-3), recipe)
    gauges = ng.watch(engine, every=1)
    step = ng.StepFunction(engine, functools.partial(compute_loss, model))
    for number in range(3):
        loss, _ = step(make_batch(number))
    assert list(gauges.snapshots())
    watched = watch(engine, *model.modules(), *list_tensors(model))
    del engine, model, gauges, step, loss
    assert list_alive(watched) == []
