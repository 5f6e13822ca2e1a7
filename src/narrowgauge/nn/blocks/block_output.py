"""What a block returns: the hidden state, alone or in a tuple, and what follows it there."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from narrowgauge.nn.blocks.equations import are_close
from narrowgauge.nn.blocks.example import Example
from narrowgauge.nn.blocks.observe import get_rows
from narrowgauge.nn.blocks.spec import WEIGHTS, NotABlock


def read_output(output: Any, example: Example) -> tuple[Tensor, bool, tuple[str | None, ...]]:
    """Return the hidden state as rows, whether it is in a tuple, and what follows it there."""
    x = example.args[0]
    if isinstance(output, Tensor) and output.shape == x.shape:
        return get_rows(output), False, ()
    if isinstance(output, tuple) and output and isinstance(output[0], Tensor) and output[0].shape == x.shape:
        return get_rows(output[0]), True, tuple(_name_returned(value, example) for value in output[1:])
    raise NotABlock("it does not return a tensor of its input's shape")


def _name_returned(value: Any, example: Example) -> str | None:
    if value is None:
        return None
    for name, given in example.kwargs.items():
        if given is value and isinstance(value, Tensor):
            return name
    length = example.args[0].shape[1]
    if isinstance(value, Tensor) and value.dim() == 4 and value.shape[-2:] == (length, length):
        total = value.sum(-1)
        if value.min() >= 0 and are_close(total, torch.ones_like(total)):
            return WEIGHTS
    raise NotABlock("it returns more than the hidden state")
