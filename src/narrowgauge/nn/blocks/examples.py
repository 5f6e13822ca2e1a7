"""Makes the arguments of one call of a block that nobody has called yet: a random hidden state, and what goes with it.

Most blocks need the hidden state only. A convention for more arguments, which a library or several families share, has
a file in ``families`` with a function ``make_examples(block, x)``. It returns calls to try in order, or None if it is
not its block.
"""

from __future__ import annotations

import importlib
import pkgutil
from typing import Any

import torch
from torch import nn

from narrowgauge.nn.blocks import families
from narrowgauge.nn.blocks.example import Example, make_positions, read_signature, takes_any_argument
from narrowgauge.nn.blocks.recognize import NotABlock

BATCH, LENGTH = 2, 12
"""Rows and tokens of an example: more than one, and not a multiple of 16."""


def make_examples(block: nn.Module, device: torch.device) -> list[Example]:
    """Return the calls to try.

    Raises:
        NotABlock: Nobody knows what the block's arguments are.
    """
    x = torch.randn(BATCH, LENGTH, find_width(block), generator=torch.Generator().manual_seed(1)).to(device)
    for family in _list_families():
        made: list[Example] | None = family.make_examples(block, x)
        if made:
            return made
    required, optional = read_signature(block)
    unknown = [name for name in required[1:] if name not in ("attention_mask", "position_ids")]
    if unknown:
        raise NotABlock(f"its forward needs {', '.join(unknown)}")
    named = {**dict.fromkeys(required[1:]), **make_positions([*required, *optional], x)}
    plain = Example((x,), named)
    if not takes_any_argument(block) or "position_ids" in named:
        return [plain]
    # transformers passes positions on to blocks that do not name them (GPT-2's)
    return [Example((x,), {**named, **make_positions(["position_ids"], x)}), plain]


def make_small(block: nn.Module) -> nn.Module | None:
    """Return a small block that computes what this one does, if its family can make one."""
    for family in _list_families():
        make: Any = getattr(family, "make_small", None)
        made: nn.Module | None = None if make is None else make(block)
        if made is not None:
            return made
    return None


def find_width(block: nn.Module) -> int:
    """Return the width of the residual stream: the most frequent size of the block's norms, or the larger of two."""
    sizes = [len(p) for p in block.parameters() if p.dim() == 1]
    shapes = [p.shape for p in block.parameters() if p.dim() == 2]
    read, written = ({shape[side] for shape in shapes} for side in (1, 0))
    fitting = [size for size in sizes if size in read and size in written]
    if not fitting:
        raise NotABlock("no norm has the width of a linear layer")
    return max(fitting, key=lambda size: (fitting.count(size), size))


def _list_families() -> list[Any]:
    names = sorted(info.name for info in pkgutil.iter_modules(families.__path__))
    return [importlib.import_module(f"{families.__name__}.{name}") for name in names]
