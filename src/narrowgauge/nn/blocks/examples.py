"""Makes the arguments of one call of a block that nobody has called yet: a random hidden state, and what goes with it.

Most blocks need the hidden state only. A convention for more arguments, which a library or several families share, has
a file in ``families`` with a function ``make_examples(block, x)``. It returns calls to try in order, or None if it is
not its block.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from narrowgauge.nn.blocks import families, transformers_small
from narrowgauge.nn.blocks.example import (
    SOURCES,
    Example,
    list_head_counts,
    make_positions,
    read_signature,
    takes_any_argument,
)
from narrowgauge.nn.blocks.projections import find_projection
from narrowgauge.nn.blocks.spec import NotABlock
from narrowgauge.nn.products.linear import is_linear

BATCH, LENGTH = 2, 12
"""Rows and tokens of an example: more than one, and not a multiple of 16."""
LONGEST_MASK = 1024
"""Tokens of the longest example that is as long as a mask."""
SOURCE_LENGTH = 9
"""Tokens of an encoder's output."""
MAY_BE_NONE = (
    "attention_mask", "position_ids", "positions", "input_pos", "cache", "kv_cache", "past_kv", "past_key_value",
    "past_key_values", "layer_past",
)  # fmt: skip
"""Arguments without which blocks compute, though their signature requires them."""
CROSS_BIAS = "encoder_decoder_position_bias"
"""A bias of the scores of cross-attention (T5)."""


def make_examples(block: nn.Module, device: torch.device, rows: int = BATCH, length: int = LENGTH) -> list[Example]:
    """Return the calls to try; a block that takes an encoder's output is called without and with one.

    Args:
        block: The block.
        device: Where the examples are.
        rows: Sequences of an example.
        length: Tokens of each. Calls of other lengths have the same order.

    Raises:
        NotABlock: Nobody knows what the block's arguments are.
    """
    made = _make_examples(block, device, rows, length)
    for size in _list_masked_lengths(block):  # blocks that use a whole mask take sequences of its length only (CLIP)
        made += _make_examples(block, device, rows, size)
    return [*made, *(example for one in made for example in _add_source(block, one))]


def _list_masked_lengths(block: nn.Module) -> list[int]:
    """Return the sizes of square tensors that a block holds besides its parameters."""
    held = [value for part in block.modules() for value in (*vars(part).values(), *part._buffers.values())]
    squares = (t.shape for t in held if isinstance(t, Tensor) and t.dim() == 2 and t.shape[0] == t.shape[1])
    return sorted({shape[0] for shape in squares if LENGTH < shape[0] <= LONGEST_MASK})


def _add_source(block: nn.Module, example: Example) -> Iterator[Example]:
    """Yield the example with an encoder's output, of each width that a linear layer reads."""
    required, optional = read_signature(block)
    names = [*required, *optional]
    name = next((name for name in SOURCES if name in names), None)
    if name is None:
        return
    x, generator = example.args[0], torch.Generator().manual_seed(6)
    rows, length, width = x.shape
    others: dict[str, Any] = {}
    if CROSS_BIAS in names:
        heads = next(iter(list_head_counts(block)), 1)
        others[CROSS_BIAS] = torch.randn(1, heads, length, SOURCE_LENGTH, generator=generator).to(x.device)
    sizes = {find_projection(block, path).shape[1] for path, part in block.named_modules() if is_linear(part)}
    for size in sorted(sizes, key=lambda size: (size != width, size)):
        source = torch.randn(rows, SOURCE_LENGTH, size, generator=generator).to(x.device)
        yield Example(example.args, {**example.kwargs, name: source, **others})


def _make_examples(block: nn.Module, device: torch.device, rows: int, length: int) -> list[Example]:
    x = torch.randn(rows, length, find_width(block), generator=torch.Generator().manual_seed(1)).to(device)
    for family in _list_families():
        made: list[Example] | None = family.make_examples(block, x)
        if made:
            return made
    required, optional = read_signature(block)
    unknown = [name for name in required[1:] if name not in (*MAY_BE_NONE, *SOURCES) and "mask" not in name]
    if unknown:
        raise NotABlock(f"its forward needs {', '.join(unknown)}")
    named = {**dict.fromkeys(required[1:]), **make_positions([*required, *optional], x)}
    plain = Example((x,), named)
    masks = [name for name in required[1:] if "mask" in name]
    if masks:  # code that was written for a mask may need one
        seen = torch.ones(rows, 1, length, length, dtype=torch.bool, device=device)
        return [plain, Example((x,), {**named, **dict.fromkeys(masks, seen)})]
    if not takes_any_argument(block) or "position_ids" in named:
        return [plain]
    # transformers passes positions on to blocks that do not name them (GPT-2's)
    return [Example((x,), {**named, **make_positions(["position_ids"], x)}), plain]


def make_small(block: nn.Module) -> nn.Module | None:
    """Return a small block that computes what this one does, if its family can make one."""
    for family in _list_families():
        make: Any = getattr(family, "make_small", None)
        made: nn.Module | None = None if make is None else make(block)
        # a user may have added modules, such as adapters
        if made is not None and _list_paths(made) == _list_paths(block):
            return made
    return transformers_small.make_small(block)


def _list_paths(block: nn.Module) -> list[str]:
    return [path for path, _ in block.named_modules()]


def find_width(block: nn.Module) -> int:
    """Return the width of the residual stream: the most frequent size of the block's norms, or the larger of two."""
    sizes = [len(p) for p in block.parameters() if p.dim() == 1]
    shapes = [p.shape for p in block.parameters() if p.dim() == 2]
    read, written = ({shape[side] for shape in shapes} for side in (1, 0))
    fitting = [size for size in sizes if size in read and size in written]
    if not sizes:  # norms without weights: most matrices read the stream
        fitting = [shape[1] for shape in shapes if shape[1] in written]
    if not fitting:
        raise NotABlock("no norm has the width of a linear layer")
    return max(fitting, key=lambda size: (fitting.count(size), size))


def _list_families() -> list[Any]:
    names = sorted(info.name for info in pkgutil.iter_modules(families.__path__))
    return [importlib.import_module(f"{families.__name__}.{name}") for name in names]
