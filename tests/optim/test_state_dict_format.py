"""Saved states: torch refuses states that it cannot read, other formats and older states load, no bit is lost."""

import copy
import io

import pytest
import torch
from torch import nn

from narrowgauge import Engine
from narrowgauge.optim import AdamW, full_precision, narrow, plain_state
from narrowgauge.optim.masters import join_fp32

SHAPES = [(37, 19), (300,), ()]


def make(master, moments="fp32", narrowed=True):
    generator = torch.Generator().manual_seed(0)
    parameters = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]
    if narrowed:
        for p in parameters:
            narrow(p)
    return parameters, AdamW(parameters, lr=1e-2, master=master, moments=moments)


def step(parameters, optimizer, first=0, steps=1):
    for seed in range(first, first + steps):
        generator = torch.Generator().manual_seed(seed)
        for p in parameters:
            p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
        optimizer.step()


def engine_of(recipe):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    engine = Engine(model, torch.optim.AdamW(model.parameters(), lr=1e-2), recipe)
    for seed in range(3):
        x = torch.randn(8, 64, generator=torch.Generator().manual_seed(seed))
        with engine.forward():
            loss = model(x).float().square().mean()
        engine.backward(loss)
        engine.step()
    return engine


@pytest.mark.parametrize("recipe", ["bf16-lean", "fp8-lean", "bf16[moments=8bit]", "bf16[moments=bf16]"])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam])
def test_torch_loads_a_state_correctly_or_names_the_fix(recipe, kind):
    engine = engine_of(recipe)
    for state in (engine.state_dict()["optimizers"][0], engine.optimizers[0].state_dict()):
        wanted = plain_state(state)["state"]
        model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
        optimizer = kind(model.parameters())
        if engine.recipe.moments == "8bit":
            with pytest.raises(ValueError, match="plain_state"):
                optimizer.load_state_dict(copy.deepcopy(state))
            optimizer = kind(model.parameters())
            optimizer.load_state_dict(plain_state(state))
        else:
            optimizer.load_state_dict(copy.deepcopy(state))
        for index, p in enumerate(model.parameters()):
            assert optimizer.state[p]["exp_avg"].abs().max() < 1
            for name in ("exp_avg", "exp_avg_sq"):
                torch.testing.assert_close(optimizer.state[p][name], wanted[index][name].float(), rtol=0, atol=0)
            assert float(optimizer.state[p]["step"]) == 3


@pytest.mark.parametrize("moments", ["fp32", "bf16", "8bit"])
@pytest.mark.parametrize(("first", "then"), [("split", "fp32"), ("fp32", "split"), ("split", "split")])
def test_masters_keep_every_bit_between_formats(first, then, moments):
    parameters, optimizer = make(first, moments)
    step(parameters, optimizer, 0, 3)
    masters = [join_fp32(p).clone() for p in parameters]
    fresh = [nn.Parameter(p.detach().clone()) for p in parameters]
    other = AdamW(fresh, lr=1e-2, master=then, moments=moments)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert all(torch.equal(join_fp32(q), master) for q, master in zip(fresh, masters, strict=True))
    again = AdamW(fresh, lr=1e-2, master=first, moments=moments)  # and without a state: from the parameters alone
    again.make_states()
    assert all(torch.equal(join_fp32(q), master) for q, master in zip(fresh, masters, strict=True))
    again.load_state_dict(other.state_dict())
    step(parameters, optimizer, 5)
    step(fresh, again, 5)
    assert all(torch.equal(join_fp32(q), join_fp32(p)) for p, q in zip(parameters, fresh, strict=True))
    assert again.foreign_writes == 0


MOVES = [("bf16", "bf16-lean"), ("bf16-lean", "bf16"), ("bf16[master=split]", "fp32"), ("fp32", "bf16[master=split]"),
         ("bf16-lean", "bf16[master=split]")]  # fmt: skip


@pytest.mark.parametrize(("old", "new"), MOVES)
def test_masters_survive_a_second_engine_bit_for_bit(old, new):
    first, second = engine_of(old), engine_of(new)
    wanted = full_precision(first.inner)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    assert all(torch.equal(value, wanted[name]) for name, value in full_precision(second.inner).items())


def test_8_bit_codes_round_trip():
    parameters, optimizer = make("split", "8bit")
    step(parameters, optimizer, 0, 5)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    fresh = [nn.Parameter(p.detach().clone()) for p in parameters]
    other = AdamW(fresh, lr=1e-2, master="split", moments="8bit")
    other.load_state_dict(torch.load(file, weights_only=True))
    for p, q in zip(parameters, fresh, strict=True):
        for name, value in optimizer.state[p].items():
            assert torch.equal(value, other.state[q][name]) and value.dtype is other.state[q][name].dtype, name


def test_older_states_load():
    """8-bit moments under torch's names, remainders without checksums, and 32-bit remainders, as shards had them."""
    parameters, optimizer = make("split", "8bit")
    step(parameters, optimizer, 0, 5)
    state = copy.deepcopy(optimizer.state_dict())
    for saved in state["state"].values():
        saved["step"] = saved.pop("step_8bit")
        for name in ("exp_avg", "exp_avg_sq"):
            saved[name] = saved.pop(f"{name}_8bit")
        del saved["check"]
    state["state"][1]["remainder"] = state["state"][1]["remainder"].int()
    decoded = plain_state(state)["state"]
    assert all(
        torch.equal(decoded[i]["exp_avg"], plain_state(optimizer.state_dict())["state"][i]["exp_avg"]) for i in range(3)
    )
    fresh = [nn.Parameter(p.detach().clone()) for p in parameters]
    other = AdamW(fresh, lr=1e-2, master="split", moments="8bit")
    other.load_state_dict(state)
    step(parameters, optimizer, 5)
    step(fresh, other, 5)
    assert all(torch.equal(join_fp32(q), join_fp32(p)) for p, q in zip(parameters, fresh, strict=True))
