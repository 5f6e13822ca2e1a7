"""Device memory of a deleted engine is free at once, graphs and copies of weights included."""

import functools
import gc

import pytest
import torch

import narrowgauge as ng
from narrowgauge.models.gpt import GPT, GPTConfig

VOCAB, CONTEXT = 512, 128
CONFIG = GPTConfig(layers=6, width=256, heads=4, vocab=VOCAB, context=CONTEXT)


@pytest.fixture
def no_collection():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def compute_loss(model, tokens):
    return model(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


def train(recipe, as_function, **options):
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = GPT(CONFIG)
        tokens = torch.randint(0, VOCAB, (8, CONTEXT + 1))
    engine = ng.Engine(model, torch.optim.AdamW(model.parameters(), 1e-3), recipe, clip_norm=1.0, **options)
    if as_function:
        step = ng.StepFunction(engine, functools.partial(compute_loss, model), record=True)
        for _ in range(6):
            step(tokens)
        assert step.recorded == 1, step.reason
        return
    for _ in range(3):
        with engine.forward():
            loss = compute_loss(model, tokens)
        engine.backward(loss)
        engine.step()


@pytest.mark.parametrize("as_function", [False, True], ids=["loop", "graph"])
@pytest.mark.parametrize("recipe", ["bf16", "fp8[products=all]", "fp8[products=all,attention_keys=bf16]", "fp8-lean"])
def test_training_again_takes_no_more_memory(no_collection, recipe, as_function):
    """Workspaces and what was measured once stay; the first training makes them."""
    train(recipe, as_function)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(2):
        train(recipe, as_function)
    torch.cuda.synchronize()
    weights = 4 * CONFIG.parameters()
    assert torch.cuda.memory_allocated() - before < weights / 4


def test_blocks_as_graphs_are_freed_too(no_collection):
    train("fp8[products=all]", False, cuda_graphs=True)
    before = torch.cuda.memory_allocated()
    train("fp8[products=all]", False, cuda_graphs=True)
    assert torch.cuda.memory_allocated() - before < CONFIG.parameters()
