"""Equations between recorded tensors: whether two are the same, and whether a module is a norm."""

from __future__ import annotations

import itertools
from dataclasses import replace

import torch
from torch import Tensor, nn

from narrowgauge.nn.blocks.observe import Call
from narrowgauge.nn.blocks.spec import NormSpec

TOLERANCE = 2e-4
"""Of sums, relative to the largest value: FP32 in another order differs by less, another formula by more."""
EXACT = 1e-5
"""Of functions of single values: GELU and its tanh form differ by 1e-4."""
EPS_NAMES = ("eps", "variance_epsilon", "epsilon")
KNOWN_EPS = (1e-5, 1e-6, float(torch.finfo(torch.float32).eps), 1e-8, 1e-12)
"""What is added to variances; the third is nn.RMSNorm's if it is not given one."""
SMALL = (1e-3, 1e-5)
"""Factors of inputs at which these differ."""
NEAR = 1e-3
"""Tolerance of norms of such inputs: what is left of a layer norm's rounding is as small."""


def are_close(one: Tensor, other: Tensor, tolerance: float = TOLERANCE) -> bool:
    """Whether two tensors are the same up to the rounding of FP32."""
    if one.shape != other.shape:
        return False
    return bool((one - other).abs().max() <= tolerance * max(float(other.abs().max()), 1e-6))


def recognize_norm(call: Call) -> NormSpec | None:
    """Return the description of a module whose output is a norm of its input."""
    own = dict(call.module.named_parameters(recurse=False))
    if len(own) > 2 or call.input.shape != call.output.shape:
        return None
    if not own:
        return None if any(call.module.children()) else _recognize_without_weight(call)
    if any(parameter.shape != call.input.shape[-1:] for parameter in own.values()):
        return None
    for names in itertools.permutations(own):
        weight, bias = own[names[0]], own[names[1]] if len(names) > 1 else None
        for kind, eps, offset in itertools.product(("layer", "rms"), _list_eps(call.module), (0.0, 1.0)):
            if are_close(compute_norm(call.input, weight, bias, kind, eps, offset), call.output):
                spec = NormSpec(call.path, kind, eps, offset, names[0], "bias" if bias is None else names[1])
                return _measure_eps(call, spec, weight.detach(), None if bias is None else bias.detach())
    return None


def _recognize_without_weight(call: Call) -> NormSpec | None:
    width = call.input.shape[-1]
    ones = call.input.new_ones(width)
    for kind, eps in itertools.product(("layer", "rms"), _list_eps(call.module)):
        if are_close(compute_norm(call.input, ones, None, kind, eps, 0.0), call.output):
            return _measure_eps(call, NormSpec(call.path, kind, eps, weight="", bias="", width=width), ones, None)
    return None


def _measure_eps(call: Call, spec: NormSpec, weight: Tensor, bias: Tensor | None) -> NormSpec | None:
    """Return the description with the epsilon that the module adds.

    At inputs of about 1 no epsilon shows. The module may hold it under any name, in its code, or not at all:
    ``nn.RMSNorm`` takes that of its input's type. So the norm runs on small inputs, whose size is near it.
    """
    try:
        with torch.no_grad():
            small = [(scale * call.input, call.module(scale * call.input)) for scale in SMALL]
    except Exception:  # it has other arguments
        return spec if _states_eps(call.module) else None

    def fits(eps: float) -> bool:
        made = [(compute_norm(x, weight, bias, spec.kind, eps, spec.offset), y) for x, y in small]
        return all(isinstance(y, Tensor) and are_close(found, y, NEAR) for found, y in made)

    for eps in dict.fromkeys([spec.eps, *_list_eps(call.module), *KNOWN_EPS]):
        if fits(eps):
            return replace(spec, eps=eps)
    x, y = small[0]
    centred = (x - x.mean(-1, keepdim=True) if spec.kind == "layer" else x).double()
    scaled = (y if bias is None else y - bias).double() / (spec.offset + weight).double()
    squares = centred.square().mean(-1, keepdim=True)
    roots = (centred.square().sum(-1, keepdim=True) / scaled.square().sum(-1, keepdim=True)) - squares
    eps = float(roots.median())
    return replace(spec, eps=eps) if eps > 0 and fits(eps) else None


def compute_norm(x: Tensor, weight: Tensor, bias: Tensor | None, kind: str, eps: float, offset: float) -> Tensor:
    """Return the norm in plain torch."""
    centred = x - x.mean(-1, keepdim=True) if kind == "layer" else x
    y = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps) * (offset + weight)
    return y if bias is None else y + bias


def _states_eps(module: nn.Module) -> bool:
    return any(isinstance(getattr(module, name, None), float | int) for name in EPS_NAMES)


def _list_eps(module: nn.Module) -> list[float]:
    stated = (getattr(module, name, None) for name in EPS_NAMES)
    return [float(eps) for eps in stated if isinstance(eps, float | int)] or list(KNOWN_EPS)
