"""Options that change during training, and groups as scripts for other versions of Muon and SGD make them."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import CyclicLR, OneCycleLR

import narrowgauge as ng
from narrowgauge.errors import UsageError
from narrowgauge.optim.masters import join_fp32
from narrowgauge.parameters import gradient_dtype

pytestmark = pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # a CPU without BF16 products
needs_torch_muon = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")


def make(*shapes: tuple[int, ...]) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes or [(8, 6), (6, 6), (6,)]]


def train(optimizer: Any, steps: int, change: Callable[[int, dict[str, Any]], None] | None = None) -> list[Tensor]:
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(gradient_dtype(parameter))
        for group in optimizer.param_groups:
            if change is not None:
                change(step, group)
        optimizer.step()
    return [parameter.detach().clone() for parameter in parameters]


@pytest.mark.parametrize("momenta", [[0, 0, 0.5, 0.9, 0.9], [0.9, 0.9, 0, 0, 0.9], [0, 0.9, 0, 0.9, 0]])
def test_momentum_of_sgd_can_be_turned_on_and_off(momenta: list[float]) -> None:
    def change(step: int, group: dict[str, Any]) -> None:
        group["momentum"] = momenta[step]

    options: dict[str, Any] = {"lr": 0.1, "momentum": momenta[0], "dampening": 0.25, "weight_decay": 0.1}
    ours = train(ng.optim.SGD(make(), **options), 5, change)
    theirs = train(torch.optim.SGD(make(), foreach=False, **options), 5, change)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_momentum_that_starts_late_is_stored_in_the_group_s_format() -> None:
    (weight,) = make((16, 16))
    ng.optim.narrow(weight)
    optimizer = ng.optim.SGD([weight], lr=0.1, master="split", moments="8bit")
    train(optimizer, 2)
    remainder = optimizer.state[weight]["remainder"]
    optimizer.param_groups[0]["momentum"] = 0.9
    train(optimizer, 2)
    state = optimizer.state[weight]
    assert state["momentum_buffer"].dtype is torch.int8 and bool(state["momentum_buffer"].any())
    assert state["remainder"] is remainder


def test_the_rule_of_a_group_can_change() -> None:
    """After the change the group's moments and steps are those of a new optimizer."""
    ours = make((6, 6))
    optimizer = ng.optim.Muon(ours, lr=1e-3, weight_decay=0.0)
    train(optimizer, 3)
    start = ours[0].detach().clone()
    optimizer.param_groups[0].update(rule="adamw", eps=1e-8)
    (changed,) = train(optimizer, 3)
    assert set(optimizer.state[ours[0]]) == {"step", "exp_avg", "exp_avg_sq"}
    fresh = ng.optim.AdamW([nn.Parameter(start)], lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0)
    assert torch.equal(changed, train(fresh, 3)[0])


@needs_torch_muon
@pytest.mark.parametrize("converted", [False, True])
@pytest.mark.parametrize(
    "schedule",
    [
        lambda optimizer: OneCycleLR(optimizer, 0.005, total_steps=9),
        lambda optimizer: CyclicLR(optimizer, 1e-4, 0.005, step_size_up=3),
    ],
)
def test_schedules_of_momentum_reach_muon(schedule: Callable[[Any], Any], converted: bool) -> None:
    """Such a schedule changes betas if the defaults have some, else the momentum."""
    momenta = []
    for own in (False, True):
        parameters = make((8, 6), (6, 6))
        optimizer: Any = torch.optim.Muon(parameters)
        if own and converted:
            ng.Engine(nn.ParameterList(parameters), optimizer, "bf16-lean")
        elif own:
            optimizer = ng.optim.Muon(parameters)
        scheduler = schedule(optimizer)
        momenta.append([])
        for _ in range(6):
            momenta[-1].append(optimizer.param_groups[0]["momentum"])
            train(optimizer, 1)
            scheduler.step()
    assert momenta[0] == momenta[1] and len(set(momenta[0])) > 2


@needs_torch_muon
def test_groups_can_be_added_to_copied_and_converted_optimizers() -> None:
    def add(optimizer: Any) -> dict[str, Any]:
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
        group: dict[str, Any] = optimizer.param_groups[-1]
        return group

    optimizer = ng.optim.Muon(make(), lr=0.02, adamw_lr=2e-3, adamw_betas=(0.8, 0.9), adamw_eps=1e-6)
    for copied in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer)), optimizer):
        group = add(copied)
        assert (group["rule"], group["lr"], group["betas"], group["eps"]) == ("adamw", 2e-3, (0.8, 0.9), 1e-6)
    matrix = nn.Linear(8, 8, bias=False)
    plain = torch.optim.Muon(matrix.parameters(), lr=3e-3)
    ng.Engine(matrix, plain, "bf16-lean")
    for copied in (plain, copy.deepcopy(plain)):
        group = add(copied)
        assert (group["rule"], group["lr"], group["betas"], group["eps"]) == ("adamw", 3e-3, (0.9, 0.95), 1e-8)


@pytest.mark.parametrize(
    "name, values", [("use_muon", (True, False)), ("kind", ("muon", "adamw")), ("algorithm", ("muon", "adam"))]
)
def test_groups_name_their_rule_as_in_other_versions_of_muon(name: str, values: tuple[Any, Any]) -> None:
    inner, embedding = make((8, 8), (32, 8))
    groups = [
        {"params": [embedding], "lr": 0.3, "betas": (0.8, 0.95), "eps": 1e-10, name: values[1]},
        {"params": [inner], "lr": 0.05, "momentum": 0.9, name: values[0]},
    ]
    optimizer = ng.optim.Muon(groups)
    assert [group["rule"] for group in optimizer.param_groups] == ["adamw", "muon"]
    assert [group[name] for group in optimizer.param_groups] == [values[1], values[0]]
    train(optimizer, 2)
    saved = copy.deepcopy(optimizer.state_dict())
    for group in saved["param_groups"]:
        del group["rule"]  # as the other version saves it
    resumed = ng.optim.Muon([{**group, "params": make((8, 8) if i else (32, 8))} for i, group in enumerate(groups)])
    resumed.load_state_dict(saved)
    assert [group["rule"] for group in resumed.param_groups] == ["adamw", "muon"]


def test_rules_that_contradict_each_other() -> None:
    for group in ({"use_muon": False, "rule": "muon"}, {"kind": "adamw", "use_muon": True}, {"algorithm": "lion"}):
        with pytest.raises(UsageError, match=r"different rules|algorithm='lion'"):
            ng.optim.Muon([{"params": make((4, 4)), **group}])
    label = ng.optim.Muon([{"params": make((4, 4)), "kind": "attention"}])
    assert label.param_groups[0]["rule"] == "muon"


def test_a_rate_for_muon_that_adamw_would_use_as_well() -> None:
    with pytest.warns(UserWarning, match="give adamw_lr"):
        ng.optim.Muon(make((8, 3, 3, 3)), lr=0.24, momentum=0.6)  # convolutions
    vector, matrix = make((4,), (4, 4))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ng.optim.Muon([vector, matrix], lr=0.02, adamw_lr=0.02)
        ng.optim.Muon([vector, matrix], lr=0.02, adjust_lr_fn="match_rms_adamw")
        ng.optim.Muon([{"params": [vector], "lr": 0.02}, {"params": [matrix]}], lr=0.02)
        ng.optim.Muon([matrix], lr=0.02)


def test_a_group_that_is_refused_leaves_no_part_behind() -> None:
    parameters = make()
    optimizer = ng.optim.Muon(parameters)
    with pytest.raises(ValueError, match="more than one parameter group"):
        optimizer.add_param_group({"params": [*make((3, 3)), parameters[-1]]})
    with pytest.raises(UsageError, match="an option has a wrong type"):
        optimizer.add_param_group({"params": make((3, 3)), "momentum": None})
    with pytest.raises(TypeError, match="no order"):
        optimizer.add_param_group({"params": set(make((3, 3)))})
    assert len(optimizer.param_groups) == 2
    optimizer.add_param_group({"params": [], "lr": 0.5})
    assert optimizer.param_groups[-1]["lr"] == 0.5  # users count their groups


@pytest.mark.parametrize("kind", ["AdamW", "Muon", "SGD", "Lion", "Adafactor"])
def test_a_learning_rate_that_yaml_read_as_text(kind: str) -> None:
    with pytest.raises(UsageError, match=f"{kind}: lr='1e-3' is text; expected a number"):
        getattr(ng.optim, kind)(make((2, 2)), lr="1e-3")


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
@pytest.mark.parametrize("kind", ["AdamW", "Muon", "SGD", "Lion", "Adafactor"])
@pytest.mark.parametrize("master", ["split", "fp32"])
def test_copies_have_the_masters_and_the_formats_of_gradients(duplicate: Any, kind: str, master: str) -> None:
    parameters = [nn.Parameter(p.detach().bfloat16()) for p in make((16, 12), (6,))]
    optimizer = getattr(ng.optim, kind)(parameters, lr=1e-3, master=master, gradients="fp32")
    train(optimizer, 3)
    copied = duplicate(optimizer)
    others = [parameter for group in copied.param_groups for parameter in group["params"]]
    assert all(p.grad_dtype is torch.float32 for p in others), "autograd would add gradients up in BF16"
    for _ in range(2):
        assert all(torch.equal(join_fp32(a), join_fp32(b)) for a, b in zip(parameters, others, strict=True))
        assert not any(torch.equal(join_fp32(p), p.float()) for p in others)
        train(optimizer, 1)
        train(copied, 1)


def test_matrices_without_elements_are_stepped() -> None:
    parameters = make((0, 4), (4, 0), (4, 4))
    assert train(ng.optim.Muon(parameters, lr=1e-3), 2)[2].isfinite().all()
