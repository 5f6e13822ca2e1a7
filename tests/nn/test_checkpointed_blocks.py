"""Fused blocks inside torch.utils.checkpoint keep their input only, and compute twice, not four times."""

import copy
import gc

import pytest
import torch
from model_families import LANGUAGE, VOCAB
from torch import nn
from torch.utils.checkpoint import checkpoint

from narrowgauge import Engine
from narrowgauge.nn.fused import modules, passes

STEPS, BLOCKS = 3, 2


def tokens(seed):
    return torch.randint(3, VOCAB, (4, 48), generator=torch.Generator().manual_seed(seed))


def count_live():
    """Return how many bytes are in the tensors that Python refers to, without parameters."""
    gc.collect()
    tensors = [thing for thing in gc.get_objects() if type(thing) in (torch.Tensor, nn.Parameter)]
    storages = [(type(tensor), tensor.untyped_storage()) for tensor in tensors]
    sizes = {storage.data_ptr(): storage.nbytes() for _, storage in storages}
    return sum(sizes.values()) - sum(
        {s.data_ptr(): s.nbytes() for kind, s in storages if kind is nn.Parameter}.values()
    )


def train(model, recipe, monkeypatch):
    """Return losses, bytes that are alive before backward, calls of blocks, and how often blocks computed."""
    engine = Engine(model, torch.optim.AdamW(model.parameters(), lr=1e-3), recipe, fused=True)
    assert len(engine.conversion.blocks) >= BLOCKS and not engine.conversion.unfused
    calls, computed, losses, run = [], [], [], modules.FusedBlock.run
    before = count_live()
    with monkeypatch.context() as patch:
        patch.setattr(modules.FusedBlock, "run", lambda *args, **kwargs: calls.append(1) or run(*args, **kwargs))
        for order in set(passes.ORDERS.values()):
            compute = order.forward
            patch.setattr(order, "forward", lambda *args, compute=compute: computed.append(1) or compute(*args))
        for step in range(STEPS):
            batch = tokens(step % 2)
            torch.manual_seed(step)
            with engine.forward():
                loss = model(input_ids=batch, labels=batch).loss
            if step == STEPS - 1:
                live = count_live() - before
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    return losses, live, len(calls), len(computed)


CASES = [
    ("llama", "fp8[products=all]", False), ("llama", "bf16", False), ("llama", "fp8[products=all]", True),
    ("gpt2", "fp8[products=all]", False), ("bert", "bf16", False), ("t5", "bf16", False),
]  # fmt: skip


@pytest.mark.parametrize(("family", "recipe", "reentrant"), CASES)
def test_gradient_checkpointing_of_transformers(family, recipe, reentrant, monkeypatch, modules_are_not_collected):
    torch.manual_seed(0)
    model = LANGUAGE[family]()
    model.config.use_cache = False  # as transformers does with gradient checkpointing
    expected, _, calls, computed = train(copy.deepcopy(model), recipe, monkeypatch)
    blocks = calls // STEPS
    first = 0 if recipe == "bf16" else blocks  # the first step in FP8, without scales, recomputes
    assert calls == computed - first == STEPS * blocks
    full = recipe.replace("]", ",checkpoint=full]") if "]" in recipe else f"{recipe}[checkpoint=full]"
    _, live, *_ = train(copy.deepcopy(model), full, monkeypatch)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()
    losses, kept, calls, computed = train(model, recipe, monkeypatch)
    # with use_reentrant the first forward looks like an evaluation, which scales by each tensor
    # and FP8 recipes keep short activations where nothing is recomputed
    assert losses == pytest.approx(expected, rel=1e-5 if recipe == "bf16" else 1e-3)
    again = blocks if reentrant else 2 if family == "t5" else 0  # the first blocks of T5 compute its position bias
    assert calls == STEPS * (blocks + again)
    assert computed <= STEPS * (2 * blocks + (again if family == "t5" else 0)) + (first if reentrant else 0)
    assert kept <= 1.02 * live


class Pairs(nn.Module):
    """Checkpoints more than blocks, so that torch runs its function again."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, input_ids, labels):
        x = self.model.wte(input_ids)

        def run(x):
            for block in self.model.h:
                x = block(x).sin()
            return x

        logits = self.model.lm_head(checkpoint(run, x, use_reentrant=False))
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


@pytest.mark.parametrize("recipe", ["fp8[products=all]", "bf16"])
def test_a_function_with_more_than_blocks_may_be_checkpointed(recipe, monkeypatch):
    losses = []
    for checkpointed in (True, False):
        torch.manual_seed(0)
        model = Pairs(LANGUAGE["nano"]())
        if not checkpointed:
            monkeypatch.setitem(Pairs.forward.__globals__, "checkpoint", lambda run, x, **_: run(x))
        engine = Engine(model, torch.optim.AdamW(model.parameters(), lr=1e-3), recipe, fused=True)
        assert len(engine.conversion.blocks) == BLOCKS
        losses.append([])
        for step in range(STEPS):
            with engine.forward():
                loss = model(tokens(step), tokens(step))
            engine.backward(loss)
            engine.step()
            losses[-1].append(loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-5 if recipe == "bf16" else 1e-3)
