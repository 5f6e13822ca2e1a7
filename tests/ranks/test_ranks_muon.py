"""Muon over shards: each matrix is gathered, and the weights are those of one process to the bit."""

import pytest
import torch
from processes import run_ranks

from narrowgauge import Engine, optim
from narrowgauge.models.gpt import GPT, GPTConfig
from narrowgauge.optim.masters import join_fp32
from narrowgauge.ranks import shard
from narrowgauge.ranks.world import join_world


def make_engine(recipe, sharded):
    torch.manual_seed(0)
    model = GPT(GPTConfig(layers=2, width=40, heads=4, context=16, vocab=50))  # rows that 4 ranks do not share evenly
    model = shard(model, recipe) if sharded else model
    optimizer = optim.Muon(optim.split_for_muon(model), lr=0.02, adjust_lr_fn="match_rms_adamw")
    return Engine(model, optimizer, recipe)


def train(engine, steps):
    """Train all ranks on the same batch, so that averages over ranks are exact."""
    losses = []
    for step in range(steps):
        tokens = torch.randint(50, (2, 17), generator=torch.Generator().manual_seed(step))
        with engine.forward():
            loss = engine.model(tokens[:, :-1], tokens[:, 1:])
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def collect(engine):
    found = {}
    for name, parameter in engine.inner.named_parameters():
        value = join_fp32(parameter)
        found[name] = (value.full_tensor() if hasattr(value, "full_tensor") else value).flatten().tolist()
    return found


def job(recipe):
    with join_world("cpu") as world:
        engine = make_engine(recipe, True)
        losses = train(engine, 3)
        weights = collect(engine)
        state = optim.full_precision(engine.inner), engine.optimizers[0].state_dict()
        other = make_engine(recipe, True)
        optim.load_full_precision(other.inner, state[0])
        other.optimizers[0].load_state_dict(state[1])
        resumed = train(other, 1), train(engine, 1)
        del world
        return losses, weights, resumed


@pytest.mark.parametrize("recipe", ["fp32", "bf16-lean"])
def test_weights_are_those_of_one_process(recipe, tmp_path):
    alone = make_engine(recipe, False)
    wanted = train(alone, 3)
    expected = collect(alone)
    for losses, weights, (again, went_on) in run_ranks(4, job, tmp_path, recipe):
        assert again == went_on
        if recipe == "fp32":
            assert losses == wanted
            assert weights == expected
        else:  # sharded vectors are BF16 with masters as well, and 8-bit groups run along shards
            assert losses == pytest.approx(wanted, rel=2e-2)
