"""Rules for Muon's updates: what each finds, and that healthy runs have no finding."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import narrowgauge as ng
from narrowgauge.findings import Finding
from narrowgauge.gauges.examiner import Examiner
from narrowgauge.gauges.rules.muon_rules import SQUARE, read_muon_updates
from narrowgauge.gauges.rules.step_rules import Step
from narrowgauge.gauges.rules.tensor_rules import UpdateContext
from narrowgauge.gauges.watch.snapshots import Snapshot

WIDTH = 32


class Deep(nn.Module):
    def __init__(self, layers: int = 3, width: int = WIDTH) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.head = nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x).relu()
        result: Tensor = self.head(x)
        return result


def train(
    make: Callable[[nn.Module], Any],
    *,
    recipe: str = "fp32",
    scale: float = 1.0,
    steps: int = 8,
    sizes: dict[str, int] | None = None,
    batch: Callable[[int], Tensor] = lambda step: torch.randn(64, WIDTH),
    after_backward: Callable[[int, nn.Module], None] = lambda step, model: None,
) -> tuple[list[Finding], list[Snapshot]]:
    torch.manual_seed(0)
    model = Deep(**(sizes or {}))
    engine = ng.Engine(model, make(model), recipe)
    examiner = Examiner(engine, every=3)
    for step in range(1, steps + 1):
        x = batch(step)
        with engine.forward():
            loss = nn.functional.cross_entropy(engine.model(x).float(), (x[:, 0] > 0).long()) * scale
        engine.backward(loss)
        after_backward(step, model)
        report = engine.step()
        examiner.check_step(Step(step, loss.item() / scale, float(report.grad_norm), 1.0, True))
        examiner.collect(wait=True)
    return examiner.findings, list(examiner.snapshots)


def make_muon(**options: Any) -> Callable[[nn.Module], Any]:
    return lambda model: ng.optim.Muon(ng.optim.split_for_muon(model), **{"lr": 0.02, "adamw_lr": 0.02, **options})


def make_torch_muon(model: nn.Module) -> list[torch.optim.Optimizer]:
    inner, *others = ng.optim.split_for_muon(model)
    rest = [parameter for group in others for parameter in group["params"]]
    return [torch.optim.Muon(inner["params"], lr=0.02, weight_decay=0.1), torch.optim.AdamW(rest, lr=1e-3)]


HEALTHY = {
    "original": (make_muon(), "fp32"),
    "match_rms_adamw": (make_muon(lr=1e-3, adjust_lr_fn="match_rms_adamw"), "fp32"),
    "lean": (make_muon(), "bf16-lean[checkpoint=none]"),
    "torch": (make_torch_muon, "fp32"),
    "rate as a tensor": (make_muon(lr=torch.tensor(0.02)), "fp32"),
}


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # of torch's Muon, on CPUs without products in BF16
@pytest.mark.parametrize("name", HEALTHY)
def test_singular_values_of_healthy_updates_are_about_1(name: str) -> None:
    make, recipe = HEALTHY[name]
    findings, snapshots = train(make, recipe=recipe)
    assert findings == []
    shares = [update.share for one in snapshots for update in read_muon_updates(UpdateContext(one))]
    assert len(shares) == 3 * len(snapshots) and all(0.2 < share < 1.5 for share in shares), shares


def list_rules(findings: Iterable[Finding]) -> set[tuple[str, str]]:
    return {(finding.rule, finding.where) for finding in findings}


LAYERS = {f"layers.{index}.weight" for index in range(3)}


def test_gradients_below_eps() -> None:
    """A loss that is scaled down to nothing: AdamW's eps is smaller, so only Muon's matrices stop."""
    findings, _ = train(make_muon(eps=1e-1), scale=1e-7)
    found = [one for one in findings if one.rule == "muon-not-orthogonal"]
    assert {one.where for one in found} == LAYERS
    assert all("below eps=0.1" in one.detail and "scale the loss up" in one.fix for one in found)


def test_gradients_of_one_direction() -> None:
    """Every batch is the same sample, so that a gradient has rank 1."""
    sample = torch.randn(1, 128, generator=torch.Generator().manual_seed(5))
    findings, _ = train(
        make_muon(lr=1e-4, weight_decay=0.0), batch=lambda step: sample, sizes={"layers": 1, "width": 128}
    )
    found = [one for one in findings if one.rule == "muon-not-orthogonal"]
    assert found and all("a few directions" in one.why and one.severity == "warning" for one in found)


def test_coefficients_that_diverge() -> None:
    findings, _ = train(make_muon(lr=1e-5, ns_coefficients=(4.0, 0.0, 0.0)))
    found = [one for one in findings if one.rule == "muon-not-orthogonal"]
    assert {one.where for one in found} == LAYERS and all(one.severity == "serious" for one in found)


def test_a_matrix_without_a_gradient_drifts() -> None:
    def remove(step: int, model: nn.Module) -> None:
        if step > 3:
            grad = model.get_parameter("layers.1.weight").grad
            assert grad is not None
            grad.zero_()

    findings, _ = train(make_muon(), after_backward=remove, steps=11)
    assert ("muon-stale-update", "layers.1.weight") in list_rules(findings)
    assert {where for rule, where in list_rules(findings) if rule == "muon-stale-update"} == {"layers.1.weight"}


def test_a_zero_gradient_with_eps_0_names_eps() -> None:
    def remove(step: int, model: nn.Module) -> None:
        grad = model.get_parameter("layers.1.weight").grad
        assert grad is not None
        grad.zero_()

    findings, _ = train(make_muon(eps=0.0), after_backward=remove, steps=1)
    (found,) = [one for one in findings if one.rule == "updates-too-large"]
    assert found.where == "layers.1.weight" and "Muon's eps" in found.fix


def test_small_gradients_of_first_layers_do_not_vanish_for_muon() -> None:
    """AdamW and Muon divide by the size of gradients; the rule is for what does not."""

    def shrink(step: int, model: nn.Module) -> None:
        for place, parameter in enumerate(model.parameters()):
            assert parameter.grad is not None
            parameter.grad.mul_(1e-9 if place < 8 else 1.0)

    deep: dict[str, Any] = {"sizes": {"layers": 9}, "after_backward": shrink}
    with_muon, _ = train(make_muon(eps=1e-12), **deep)
    with_adam, _ = train(lambda model: torch.optim.AdamW(model.parameters(), eps=1e-14), **deep)
    assert "vanishing-gradients" in {one.rule for one in with_adam}
    assert "vanishing-gradients" not in {one.rule for one in with_muon}


def test_updates_of_muon_are_not_too_large_for_its_weights() -> None:
    torch.manual_seed(0)
    model = Deep()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    engine = ng.Engine(model, make_muon(adamw_lr=1e-5)(model), "fp32")
    examiner = Examiner(engine, every=1)
    x = torch.randn(64, WIDTH)
    with engine.forward():
        loss = engine.model(x).square().mean()
    engine.backward(loss)
    engine.step()
    (snapshot,), _, _ = examiner.collect(wait=True)
    ratios = {one.module: one.ratio or 0 for one in snapshot.readings if one.kind == "update"}
    assert all(ratios[name] > 0.03 for name in LAYERS), "more than Adam's usual"
    assert examiner.step_rules.update_ratio < min(ratios[name] for name in LAYERS)
    assert {place for name, place in snapshot.facts if name == SQUARE} == LAYERS
