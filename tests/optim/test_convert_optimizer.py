"""A user's AdamW under a lean recipe: the same object, with its state, hooks, schedulers and groups."""

import copy
import pickle

import pytest
import torch
from torch import nn

from narrowgauge import Engine
from narrowgauge.errors import UsageError
from narrowgauge.optim import AdamW, convert_optimizer, full_precision
from narrowgauge.optim.masters import join_fp32

RECIPES = ["bf16-lean", "fp8-lean", "bf16[moments=8bit]", "bf16[moments=bf16]", "bf16[master=split]",
           "bf16[master=none]", "bf16-lean[gradients=released]", "bf16[gradients=released]"]  # fmt: skip
KINDS = [{}, {"fused": True}, {"foreach": True}]


class Plain(torch.optim.AdamW):
    """A subclass that only adds its own arguments and methods."""

    def __init__(self, parameters):
        super().__init__(parameters, lr=1e-2)

    def rate(self):
        return self.param_groups[0]["lr"]


class Centralised(torch.optim.AdamW):
    def step(self, closure=None):
        return super().step(closure)


class OwnStateDict(torch.optim.AdamW):
    def state_dict(self):
        return super().state_dict()


def make(kind=torch.optim.AdamW, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
    return model, kind(model.parameters(), **options)


def train(engine, steps=1):
    x = torch.randn(16, 32, generator=torch.Generator().manual_seed(0))
    losses = []
    for _ in range(steps):
        with engine.forward():
            loss = (engine.model(x).float() - x.flip(1)).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("options", KINDS, ids=str)
@pytest.mark.parametrize("recipe", RECIPES)
def test_the_users_optimizer_saves_and_loads_the_state(recipe, options):
    model, optimizer = make(lr=1e-2, **options)
    engine = Engine(model, optimizer, recipe)
    assert engine.optimizers == [optimizer] and isinstance(optimizer, torch.optim.AdamW)
    train(engine, 3)
    assert set(optimizer.state_dict()["state"]) == {0, 1, 2, 3}
    weights, state = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    masters = {name: value.clone() for name, value in full_precision(model).items()}
    wanted = train(engine, 3)
    model.load_state_dict(weights)
    optimizer.load_state_dict(state)
    assert all(torch.equal(value, masters[name]) for name, value in full_precision(model).items())
    found = train(engine, 3)
    assert found == wanted or "fp8" in recipe  # the engine's scales have changed
    assert optimizer.foreign_writes == 0


@pytest.mark.parametrize("recipe", RECIPES)
def test_hooks_and_schedulers_made_before_and_after_work(recipe):
    model, optimizer = make(lr=1e-2)
    heard = []
    optimizer.register_step_pre_hook(lambda one, *_: heard.append(("before", one is optimizer)))
    first = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    engine = Engine(model, optimizer, recipe)
    optimizer.register_step_post_hook(lambda one, *_: heard.append(("after", one is optimizer)))
    second = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    for _ in range(2):  # a scheduler's warning would be an error
        train(engine)
        first.step()
        second.step()
    assert heard == [("before", True), ("after", True)] * 2
    assert optimizer.param_groups[0]["lr"] == pytest.approx(1e-2 / 16)


def test_hooks_around_states_run_with_the_whole_state():
    model, optimizer = make()
    heard = []
    optimizer.register_state_dict_post_hook(lambda one, state: heard.append(len(state["state"])))
    optimizer.register_load_state_dict_pre_hook(lambda one, state: heard.append(len(state["state"])))
    optimizer.register_load_state_dict_post_hook(lambda one: heard.append(len(one.state)))
    engine = Engine(model, optimizer, "bf16-lean")
    train(engine)
    heard.clear()
    optimizer.load_state_dict(optimizer.state_dict())
    assert heard == [4, 4, 4]


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_group_added_later_is_trained(recipe):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
    model[0].requires_grad_(False)
    optimizer = torch.optim.AdamW(model[2].parameters(), lr=1e-2)
    engine = Engine(model, optimizer, recipe)
    train(engine)
    model[0].requires_grad_(True)
    optimizer.add_param_group({"params": list(model[0].parameters()), "lr": 1e-3})
    engine.named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    before = join_fp32(model[0].weight).clone()
    train(engine, 2)
    assert not torch.equal(join_fp32(model[0].weight), before)
    group = optimizer.param_groups[1]
    assert (group["moments"], group["master"]) == (engine.recipe.moments, engine.recipe.master)
    assert optimizer.state[model[0].weight]["step"] == 2
    if engine.released:
        assert all(p.grad is None for p in model.parameters())
    with pytest.raises(UsageError, match="float16"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3).half())]})
    assert len(optimizer.param_groups) == 2


def test_a_group_added_after_another_engine_keeps_its_gradients():
    model, optimizer = make()
    Engine(model, optimizer, "bf16[gradients=released]")
    Engine(model, optimizer, "bf16")
    extra = nn.Parameter(torch.ones(3))
    optimizer.add_param_group({"params": [extra]})
    (extra * 2).sum().backward()
    assert extra.grad is not None


@pytest.mark.parametrize("recipe", ["bf16-lean", "bf16[moments=8bit]", "bf16[master=split]"])
def test_a_subclass_with_its_own_step_is_rejected_unchanged(recipe):
    for kind, method in ((Centralised, "step"), (OwnStateDict, "state_dict")):
        model, optimizer = make(kind)
        with pytest.raises(
            UsageError,
            match=rf"AdamW's {method}\(\) and would never call the one that {kind.__name__}.*register_step_pre_hook",
        ):
            Engine(model, optimizer, recipe)
        assert type(optimizer) is kind and model[0].weight.dtype is torch.float32
    model, optimizer = make()
    optimizer.step = lambda closure=None: None
    with pytest.raises(UsageError, match=r"never call the one that AdamW defines"):
        Engine(model, optimizer, recipe)
    model, optimizer = make(Centralised, lr=1e-2)
    assert train(Engine(model, optimizer, "bf16"), 2)[1] > 0


def test_other_subclasses_are_converted_and_keep_their_methods():
    model, optimizer = make(Plain)
    engine = Engine(model, optimizer, "bf16-lean")
    assert train(engine, 5)[-1] < train(engine, 1)[0] * 2 and optimizer.rate() == 1e-2
    assert isinstance(optimizer, Plain) and isinstance(optimizer, AdamW) and type(optimizer).__name__ == "Plain"


def test_unsupported_complex_parameters_are_rejected_before_any_change():
    model = nn.Linear(4, 4)
    model.other = nn.Parameter(torch.zeros(4, dtype=torch.complex128))
    with pytest.raises(UsageError, match="complex128"):
        convert_optimizer(torch.optim.AdamW(model.parameters()), "split", "8bit", [model.weight])
    assert model.weight.dtype is torch.float32


@pytest.mark.parametrize("kind", [torch.optim.AdamW, Plain])
def test_a_converted_optimizer_can_be_copied_and_pickled(kind):
    model, optimizer = make(kind)
    train(Engine(model, optimizer, "bf16-lean"), 2)
    for again in (pickle.loads(pickle.dumps(optimizer)), copy.deepcopy(optimizer)):
        assert isinstance(again, kind) and isinstance(again, AdamW)
        for p, q in zip(optimizer.param_groups[0]["params"], again.param_groups[0]["params"], strict=True):
            p.grad, q.grad = torch.ones_like(p), torch.ones_like(p)
        kept = [join_fp32(p).clone() for p in optimizer.param_groups[0]["params"]]
        state = copy.deepcopy(optimizer.state_dict())
        weights = [p.detach().clone() for p in optimizer.param_groups[0]["params"]]
        optimizer.step()
        again.step()
        for p, q in zip(optimizer.param_groups[0]["params"], again.param_groups[0]["params"], strict=True):
            assert torch.equal(join_fp32(p), join_fp32(q))
        for p, weight in zip(optimizer.param_groups[0]["params"], weights, strict=True):
            p.data.copy_(weight)
        optimizer.load_state_dict(state)
        assert all(torch.equal(join_fp32(p), old) for p, old in zip(model.parameters(), kept, strict=True))


def test_a_state_of_torch_continues():
    lean, optimizer = make(lr=1e-2)
    plain, other = make(lr=1e-2, foreach=False)
    for step in range(4):
        if step == 2:
            optimizer = convert_optimizer(optimizer, "fp32", "fp32", [])
        for p, q in zip(lean.parameters(), plain.parameters(), strict=True):
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(step))
            q.grad = p.grad.clone()
        optimizer.step()
        other.step()
    assert all(torch.equal(p, q) for p, q in zip(lean.parameters(), plain.parameters(), strict=True))


class MuonOfOthers(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {"lr": 0.02})


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda p: torch.optim.Adam(p, weight_decay=0.1), "this Adam: its weight decay is coupled"),
        (lambda p: torch.optim.AdamW(p, amsgrad=True), "this AdamW: amsgrad is not supported"),
        (MuonOfOthers, r"not .*\.MuonOfOthers; use narrowgauge\.optim\.Muon, or a recipe with master=fp32"),
        (torch.optim.RMSprop, r"RMSprop; use torch\.optim\.AdamW"),
    ],
)
def test_the_error_names_the_reason(make, message):
    model = nn.Linear(4, 4)
    with pytest.raises(UsageError, match=message):
        Engine(model, make(model.parameters()), "bf16-lean")
