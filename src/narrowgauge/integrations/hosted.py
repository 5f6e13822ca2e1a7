"""Hosted: an engine in a training loop that another library (the host) runs.

    forward()       as in Engine; the host decides when ranks sum gradients
    backward(l)     (l * scale).backward(), through the host's own function; the host divides l by its microbatches
    unscale()       gradients / scale, in place, before the host clips or reads them; notes which are not finite
    step()          the engine's update with the current gradients

The engine's update unscales the gradients itself, in one pass with its check and its clipping. So gradients that
``unscale`` has divided are multiplied by the scale again just before the update; this is exact, because dynamic scales
are powers of 2. A gradient that was not finite at ``unscale`` skips the update, even if clipping by value has made it
finite since.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from narrowgauge.engine import Engine
from narrowgauge.engine.checks import find_trainable
from narrowgauge.errors import UsageError
from narrowgauge.optim.norms import compute_grad_norms
from narrowgauge.optim.sharded import to_local
from narrowgauge.recipe import Recipe, parse
from narrowgauge.step_report import StepReport

OPTIONS = ("clip_norm", "compile", "blocks", "fused", "max_consecutive_skips", "memory_budget")
"""The options of ``Engine`` that the integrations accept."""


def import_library(library: str, install: str) -> Any:
    """Import a library that narrowgauge does not depend on.

    Args:
        library: The module to import.
        install: What to pass to ``pip install`` for it.

    Raises:
        UsageError: It is not installed.
    """
    try:
        return importlib.import_module(library)
    except ImportError as error:
        if error.name is not None and error.name.split(".")[0] != library.split(".")[0]:
            raise  # the library is installed, but one of its dependencies is not
        raise UsageError(f"{library} is not installed: pip install {install}") from None


def check_options(recipe: str | Recipe, options: dict[str, Any]) -> None:
    """Raise UsageError for a recipe or an option that cannot work in a host's loop."""
    if "accumulate" in options:
        raise UsageError("accumulate belongs to the library that runs the loop: set gradient accumulation there")
    unknown = sorted(set(options) - set(OPTIONS))
    if unknown:
        raise UsageError(f"unknown option {unknown[0]!r}; expected one of {', '.join(OPTIONS)}")
    if parse(recipe).gradients == "released":
        raise UsageError(
            f"recipe {recipe}: gradients=released steps during backward, but this loop clips, accumulates or decides "
            "when to step; use gradients=bf16 or gradients=fp32, or ng.Engine directly"
        )


class Hosted(Engine):
    """An engine for a host library that runs the loop, accumulates microbatches and may clip gradients.

    Args:
        model: The model, as for ``Engine``.
        optimizer: Its optimizer. A hosted engine has exactly one.
        recipe: A recipe or its text.
        **options: ``clip_norm``, ``compile``, ``blocks``, ``fused``, ``max_consecutive_skips`` and ``memory_budget`` of
            ``Engine``.

    Attributes:
        report: The ``StepReport`` of the latest update, or None before the first.
        loss: The sum of the losses since the latest update, each already divided by the host; None if there are none.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, recipe: str | Recipe = "auto", **options: Any) -> None:
        check_options(recipe, options)
        super().__init__(model, optimizer, recipe, **options)
        self.report: StepReport | None = None
        self.loss: Tensor | None = None
        self._unscaled: _UnscaledGradients | None = None

    def _begin_microbatch(self) -> None:
        """Do nothing: the host decides when DDP or FSDP sums gradients over the ranks."""

    def run_backward(self, loss: Tensor, run: Callable[[Tensor], Any]) -> None:
        """Run the host's backward for a loss that the host has divided by its microbatches.

        Args:
            loss: A scalar loss.
            run: The host's backward. It is called with the scaled loss, in the recipe's context.
        """
        self._rescale_gradients()  # for a host that clips during an accumulation
        super().run_backward(loss, run)
        detached = loss.detach().float().reshape(())
        self.loss = detached if self.loss is None else self.loss + detached

    @torch.no_grad()
    def unscale(self) -> None:
        """Divide the gradients by the loss scale, in place, until the next backward or step. Repeating it is safe."""
        if self._unscaled is not None or self._microbatches == 0:
            return
        finite = torch.isfinite(compute_grad_norms(self.named.values(), {}, self.device))
        self._unscaled = _UnscaledGradients(list(self.named), finite)
        if self.scaler is not None:
            self._multiply_gradients(self.scaler.get_scale_tensor(self.device).double().reciprocal().float())

    @torch.no_grad()
    def _rescale_gradients(self) -> None:
        if self._unscaled is not None and self.scaler is not None:
            self._multiply_gradients(self.scaler.get_scale_tensor(self.device))
        self._unscaled = None

    def _multiply_gradients(self, factor: Tensor) -> None:
        grads = [
            p.grad._values() if p.grad.is_sparse else to_local(p.grad)
            for p in self.named.values()
            if p.grad is not None
        ]
        if grads:
            torch._foreach_mul_(grads, factor)

    def _update(self, chosen: Sequence[Optimizer] = ()) -> StepReport:
        unscaled = self._unscaled
        self._rescale_gradients()
        self._unscaled = unscaled
        try:
            self.report = super()._update(chosen)
        finally:
            self._unscaled, self.loss = None, None
        return self.report

    def _measure_gradients(
        self, parameters: Mapping[str, nn.Parameter], released: Mapping[nn.Parameter, Tensor]
    ) -> Tensor:
        """Return the norms; NaN for gradients that were not finite at ``unscale``, whatever clipping made of them."""
        norms = super()._measure_gradients(parameters, released)
        return norms if self._unscaled is None else self._unscaled.blame(norms, parameters)

    def load_precision_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what ``precision_state_dict`` returned; drop what was noted about the current gradients.

        Args:
            state_dict: The state.
        """
        super().load_precision_state_dict(state_dict)
        self._unscaled, self.loss = None, None

    def set_optimizer(self, optimizer: Optimizer) -> None:
        """Step this optimizer from now on, for hosts that show it only at the first step.

        Args:
            optimizer: An optimizer over all trainable parameters of the model.

        Raises:
            UsageError: The optimizer does not have all of them, or has others.
        """
        named = find_trainable(self.inner, [optimizer])
        optimized = {p for group in optimizer.param_groups for p in group["params"]}
        if any(parameter not in optimized for parameter in named.values()):
            raise UsageError(
                "a recipe trains one model with one optimizer, and this optimizer lacks some of the model's trainable "
                "parameters; add them, in groups if needed, or call requires_grad_(False) on them"
            )
        self.named, self.optimizers = named, [optimizer]


class _UnscaledGradients:
    """Which gradients were finite when they were unscaled, by parameter name."""

    def __init__(self, names: list[str], finite: Tensor) -> None:
        self.names, self.finite = names, finite

    def blame(self, norms: Tensor, parameters: Mapping[str, nn.Parameter]) -> Tensor:
        """Return the norms of a check that blames exactly the gradients that were not finite at first.

        Clipping by a norm that is NaN makes every gradient NaN, and clipping by value makes every gradient finite.
        """
        finite = self.finite
        if list(parameters) != self.names:  # a part was frozen or unfrozen since
            known = dict(zip(self.names, finite.unbind(), strict=True))
            finite = torch.stack([known.get(name, torch.ones_like(finite[0])) for name in parameters])
        blamed = torch.where(finite, torch.zeros_like(norms), torch.nan)
        return torch.where(finite.all(), norms, blamed)
