"""Memory plans on several ranks: all use the plan of the rank with the least room, and compute as one process does."""

import pytest
import torch
from processes import run_ranks

from narrowgauge import Engine
from narrowgauge.models.gpt import GPT, GPTConfig
from narrowgauge.nn.memory_plan import MemoryPlan
from narrowgauge.ranks import replicate, shard
from narrowgauge.ranks.world import join_world
from narrowgauge.runs.optimizers import make_adamw

RECIPE, ALL_KEPT = "fp8[products=all]", "fp8[products=all,activations=bf16]"
BLOCKS = {"blocks.0": "none", "blocks.1": "selective", "blocks.2": "full", "blocks.3": "none"}


def make_engine(way, plan, recipe=RECIPE):
    torch.manual_seed(0)
    model = GPT(GPTConfig(layers=4, width=64, heads=4, context=32, vocab=100))
    model = {"ddp": replicate, "fsdp": shard}[way](model, recipe)
    return Engine(model, make_adamw(model, 3e-3, 0.1), recipe, memory_budget=plan)


def train(engine, rank):
    losses = []
    for step in range(3):
        tokens = torch.randint(100, (2, 33), generator=torch.Generator().manual_seed(2 * step + rank))
        with engine.forward():
            loss = engine.model(tokens[:, :-1], tokens[:, 1:])
        engine.backward(loss)
        engine.step()
        losses.append(float(engine.update_sync.average(loss.detach())))
    return losses


def job(way):
    with join_world("cpu") as world:
        engine = make_engine(way, MemoryPlan(budget=10**9, blocks=BLOCKS))
        own = [["none", "8bit", "full"], ["selective", "none", "8bit"]][world.rank]
        agreed = engine._memory._agree(own)
        largest = engine.update_sync.maximum([float(world.rank), -float(world.rank)])
        planned = train(engine, world.rank)
        return planned, train(make_engine(way, None, ALL_KEPT), world.rank), agreed, largest


@pytest.mark.parametrize("way", ["ddp", "fsdp"])
def test_ranks_agree_on_what_keeps_least_and_train_as_without_plan(way, tmp_path):
    for planned, usual, agreed, largest in run_ranks(2, job, tmp_path, way):
        assert planned == usual
        assert agreed == ["selective", "8bit", "full"]
        assert largest == [1.0, 0.0]
