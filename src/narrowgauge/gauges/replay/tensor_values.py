"""Reads the values of tensors: whether they are finite, and their range.

Autograd represents some zero gradients (for example in the double backward of ``abs``) by tensors without memory
(``torch._efficientzerotensor``). Inside a dispatch mode, a kernel that reads one ends the process with a segmentation
fault, so they must be recognized first.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def read_values(tensor: Tensor) -> Tensor:
    """Return a tensor's values in a format and layout that torch can compare and sum."""
    if tensor._is_zerotensor():
        return torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    tensor = tensor.detach()
    if tensor.layout is torch.sparse_coo:
        tensor = tensor._values()
    return tensor.float() if tensor.is_floating_point() and tensor.element_size() == 1 else tensor


def classify_nonfinite(tensor: Tensor) -> str | None:
    """Return "nan" if a tensor has NaN, "inf" if it only has inf, None if it is finite or not floating point."""
    if not (tensor.is_floating_point() or tensor.is_complex()) or tensor.numel() == 0 or tensor.is_meta:
        return None
    if tensor._is_zerotensor():
        return None
    values = read_values(tensor)
    if not values.is_complex() and bool(torch.isfinite(values.sum(dtype=torch.float32))):
        return None  # one pass; an overflowing sum only causes the exact check below
    if bool(torch.isfinite(values).all()):
        return None
    return "nan" if bool(torch.isnan(values).any()) else "inf"


def adds_nonfinite(output: Tensor, bad: list[Tensor]) -> bool:
    """Whether an elementwise op's output is nonfinite where no input is."""
    try:
        inherited = torch.zeros(output.shape, dtype=torch.bool, device=output.device)
        for tensor in bad:
            inherited |= ~torch.isfinite(read_values(tensor))
    except RuntimeError:  # shapes that do not broadcast
        return False
    return bool((~torch.isfinite(read_values(output)) & ~inherited).any())


def describe(name: str, value: Any) -> dict[str, Any]:
    """Describe a number, or a tensor by the range of its finite values and the counts of inf and NaN."""
    if not isinstance(value, Tensor):
        number = float(value)
        return {"name": name, "value": number if abs(number) < float("inf") else str(number)}
    values = read_values(value)
    described: dict[str, Any] = {
        "name": name,
        "shape": list(value.shape),
        "dtype": str(value.dtype).removeprefix("torch."),
    }
    values = values.abs() if values.is_complex() else values.double()
    finite = values[torch.isfinite(values)]
    described |= {"min": None, "max": None, "amax": None}
    if finite.numel():
        low, high = float(finite.min()), float(finite.max())
        described |= {"min": low, "max": high, "amax": max(abs(low), abs(high))}
    for kind, count in (("nan", torch.isnan(values)), ("inf", torch.isinf(values))):
        if bool(count.any()):
            described[kind] = int(count.sum())
    if values.dim() == 3 and finite.numel() < values.numel():  # the weights of experts are stacked
        described["parts"] = (~torch.isfinite(values)).flatten(1).any(1).nonzero().flatten().tolist()
    return described
