"""Copies of weights on a GPU: freed by the backward of their forward, and made from current weights by each forward."""

import contextlib

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from narrowgauge import Engine, events
from narrowgauge.models.gpt import GPT, GPTConfig
from narrowgauge.models.llama import Llama, LlamaConfig

FP8 = torch.float8_e4m3fn
SIZES = {"layers": 2, "width": 256, "heads": 4, "context": 64, "vocab": 520}
BUILD = {
    "gpt": lambda: GPT(GPTConfig(**SIZES)),
    "llama": lambda: Llama(LlamaConfig(**SIZES, kv_heads=2, hidden=512)),
}


def make_engine(name, recipe, **options):
    torch.manual_seed(0)
    model = BUILD[name]().cuda()
    engine = Engine(model, torch.optim.AdamW(model.parameters(), 1e-3, fused=True), recipe, **options)
    return engine, (torch.randint(0, SIZES["vocab"], (4, 64), device="cuda"),) * 2


def train(engine, batch, steps):
    losses = []
    for _ in range(steps):
        with engine.forward():
            loss = engine.model(*batch)
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach())
    return [loss.item() for loss in losses]


class CopyLog(events.Listener):
    def __init__(self):
        self.copies = []

    def report_copy(self, weights, copies):
        memory = {weight.untyped_storage().data_ptr() for weight in weights}
        for copy in copies:
            if copy.untyped_storage().data_ptr() not in memory:  # a BF16 weight is its own BF16 copy
                self.copies.append((copy.dtype, StorageWeakRef(copy.untyped_storage())))

    def list_alive(self):
        return [dtype for dtype, memory in self.copies if not memory.expired()]


@pytest.mark.parametrize("recipe", ["bf16", "fp8[products=all]", "fp8-lean[products=all]"])
@pytest.mark.parametrize("name", BUILD)
def test_no_copy_outlives_the_backward_of_its_forward(name, recipe):
    engine, batch = make_engine(name, recipe, fused=True, cuda_graphs=False)
    train(engine, batch, 2)
    log = CopyLog()
    with events.listening(log):
        with engine.forward():
            loss = engine.model(*batch)
        kept = FP8 in log.list_alive()
        engine.backward(loss)
    assert log.copies and not log.list_alive()
    assert kept == (recipe == "fp8[products=all]")


@pytest.mark.parametrize("recipe", ["bf16", "fp16", "fp8[products=all]", "fp8-lean[products=all]"])
@pytest.mark.parametrize("fused", [False, True])
def test_updates_inside_of_the_forward_context_are_read(recipe, fused):
    losses = []
    for inside in (False, True):
        engine, batch = make_engine("gpt", recipe, fused=fused, cuda_graphs=False)
        with engine.forward() if inside else contextlib.nullcontext():
            losses.append(train(engine, batch, 5))
    assert losses[1] == pytest.approx(losses[0], rel=1e-2) and losses[0][-1] < 0.9 * losses[0][0]
