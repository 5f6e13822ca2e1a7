"""FSDP2 in BF16: FP32 shards in the optimizer, BF16 for compute, FP32 for the reduction."""
# ruff: noqa

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from llm import Llama, LlamaConfig, token_batches


def setup():
    dist.init_process_group("nccl")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    return init_device_mesh("cuda", (dist.get_world_size(),))


def shard(model, mesh):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.layers:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


def train(steps=10_000, accumulate=4, max_norm=1.0):
    mesh = setup()
    with torch.device("meta"):
        model = Llama(LlamaConfig(width=4096, layers=32, vocab=32000))
    model = shard(model, mesh)
    model.to_empty(device="cuda")
    model.reset_parameters()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 500))
    batches = token_batches(dist.get_rank())
    running = torch.zeros((), device="cuda")
    for step in range(steps):
        for micro in range(accumulate):
            model.set_requires_gradient_sync(micro == accumulate - 1)
            tokens = next(batches).cuda(non_blocking=True)
            logits = model(tokens[:, :-1])
            loss = F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten()) / accumulate
            loss.backward()
            running += loss.detach()
        nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 20 == 0:
            dist.all_reduce(running, op=dist.ReduceOp.AVG)
            print(step, running.item() / 20)
            running.zero_()
        if step % 1000 == 0:
            weights, states = get_state_dict(model, optimizer)
            torch.save({"model": weights, "optimizer": states}, f"step{step}.pt")


if __name__ == "__main__":
    train()
    dist.destroy_process_group()
