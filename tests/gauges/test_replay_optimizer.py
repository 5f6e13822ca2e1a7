"""Replay names the optimizer and its setting if an update destroyed the weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop

from narrowgauge import Engine
from narrowgauge import optim as own
from narrowgauge.gauges.capture import Recorder
from narrowgauge.gauges.replay.optimizer_settings import find_faulty_setting, read_settings
from narrowgauge.gauges.replay.replay import replay
from narrowgauge.gauges.replay.result import Replay


class Words(nn.Module):
    """An embedding whose unused rows never have a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.out = nn.Embedding(9, 5), nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.out(self.rows(x))
        return result


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch) - 1).square().mean()


def train_until_captured(
    make: Callable[[Any], Optimizer | list[Optimizer]],
    folder: Path,
    *,
    before_step: Callable[[int, Any], None] = lambda step, optimizer: None,
    prepare: Callable[[nn.Module], None] = lambda model: None,
    steps: int = 60,
) -> Replay:
    torch.manual_seed(0)
    model = Words()
    prepare(model)
    optimizer = make(model)
    engine = Engine(model, optimizer, "fp32")
    recorder = Recorder(engine, folder, tell=lambda line: None)
    for step in range(1, steps + 1):
        before_step(step, optimizer)
        batch = torch.tensor([[0, 1, 2, 3], [4, step % 5, 1, 0]]) if step < 5 else torch.tensor([[8, step % 9]])
        recorder.record_batch(batch)
        with engine.forward():
            value = loss(engine.model, batch)
        engine.backward(value)
        path = recorder.record_step(engine.step(), value)
        if path is not None:
            return replay(path, Words, loss)
    raise AssertionError("nothing was captured")


def set_rate(step_with_nan: int) -> Callable[[int, Any], None]:
    def set(step: int, optimizer: Any) -> None:
        optimizer.param_groups[0]["lr"] = float("nan") if step == step_with_nan else 1e-3

    return set


def fill_rate(step: int, optimizer: Any) -> None:
    """Changes a learning rate that is a tensor, in place."""
    optimizer.param_groups[0]["lr"].fill_(torch.nan if step == 3 else 1e-3)


def zero_gradients(step: int, optimizer: Any) -> None:
    """Gives the model a matrix whose gradient is always 0."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.dim() == 2 and parameter.shape[0] == 5:
                parameter.register_hook(torch.zeros_like)


FAULTS: dict[str, tuple[Callable[[Any], Any], Callable[[int, Any], None] | None, str]] = {
    "lr NaN in one update": (lambda m: AdamW(m.parameters(), 1e-3), set_rate(3), "AdamW lr=nan"),
    "lr NaN in SGD": (lambda m: SGD(m.parameters(), 1e-3), set_rate(4), "SGD lr=nan"),
    "lr tensor": (lambda m: AdamW(m.parameters(), torch.tensor(1e-3), foreach=False), fill_rate, "AdamW lr=nan"),
    "eps 0": (lambda m: Adam(m.parameters(), 1e-3, eps=0), None, "Adam eps=0"),
    "eps 0 in RMSprop": (lambda m: RMSprop(m.parameters(), 1e-3, eps=0), None, "RMSprop eps=0"),
    "decay": (lambda m: AdamW(m.parameters(), 1e-2, weight_decay=1e5), None, "AdamW weight_decay=100000"),
    "decay in SGD": (lambda m: SGD(m.parameters(), 0.1, weight_decay=300), None, "SGD weight_decay=300"),
    "infinite decay": (lambda m: SGD(m.parameters(), 0.1, weight_decay=float("inf")), None, "SGD weight_decay=inf"),
    "momentum": (lambda m: SGD(m.parameters(), 0.1, momentum=2.0), None, "SGD momentum=2"),
    "negative rate": (lambda m: SGD(m.parameters(), 0.1),
                      lambda step, optimizer: optimizer.param_groups[0].update(lr=-5.0), "SGD lr=-5"),
    "Muon's rate": (lambda m: own.Muon(own.split_for_muon(m), 1e-3), set_rate(3), "Muon lr=nan"),
    "Muon's eps": (lambda m: own.Muon(m.parameters(), 1e-3, eps=0), zero_gradients, "Muon eps=0"),
    "Muon's iteration": (lambda m: own.Muon(m.parameters(), 1e-3, ns_coefficients=(9.0, 9.0, 9.0), ns_steps=9),
                         None, "Muon ns_coefficients=(9, 9, 9)"),
    "torch's Muon": (lambda m: [torch.optim.Muon([p for p in m.parameters() if p.dim() == 2], 1e-3, ns_steps=9,
                                                 ns_coefficients=(9.0, 9.0, 9.0)), SGD([m.out.bias], 1e-3)],
                     None, "Muon ns_coefficients=(9, 9, 9)"),
    "second optimizer": (lambda m: [SGD(m.rows.parameters(), 0.01), Adam(m.out.parameters(), 1e-3)],
                         lambda step, optimizers: set_rate(2)(step, optimizers[1]), "Adam lr=nan"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_the_setting_is_named(name: str, tmp_path: Path) -> None:
    make, before, text = FAULTS[name]
    found = train_until_captured(make, tmp_path, before_step=before or (lambda step, optimizer: None))
    assert found.optimizer == text and found.found, (found.message, found.advice)
    assert text in found.message and str(found.advice).startswith(f"{text}: ") and "resume" in str(found.advice)


def test_good_settings_are_not_blamed(tmp_path: Path) -> None:
    def destroy(step: int, optimizer: Any) -> None:
        if step == 4:
            optimizer.param_groups[0]["params"][-1].data.fill_(torch.nan)

    found = train_until_captured(lambda m: AdamW(m.parameters(), 1e-3), tmp_path, before_step=destroy)
    assert found.op == "parameter" and found.optimizer is None and "earlier checkpoint" in str(found.advice)


def test_bad_settings_are_not_blamed_for_the_initial_weights(tmp_path: Path) -> None:
    def prepare(model: nn.Module) -> None:
        nn.init.constant_(model.get_parameter("out.weight"), torch.nan)

    found = train_until_captured(lambda m: Adam(m.parameters(), eps=0), tmp_path, prepare=prepare)
    assert found.op == "parameter" and found.optimizer is None and "initial weights" in str(found.advice)


HEALTHY: list[Callable[[Any], Optimizer]] = [
    lambda p: AdamW(p, 3e-4, weight_decay=0.1),
    lambda p: Adam(p, 1e-3, weight_decay=1e4),  # normalized with the gradient
    lambda p: SGD(p, 30.0, momentum=0.99, weight_decay=1e-2),
    lambda p: RMSprop(p, 1e-2, eps=1e-30),
    lambda p: AdamW(p, 0.0),
    lambda p: AdamW(p, torch.tensor(1e-3), amsgrad=True, maximize=True),
    lambda p: own.Muon(p, 0.02, momentum=1.0, adamw_lr=0.02),
    lambda p: own.Muon([nn.Parameter(torch.ones(2, 2)), *p], 5.0, adamw_lr=1e-3, adjust_lr_fn="match_rms_adamw"),
    lambda p: torch.optim.Muon([nn.Parameter(torch.ones(2, 2))], 0.05, weight_decay=0.1),
]


@pytest.mark.parametrize("number", range(len(HEALTHY)))
def test_healthy_settings(number: int) -> None:
    settings = read_settings([HEALTHY[number]([nn.Parameter(torch.ones(2))])])
    assert find_faulty_setting({"last_update": settings, "this_step": settings}) is None


def test_a_rate_from_numpy() -> None:
    optimizer = SGD([nn.Parameter(torch.ones(2))], 0.1)
    optimizer.param_groups[0]["lr"] = np.float32("nan")
    fault = find_faulty_setting({"last_update": read_settings([optimizer]), "this_step": None})
    assert fault is not None and fault.text == "SGD lr=nan"


def test_captures_of_older_versions_have_no_settings() -> None:
    assert find_faulty_setting(None) is None and find_faulty_setting({"last_update": None, "this_step": None}) is None


def test_a_rate_of_muon_is_judged_by_its_rule() -> None:
    parameters = [nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2))]
    for optimizer, words in (
        (own.Muon(parameters, 2.0, adamw_lr=1e-3), "singular values of each matrix by about 2"),
        (own.Muon(parameters, 1e-3, adamw_lr=2.0), "changes each weight by about 2"),
    ):
        fault = find_faulty_setting({"last_update": read_settings([optimizer]), "this_step": None})
        assert fault is not None and fault.text == "Muon lr=2" and words in fault.effect


@pytest.mark.parametrize("recipe", ["fp32", "bf16-lean"])
def test_a_nan_in_a_run_with_muon_is_found(recipe: str, tmp_path: Path) -> None:
    """The step is replayed with the weights that Muon has written, and the op is named."""
    torch.manual_seed(0)
    model = Words()
    engine = Engine(model, own.Muon(own.split_for_muon(model), 0.02, adamw_lr=0.02), recipe)
    recorder = Recorder(engine, tmp_path, tell=lambda line: None)

    def divide(module: nn.Module, batch: Tensor) -> Tensor:
        return (module(batch) - 1).square().mean() + torch.sqrt(batch.float().min() - 1)

    path = None
    for step in range(4):
        batch = torch.tensor([[1, 2, 3], [4, 5, 0 if step == 3 else 6]])
        recorder.record_batch(batch)
        with engine.forward():
            value = divide(engine.model, batch)
        engine.backward(value)
        path = recorder.record_step(engine.step(), value) or path
    assert path is not None
    found = replay(path, Words, divide)
    assert found.found and found.op == "aten.sqrt" and found.optimizer is None, found.message
