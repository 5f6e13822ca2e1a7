"""Gradients that are stepped and freed during backward, and FP32 gradients of BF16 weights."""

import pytest
import torch

from narrowgauge import Engine
from narrowgauge.errors import UsageError
from narrowgauge.models.gpt import GPT, GPTConfig
from narrowgauge.optim import AdamW, narrow
from narrowgauge.optim.adamw import join_fp32


def make(recipe, **options):
    torch.manual_seed(0)
    model = GPT(GPTConfig(layers=2, width=64, heads=2, vocab=128, context=32))
    decay = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    return Engine(model, torch.optim.AdamW(groups, lr=2e-3), recipe, **options)


def backward(engine, step=0):
    tokens = torch.randint(0, 128, (4, 33), generator=torch.Generator().manual_seed(step))
    with engine.forward():
        loss = engine.model(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
    engine.backward(loss)
    return loss.item()


def masters(engine):
    return {name: join_fp32(p).clone() for name, p in engine.model.named_parameters()}


@pytest.mark.parametrize("recipe", ["bf16-lean", "fp8-lean", "bf16", "bf16[master=split,gradients=bf16]"])
def test_released_gradients_give_the_same_weights_bit_for_bit(recipe):
    kept = make(recipe)
    name, _, rest = recipe.partition("[")
    changes = rest.replace("gradients=bf16", "").strip(",]")
    freed = make(f"{name}[{changes},gradients=released]" if changes else f"{name}[gradients=released]")
    for step in range(4):
        assert backward(kept, step) == backward(freed, step)
        assert all(p.grad is not None for p in kept.model.parameters())
        assert all(p.grad is None for p in freed.model.parameters())
        mine, theirs = freed.step(), kept.step()
        assert mine.applied and mine.grad_norm == pytest.approx(theirs.grad_norm, rel=1e-6)
    for name, wanted in masters(kept).items():
        assert torch.equal(masters(freed)[name], wanted), name


def test_resume_continues_bit_exactly():
    whole = make("bf16-lean[gradients=released]")
    part = make("bf16-lean[gradients=released]")
    for step in range(4):
        backward(whole, step)
        whole.step()
    for step in range(2):
        backward(part, step)
        part.step()
    other = make("bf16-lean[gradients=released]")
    other.load_state_dict(part.state_dict())
    for step in range(2, 4):
        backward(other, step)
        other.step()
    assert all(torch.equal(a, b) for a, b in zip(masters(other).values(), masters(whole).values(), strict=True))


def test_gradients_after_a_bad_one_are_not_stepped():
    engine = make("bf16-lean[gradients=released]")
    engine.model.blocks[1].qkv.weight.register_hook(lambda g: g * float("inf"))
    before = masters(engine)
    backward(engine)
    report = engine.step()
    assert not report.applied and engine.skipped == 1
    changed = {name for name, master in masters(engine).items() if not torch.equal(master, before[name])}
    assert "norm.weight" in changed and "blocks.1.qkv.weight" not in changed
    assert not any(name.startswith("blocks.0") for name in changed)


def test_a_second_backward_is_refused_and_a_new_engine_keeps_gradients():
    engine = make("bf16[gradients=released]")
    backward(engine)
    with pytest.raises(UsageError, match="second backward"):
        backward(engine)
    plain = Engine(engine.model, torch.optim.AdamW(engine.model.parameters()), "bf16")
    backward(plain)
    assert all(p.grad is not None for p in plain.model.parameters())
    plain.step()


def test_a_loss_scale_is_refused():
    with pytest.raises(UsageError, match="before a loss scale"):
        make("fp16[gradients=released]")


@pytest.mark.parametrize("recipe", ["bf16[master=split]", "fp8[master=split,moments=8bit]", "bf16[master=none]"])
def test_fp32_gradients_of_bf16_weights(recipe):
    engine = make(recipe, accumulate=2)
    assert engine.recipe.gradients == "fp32"
    first = backward(engine)
    weight = engine.model.blocks[0].qkv.weight
    assert weight.dtype is torch.bfloat16 and weight.grad.dtype is torch.float32
    engine.step()
    backward(engine, 1)
    assert not torch.equal(weight.grad, weight.grad.bfloat16().float())  # summed in FP32
    assert engine.step().applied
    for _ in range(10):
        for _ in range(2):
            last = backward(engine, 0)
            engine.step()
    assert last < first - 0.3
    if engine.recipe.master == "split":
        backward(Engine(engine.model, torch.optim.AdamW(engine.model.parameters()), "bf16-lean"))
        assert weight.grad.dtype is torch.bfloat16


def test_fp32_gradients_without_an_engine():
    torch.manual_seed(0)
    linear = torch.nn.Linear(8, 4, bias=False)
    narrow(linear.weight)
    optimizer = AdamW(linear.parameters(), lr=1e-2, master="split", gradients="fp32")
    linear(torch.randn(3, 8).bfloat16()).float().square().sum().backward()
    assert linear.weight.grad.dtype is torch.float32
    before = join_fp32(linear.weight).clone()
    optimizer.step()
    assert not torch.equal(join_fp32(linear.weight), before)
    with pytest.raises(UsageError, match="gradients='fp16' is unknown"):
        AdamW(linear.parameters(), gradients="fp16")
