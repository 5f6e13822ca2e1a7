"""Weights of several ranks that are written by hand are read by the next forward, sharded or replicated."""

import pytest
import torch
from processes import run_ranks

from narrowgauge import Engine
from narrowgauge.models.gpt import GPT, GPTConfig
from narrowgauge.optim.sharded import to_local
from narrowgauge.ranks import replicate, shard
from narrowgauge.ranks.world import join_world
from narrowgauge.runs.optimizers import make_adamw

RECIPES = ("bf16", "fp8", "fp8-lean")
FACTORS = (0.5, 1.5, 3.0)


def compute_losses(recipe, distribute=None):
    """Return losses in evaluation and in training, after each write through ``.data``, with steps in between."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(layers=2, width=64, heads=4, context=32, vocab=112))
    model = model if distribute is None else distribute(model, recipe)
    engine = Engine(model, make_adamw(model, 1e-3, 0.1), recipe)
    batch = (torch.randint(0, 112, (4, 32), generator=torch.Generator().manual_seed(1)),) * 2
    losses = []
    for factor in FACTORS:
        for parameter in model.parameters():
            to_local(parameter).data.mul_(factor)
        with engine.evaluating():
            losses.append(engine.model(*batch).item())
        with engine.forward():
            loss = engine.model(*batch)
        losses.append(loss.item())
        engine.backward(loss)
        engine.step()
    return losses


def compute_on_rank():
    with join_world("cpu"):
        return {
            f"{recipe}|{way}": compute_losses(recipe, distribute)
            for recipe in RECIPES
            for way, distribute in (("fsdp", shard), ("ddp", replicate))
        }


def test_ranks_read_weights_that_were_written_by_hand(tmp_path):
    found = run_ranks(2, compute_on_rank, tmp_path)
    assert found[0] == found[1]
    for case, losses in found[0].items():
        alone = compute_losses(case.split("|")[0])
        assert losses == pytest.approx(alone, rel=2e-2), case
        assert abs(alone[-1] - alone[0]) > 0.5 * alone[0]
