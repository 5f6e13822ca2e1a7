"""Finds modules with stacked experts, and shows that they compute what ``compute_plain`` does, whatever their names.

    out[n] = sum over j:  weights[n, j] * down_e (f(gate_e x[n]) * (up_e x[n]))        e = index[n, j]

A module fits if it is called with tokens, index and weights, and has two parameters: [E, 2 F, D] with gate and up of
all experts, and [E, D, F]. A copy with few columns, random weights and as many experts runs once in FP32. Its output
and all gradients must be those of the formula, also for experts without tokens.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import _disable_current_modes

from narrowgauge import events
from narrowgauge.errors import one_line
from narrowgauge.nn.module_changes import has_own_method, original_class
from narrowgauge.nn.side_effects import undo_side_effects

GATED: dict[str, Callable[[Tensor], Tensor]] = {
    "swiglu": F.silu,
    "geglu": F.gelu,
    "geglu-tanh": functools.partial(F.gelu, approximate="tanh"),
    "reglu": F.relu,
}
"""Functions of the gate by the activation's name."""
TOKENS, CHOICES = 24, 2
"""Of the example."""
SMALLEST = 8
"""Columns of the narrower matrix of a small copy."""
FACTORS = 1.0, 16.0
"""About the size of gate and up in the examples: large values show limits, such as a gate that is clipped at 7."""
TOLERANCE = 1e-4
"""Relative to the largest value."""


@dataclass(frozen=True)
class ExpertsSpec:
    """Stacked experts: the names of the two parameters, and the activation."""

    gate_up: str
    down: str
    activation: str
    count: int
    width: int
    """D."""
    inner: int
    """F."""


@dataclass
class FoundExperts:
    """Modules with experts by path, and why other candidates are not described."""

    specs: dict[str, ExpertsSpec] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)


class NotExperts(Exception):
    """Why a module is not described."""


_known: dict[Any, str] = {}
"""The activation of the kinds of modules that this process has seen, or the reason against them, which has spaces."""


def find_experts(model: nn.Module) -> FoundExperts:
    """Describe every module of the model with stacked experts."""
    found = FoundExperts()
    for path, module in model.named_modules():
        stacks = list(list_stacks(module).items())
        if len(stacks) < 2:
            continue
        try:
            found.specs[path] = _describe(module, stacks)
        except NotExperts as reason:
            found.reasons[path] = str(reason)
    return found


def list_parameters(module: nn.Module, dims: int) -> dict[str, nn.Parameter]:
    """Return a module's own parameters with so many dimensions, by name."""
    own = module._parameters.items()
    return {name: p for name, p in own if p is not None and not is_lazy(p) and p.dim() == dims}


def list_stacks(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return a module's own stacks of several matrices, by name.

    Tokens and positions of vision transformers, [1, n, D], and scales of heads, [heads, 1, D], are none.
    """
    return {name: p for name, p in list_parameters(module, 3).items() if min(p.shape) > 1}


def compute_plain(kind: str, x: Tensor, index: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Compute the formula in plain torch, expert by expert."""
    out = torch.zeros_like(x)
    for expert in range(len(gate_up)):
        tokens, choice = torch.where(index == expert)
        gate, up = F.linear(x[tokens], gate_up[expert]).chunk(2, -1)
        made = F.linear(GATED[kind](gate) * up, down[expert])
        out = out.index_add(0, tokens, made * weights[tokens, choice, None])
    return out


def _describe(module: nn.Module, stacks: list[tuple[str, nn.Parameter]]) -> ExpertsSpec:
    (first, one), (second, two) = sorted(stacks, key=lambda item: -item[1].shape[1] * item[1].shape[2])[:2]
    count, width, inner = one.shape[0], one.shape[2], two.shape[2]
    if (
        len(list(module.parameters())) != 2
        or one.shape != (count, 2 * inner, width)
        or two.shape != (count, width, inner)
    ):
        raise NotExperts("its parameters are not two stacks [E, 2 F, D] and [E, D, F] without biases")
    if has_own_method(module, "forward"):
        raise NotExperts("its forward was replaced")
    key = original_class(module), first, second, one.shape, two.shape, _list_settings(module)
    if key not in _known:
        _known[key] = _recognize(module, first, second, (count, width, inner))
    if " " in _known[key]:
        raise NotExperts(_known[key])
    return ExpertsSpec(first, second, _known[key], count, width, inner)


def _list_settings(module: nn.Module) -> Any:
    """Return what may change how a module computes: its numbers, and the classes of its parts."""
    own = tuple(sorted((k, v) for k, v in vars(module).items() if isinstance(v, int | float | str) and k != "training"))
    return own, tuple((name, type(part)) for name, part in module.named_modules() if name)


def _recognize(module: nn.Module, gate_up: str, down: str, sizes: tuple[int, int, int]) -> str:
    """Return the activation of a module, or why it is none of those that are supported."""
    try:
        with (
            events.paused(), _disable_current_modes(), torch._C.DisableTorchFunction(), torch.random.fork_rng([]),
            undo_side_effects(module),
        ):  # fmt: skip
            kinds = list(GATED)
            for factor in FACTORS:
                small, leaves = _make_small(module, gate_up, down, sizes, factor)
                with torch.autocast("cpu", enabled=False), torch.enable_grad():
                    made = original_class(module).forward(small, *leaves[:1], _draw_index(sizes[0]), *leaves[1:2])
                    if not isinstance(made, Tensor) or made.shape != leaves[0].shape:
                        return "it does not return a tensor of its input's shape"
                    expected = _differentiate(made, leaves)
                    formulas = {k: compute_plain(k, leaves[0], _draw_index(sizes[0]), *leaves[1:]) for k in kinds}
                    kinds = [k for k, value in formulas.items() if _are_close(_differentiate(value, leaves), expected)]
            if kinds:
                return kinds[0]
    except Exception as problem:
        return f"its forward did not run on an example: {one_line(f'{type(problem).__name__}: {problem}', 200)}"
    return "it computes something else than gated MLPs, weighted and summed"


def _make_small(
    module: nn.Module, gate_up: str, down: str, sizes: tuple[int, int, int], factor: float
) -> tuple[nn.Module, tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Return a copy with few columns, and tokens, weights and the two stacks as leaves; gate and up times a factor."""
    count, width, inner = sizes
    divisor = max(math.gcd(width, inner) // SMALLEST, 1)
    narrow, short = width // divisor, inner // divisor
    generator = torch.Generator("cpu").manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).requires_grad_()

    leaves = (
        draw(TOKENS, narrow),
        draw(TOKENS, min(CHOICES, count)),
        draw(count, 2 * short, narrow),
        draw(count, narrow, short),
    )
    with torch.no_grad():
        leaves[2].mul_(factor / math.sqrt(narrow))
    small = copy.copy(module)
    resized = {width: narrow, inner: short, 2 * inner: 2 * short}
    small.__dict__ |= {k: resized.get(v, v) for k, v in vars(module).items() if type(v) is int and v != count}
    small._parameters = {gate_up: nn.Parameter(leaves[2]), down: nn.Parameter(leaves[3])}
    return small, (*leaves[:2], small._parameters[gate_up], small._parameters[down])  # type: ignore[return-value]


def _draw_index(experts: int) -> Tensor:
    """Choose different experts for each token: some often, some never."""
    chosen = torch.rand(TOKENS, experts, generator=torch.Generator("cpu").manual_seed(1)) / torch.arange(1, experts + 1)
    if experts > CHOICES:
        chosen[:, experts // 2] = -1.0
    return chosen.topk(min(CHOICES, experts)).indices


def _differentiate(output: Tensor, leaves: tuple[Tensor, ...]) -> list[Tensor]:
    """Return the output, and the gradients of a random sum of it."""
    direction = torch.randn(output.shape, generator=torch.Generator("cpu").manual_seed(2))
    return [output.detach(), *torch.autograd.grad((output * direction).sum(), leaves)]


def _are_close(found: list[Tensor], expected: list[Tensor]) -> bool:
    return all(
        bool((a - b).abs().max() <= TOLERANCE * b.abs().max()) for a, b in zip(found, expected, strict=True)
    )  # fmt: skip
