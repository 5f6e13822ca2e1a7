"""FSDP and DDP on one GPU with NCCL: losses match training without ranks, and steps do not synchronize."""

import os
import socket

import pytest
import torch

from narrowgauge import Engine
from narrowgauge.models.gpt import GPT, GPTConfig
from narrowgauge.ranks import replicate, shard
from narrowgauge.runs.optimizers import make_adamw

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore:Synchronization debug mode"),
    pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream"),
]
PARALLEL = {"none": lambda model, recipe: model, "fsdp": shard, "ddp": replicate}
RECIPES = ("fp32", "bf16", "fp16", "fp8", "bf16-lean", "fp8-lean")


@pytest.fixture(scope="module", autouse=True)
def group():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.distributed.init_process_group("cpu:gloo,cuda:nccl", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def train_losses(recipe, parallel, forbid_sync=False):
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = GPT(GPTConfig(layers=2, width=256, heads=4, context=128, vocab=512))
    model = PARALLEL[parallel](model, recipe)
    engine = Engine(model, make_adamw(model, 1e-3, 0.1), recipe, clip_norm=1.0)
    losses = []
    for step in range(10):
        tokens = torch.randint(0, 512, (8, 129), generator=torch.Generator().manual_seed(step)).cuda()
        torch.cuda.set_sync_debug_mode("error" if forbid_sync and step > 2 else "default")
        try:
            with engine.forward():
                loss = engine.model(tokens[:, :-1], tokens[:, 1:])
            engine.backward(loss)
            engine.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        losses.append(loss.detach())
    return [loss.item() for loss in losses]


@pytest.mark.parametrize("parallel", ["fsdp", "ddp"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_losses_match_those_without_ranks(recipe, parallel):
    exact = recipe == "fp32"
    assert train_losses(recipe, parallel) == pytest.approx(train_losses(recipe, "none"), rel=1e-5 if exact else 3e-3)


@pytest.mark.parametrize("recipe", ["bf16", "fp8", "fp8-lean"])
def test_shards_do_not_synchronize(recipe):
    assert len(train_losses(recipe, "fsdp", forbid_sync=True)) == 10
