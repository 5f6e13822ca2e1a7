"""An engine in a loop that another library runs: the host divides, accumulates, clips and decides when to step.

    forward()       the surroundings alone: when gradients are summed over ranks is the host's affair
    backward(l)     (l * scale).backward() by the host's own function; the host has divided l by its microbatches
    unscale()       gradients / scale, in place, as clipping and readers of gradients expect; notes what is not finite
    step()          the engine's update with what is in the gradients now

The engine's update unscales by itself, together with its check and its clipping. Gradients that the host has had
unscaled are therefore scaled again just before it: exact, as dynamic scales are powers of 2. Where one was not finite,
a NaN is put into the first, so that the update is skipped even if clipping by value has made all of them finite.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from narrowgauge.engine import Engine
from narrowgauge.errors import UsageError
from narrowgauge.nn.module_changes import allow_double_backward
from narrowgauge.optim.norms import compute_grad_norms
from narrowgauge.optim.sharded import to_local
from narrowgauge.recipe import Recipe, parse
from narrowgauge.step_report import StepReport

OPTIONS = ("clip_norm", "compile", "blocks", "fused", "max_consecutive_skips")


def need(library: str, install: str) -> Any:
    """A library that narrowgauge does not depend on, or one line that says how to get it."""
    try:
        return importlib.import_module(library)
    except ImportError as error:
        if error.name is not None and error.name.split(".")[0] != library.split(".")[0]:
            raise  # the library is here, and something that it needs is not
        raise UsageError(f"{library} is not installed: pip install {install}") from None


def check_options(recipe: str | Recipe, options: dict[str, Any]) -> None:
    """Refuse what cannot work in a host's loop, before anything is changed."""
    if "accumulate" in options:
        raise UsageError("accumulate belongs to the library that runs the loop: set gradient accumulation there")
    unknown = sorted(set(options) - set(OPTIONS))
    if unknown:
        raise UsageError(f"unknown option {unknown[0]!r}; expected one of {', '.join(OPTIONS)}")
    if parse(recipe).gradients == "released":
        raise UsageError(
            f"recipe {recipe}: gradients=released steps during backward, which a loop that clips, accumulates or "
            "decides when to step cannot have; take gradients=bf16 or gradients=fp32, or ng.Engine itself"
        )


class Hosted(Engine):
    """An engine whose loop, accumulation and clipping are another library's."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, recipe: str | Recipe = "auto", **options: Any) -> None:
        check_options(recipe, options)
        super().__init__(model, optimizer, recipe, **options)
        self.report: StepReport | None = None
        """The latest update's."""
        self.loss: Tensor | None = None
        """The sum of the losses that backward had since the latest update: the host has made shares of them."""
        self._finite: Tensor | None = None
        """For each parameter, whether its gradient was finite; known from ``unscale`` to ``step``."""
        self._record = self.guard.record
        self.guard.record = self._record_blamed  # type: ignore[method-assign]

    @contextlib.contextmanager
    def forward(self, double_backward: bool = False) -> Iterator[None]:
        """The surroundings of the forward pass and the loss."""
        plain = allow_double_backward() if double_backward else contextlib.nullcontext()
        with self._explained(), self._watched("forward"), self.step_context.forward(), plain:
            yield

    def backward(  # type: ignore[override]
        self, loss: Tensor, run: Callable[[Tensor], Any] = Tensor.backward
    ) -> None:
        """Backward of a loss that the host has divided by its microbatches; ``run`` is the host's way to do it."""
        scaled = self.scaled(loss)
        self._scale_again()  # a host that clips within an accumulation
        with self._explained(), self._watched("backward"), self.step_context.backward():
            run(scaled)
        shown = loss.detach().float().reshape(())
        self.loss = shown if self.loss is None else self.loss + shown
        self._microbatches = 1  # whatever is in the gradients is one update's

    @torch.no_grad()
    def unscale(self) -> None:
        """Divide the gradients by the loss scale, in place, until the next step or backward. Twice is once."""
        if self._finite is not None or self._microbatches == 0:
            return
        self._finite = torch.isfinite(compute_grad_norms(self.named.values(), {}, self.device))
        if self.scaler is not None:
            self._multiply(self.scaler.tensor(self.device).double().reciprocal().float())

    def step(self, *optimizers: Optimizer) -> StepReport:
        """Update the weights with the gradients that are in."""
        finite = self._finite
        self._scale_again()
        self._finite = finite
        try:
            if finite is not None:
                self._spoil(finite)
            self.report = super().step(*optimizers)
        finally:
            self._finite = None
        self.loss = None
        return self.report

    def carried(self) -> dict[str, Any]:
        """What goes on beside model and optimizer, which the host saves: loss scale, counters, FP8 scales."""
        return {
            "recipe": str(self.recipe),
            "scaler": self.scaler.state_dict() if self.scaler else None,
            "guard": self.guard.state_dict(),
            "tensor_scales": self.conversion.scales.state_dict() if self.conversion.scales else None,
        }

    def carry_on(self, state: dict[str, Any]) -> None:
        """Go on from what was carried. Of another recipe's state, what this one has no use for is left."""
        if "guard" not in state:
            raise UsageError("the checkpoint's precision state is not narrowgauge's: it was saved without this recipe")
        if self.scaler is not None and state["scaler"]:
            self.scaler.load_state_dict(state["scaler"])
        if self.conversion.scales is not None and state["tensor_scales"]:
            self.conversion.scales.load_state_dict(state["tensor_scales"])
        self.guard.load_state_dict(state["guard"])
        self._microbatches, self._finite, self.loss = 0, None, None

    @torch.no_grad()
    def _scale_again(self) -> None:
        if self._finite is not None and self.scaler is not None:
            self._multiply(self.scaler.tensor(self.device))
        self._finite = None

    @torch.no_grad()
    def _spoil(self, finite: Tensor) -> None:
        """Let the engine's check see that a gradient was not finite before the host clipped it."""
        first = next((p for p in self.named.values() if p.grad is not None), None)
        if first is not None:
            values = _values(first)
            values.mul_(torch.where(finite.all(), 1.0, torch.nan).to(values.device, values.dtype))

    def _multiply(self, factor: Tensor) -> None:
        grads = [_values(p) for p in self.named.values() if p.grad is not None]
        if grads:
            torch._foreach_mul_(grads, factor)

    def _record_blamed(self, found_inf: Tensor, scale: Tensor | None = None, bad: Tensor | None = None) -> None:
        """Blame the gradients that were not finite at first: clipping by a norm that is NaN makes all of them so."""
        self._record(found_inf, scale, bad if self._finite is None else ~self._finite)


def _values(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad._values() if parameter.grad.is_sparse else to_local(parameter.grad)
