"""Evaluations of FP8 recipes multiply in BF16 on a GPU: the losses of the weights, and no more memory than a step."""

from __future__ import annotations

import copy
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from narrowgauge import Engine
from narrowgauge.models.gpt import GPT, GPTConfig

sys.path.append(str(Path(__file__).parents[1] / "nn"))
from test_evaluation_in_bf16 import MODELS, compute_loss, layers, llama, tokens

DEVICE = torch.device("cuda")
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*defaults to a non-deterministic algorithm"),
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores"),  # from Inductor, about FP32 products
]


def make(model: nn.Module, recipe: str, **options: bool) -> Engine:
    return Engine(model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True), recipe, **options)


def train(engine: Engine, seed: int) -> None:
    ids = tokens(seed).to(DEVICE)
    with engine.forward():
        loss = compute_loss(engine.model, ids)
    engine.backward(loss)
    assert engine.step().applied


def evaluate(engine: Engine, as_trained: bool = False) -> float:
    ids = tokens(9).to(DEVICE)
    engine.model.eval()
    with torch.no_grad(), engine.forward() if as_trained else engine.evaluating():
        loss = compute_loss(engine.model, ids).item()
    engine.model.train()
    return loss


ALL = "fp8[products=all]"
BY_ROW = "fp8[products=all,granularity=row]"
CASES = [(build, recipe, False) for build in MODELS for recipe in (ALL, "fp8-lean[products=all]")]
# A model is compiled if it has no fused blocks.
CASES += [(layers, ALL, True), (layers, "fp8-lean[products=all]", True), (layers, BY_ROW, True), (llama, BY_ROW, True)]


@pytest.mark.parametrize(("build", "recipe", "compiled"), CASES)
def test_losses_are_those_of_the_weights_in_bf16(build, recipe, compiled):
    torch.manual_seed(0)
    model = build().to(DEVICE)
    engine = make(model, recipe, compile=compiled)
    assert engine.compiled == compiled
    for seed in range(3):
        train(engine, seed)
    found, in_fp8 = evaluate(engine), evaluate(engine, as_trained=True)
    alone = copy.deepcopy(model)
    alone.load_state_dict({name: value.float() for name, value in engine.state_dict()["model"].items()})
    expected = evaluate(make(alone.float(), "bf16", fused=False))
    assert abs(found - expected) < 1e-3 * expected
    assert in_fp8 != found
    train(engine, 3)
    assert evaluate(engine) != found  # the next weights


def test_an_evaluation_takes_no_more_memory_than_a_step():
    """Its BF16 copies of weights live for one product each, and logits are made in chunks."""
    model = GPT(GPTConfig(layers=4, width=512, heads=8, context=512, vocab=32768)).to(DEVICE)
    engine = make(model, "fp8[products=all]")
    ids = torch.randint(0, 32768, (16, 512), device=DEVICE)
    peaks = []
    for _ in range(3):
        torch.cuda.reset_peak_memory_stats()
        with engine.forward():
            loss = model(ids, ids)
        engine.backward(loss)
        engine.step()
        del loss
        peaks.append(torch.cuda.max_memory_allocated())
        torch.cuda.reset_peak_memory_stats()
        with engine.evaluating():
            model(ids, ids).item()
        peaks.append(torch.cuda.max_memory_allocated())
    assert peaks[-1] < peaks[-2]
