"""Modules of experts that compute as one function, in FP8 or in BF16."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from narrowgauge.nn.blocks.settings import OwnSettings
from narrowgauge.nn.experts.arguments import read_call
from narrowgauge.nn.experts.find import ExpertsSpec
from narrowgauge.nn.experts.plan import ExpertsPlan
from narrowgauge.nn.experts.run import run_experts
from narrowgauge.nn.experts.run_wide import run_wide
from narrowgauge.nn.module_changes import Change
from narrowgauge.nn.products.bf16_for_now import is_bf16_for_now


@dataclass
class FusedExperts(Change):
    """A module of experts that computes as its plan says; in evaluations in BF16."""

    plan: ExpertsPlan
    settings: OwnSettings
    """What the module held when it was described."""
    choices: int = 0
    """How many experts a token had in the latest call."""
    differentiable_twice = False

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def run(self, module: Any, inner: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Tensor:
        spec = self.plan.spec
        call = read_call(module, spec, args, kwargs)
        if call is None or not self.settings.are_those_of(module):
            made: Tensor = inner(*args, **kwargs)
            return made
        self.choices = call.chosen.shape[-1]
        stacks = getattr(module, spec.gate_up), getattr(module, spec.down)
        if is_bf16_for_now():
            return run_wide(self.plan.path, spec, *call, *stacks)
        return run_experts(self.plan, *call, *stacks)


@dataclass
class WideExperts(Change):
    """A module of experts that computes as one function in BF16."""

    path: str
    spec: ExpertsSpec
    settings: OwnSettings
    """What the module held when it was described."""
    choices: int = 0
    """How many experts a token had in the latest call."""
    differentiable_twice = False

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def run(self, module: Any, inner: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Tensor:
        spec = self.spec
        call = read_call(module, spec, args, kwargs)
        if call is None or not self.settings.are_those_of(module):
            made: Tensor = inner(*args, **kwargs)
            return made
        self.choices = call.chosen.shape[-1]
        stacks = getattr(module, spec.gate_up), getattr(module, spec.down)
        return run_wide(self.path, spec, *call, *stacks)
