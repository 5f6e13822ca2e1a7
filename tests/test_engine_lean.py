"""Lean recipes: BF16 weights with exact master weights, 8-bit moments, checkpoints that every recipe loads."""

import copy
import functools

import pytest
import torch

from narrowgauge import Engine
from narrowgauge.errors import UsageError
from narrowgauge.models.gpt import GPT, GPTConfig
from narrowgauge.models.llama import Llama, LlamaConfig
from narrowgauge.optim import AdamW
from narrowgauge.optim.adamw import join_fp32


def gpt():
    return GPT(GPTConfig(layers=2, width=64, heads=2, vocab=128, context=32))


def llama():
    return Llama(LlamaConfig(layers=2, width=64, heads=4, kv_heads=2, hidden=96, vocab=128, context=32))


def make(recipe, build=gpt, **options):
    torch.manual_seed(0)
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.1)
    return Engine(model, optimizer, recipe, clip_norm=1.0, **options), optimizer


def batch(step):
    tokens = torch.randint(0, 128, (4, 33), generator=torch.Generator().manual_seed(step % 4))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def train(engine, first, last):
    losses = []
    for step in range(first, last):
        with engine.forward():
            loss = engine.model(*batch(step))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


@functools.cache
def plain_losses(build):
    return train(make("bf16", build)[0], 0, 14)


@pytest.mark.parametrize("build", [gpt, llama])
@pytest.mark.parametrize("recipe", ["bf16-lean", "fp8-lean", "bf16[master=split,gradients=bf16]"])
def test_lean_training_matches_fp32_masters(recipe, build):
    lean, _ = make(recipe, build)
    found, wanted = train(lean, 0, 14), plain_losses(build)
    assert wanted[-1] < wanted[0] - 0.5
    assert found[-1] == pytest.approx(wanted[-1], rel=0.03)
    assert lean.model.blocks[0].qkv.weight.dtype is torch.bfloat16
    assert lean.model.blocks[0].norm1.weight.dtype is torch.float32
    assert isinstance(lean.optimizers[0], AdamW)


def test_masters_equal_the_initial_weights_bit_for_bit():
    torch.manual_seed(0)
    wanted = gpt().state_dict()
    engine, _ = make("bf16-lean")
    state = engine.state_dict()["model"]
    assert all(torch.equal(state[name], wanted[name]) for name in wanted)
    assert all(value.dtype is torch.float32 for value in state.values())


def test_hyperparameters_and_schedulers_keep_working():
    engine, optimizer = make("bf16-lean")
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    train(engine, 0, 2)
    schedule.step()
    group = engine.optimizers[0].param_groups[0]
    assert group is optimizer.param_groups[0]
    assert (group["lr"], group["betas"], group["weight_decay"]) == (1e-3, (0.9, 0.95), 0.1)
    engine.load_state_dict(copy.deepcopy(engine.state_dict()))
    schedule.step()
    assert engine.optimizers[0].param_groups[0]["lr"] == 5e-4


@pytest.mark.parametrize("recipe", ["bf16-lean", "fp8-lean"])
def test_resume_continues_bit_exactly(recipe):
    straight, _ = make(recipe)
    losses = train(straight, 0, 5)
    first, _ = make(recipe)
    train(first, 0, 2)
    saved = copy.deepcopy(first.state_dict())
    second, _ = make(recipe)
    train(second, 0, 1)  # must leave no trace
    second.load_state_dict(saved)
    assert train(second, 2, 5) == losses[2:]
    for p, q in zip(straight.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(join_fp32(p), join_fp32(q))


@pytest.mark.parametrize(("old", "new"), [("bf16-lean", "bf16"), ("bf16", "bf16-lean"), ("fp32", "fp8-lean")])
def test_a_state_loads_under_another_recipe(old, new):
    first, _ = make(old)
    train(first, 0, 4)
    second, _ = make(new)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    for p, q in zip(first.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(join_fp32(p), join_fp32(q))
    assert train(second, 4, 8)[-1] == pytest.approx(train(first, 4, 8)[-1], rel=0.05)


def test_a_lean_checkpoint_loads_in_plain_torch():
    engine, _ = make("bf16-lean")
    train(engine, 0, 2)
    model = gpt()
    model.load_state_dict(engine.state_dict()["model"])
    assert model.tok.weight.dtype is torch.float32
    assert torch.equal(model.tok.weight, join_fp32(engine.model.tok.weight))


def test_modules_kept_in_fp32_have_fp32_weights():
    engine, _ = make("bf16-lean[keep=lm_head]")
    assert engine.model.blocks[0].up.weight.dtype is torch.bfloat16
    assert engine.model.tok.weight.dtype is torch.float32  # shared with the head
    train(engine, 0, 2)


def test_unsupported_optimizers_and_options_are_refused():
    model = gpt()
    with pytest.raises(UsageError, match="not Rprop"):
        Engine(model, torch.optim.Rprop(model.parameters(), lr=0.1), "bf16-lean")
    with pytest.raises(UsageError, match="amsgrad"):
        Engine(model, torch.optim.AdamW(model.parameters(), amsgrad=True), "bf16-lean")
    assert model.tok.weight.dtype is torch.float32
    for options, why in (
        ({"clip_norm": 1.0}, "clip_norm=1.0 needs all"),
        ({"accumulate": 2}, "accumulate=2 needs all"),
    ):
        with pytest.raises(UsageError, match=why):
            Engine(model, torch.optim.AdamW(model.parameters()), "bf16[master=split,gradients=released]", **options)
    assert model.tok.weight.dtype is torch.float32


def test_a_model_without_blocks_is_lean_without_recomputation():
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
    engine = Engine(model, torch.optim.AdamW(model.parameters()), "bf16-lean")
    assert engine.checkpointed == [] and model[0].weight.dtype is torch.bfloat16
    plain = torch.nn.Linear(2, 2)
    with pytest.raises(UsageError, match="found no repeated blocks"):
        Engine(plain, torch.optim.AdamW(plain.parameters()), "bf16[checkpoint=full]")
