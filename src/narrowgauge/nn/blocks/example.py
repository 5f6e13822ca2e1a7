"""The arguments of one call of a block, and random angles for those that need them."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from narrowgauge.nn.module_changes import original_class


@contextlib.contextmanager
def allow_nondeterminism() -> Iterator[None]:
    """Context manager for examples, which are compared with a tolerance: torch may not warn or fail where a kernel's
    last bits may change, as a user may have asked it to."""
    before, warns = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(False)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warns)


SOURCES = ("encoder_hidden_states", "xa", "context", "enc", "enc_output", "encoder_output", "memory")
"""Names of a block's argument for an encoder's output: in transformers, OpenAI's Whisper, latent diffusion, others."""


class Example(NamedTuple):
    """The arguments of a call; the hidden state is the first positional one."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def find_source(kwargs: dict[str, Any]) -> tuple[str, Tensor] | None:
    """Return the argument with an encoder's output and its name, if a call has one."""
    return next(((name, kwargs[name]) for name in SOURCES if kwargs.get(name) is not None), None)


class Signature(NamedTuple):
    """Names of a block's arguments, the hidden state's first."""

    required: list[str]
    optional: list[str]


def read_signature(block: nn.Module) -> Signature:
    """Return the names of the arguments of a block's forward."""
    parameters = list(inspect.signature(original_class(block).forward).parameters.values())[1:]
    plain = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    required = [p.name for p in plain if p.default is p.empty]
    optional = [p.name for p in plain if p.default is not p.empty]
    return Signature(required, optional) if required else Signature(optional[:1], optional[1:])


def takes_any_argument(block: nn.Module) -> bool:
    """Return whether a block's forward has ``**kwargs``."""
    parameters = inspect.signature(original_class(block).forward).parameters.values()
    return any(p.kind is p.VAR_KEYWORD for p in parameters)


def make_positions(names: list[str], x: Tensor) -> dict[str, Tensor]:
    """Return position ids for a block that takes them: with an offset, so that a block that uses them shows it."""
    if "position_ids" not in names:
        return {}
    return {"position_ids": (3 + 2 * torch.arange(x.shape[1], device=x.device)).expand(len(x), -1)}


def list_head_sizes(block: nn.Module) -> list[int]:
    """Return the numbers that modules of the block call their head's size, or the rotated part of it."""
    sizes: list[int] = []
    for module in block.modules():
        holders = [module, getattr(module, "config", None)]
        for name in ("head_dim", "head_size", "rotary_ndims", "rope_n_elem", "rotary_dim", "qk_rope_head_dim"):
            for holder in holders:
                size = getattr(holder, name, None)
                if isinstance(size, int) and size > 1 and size not in sizes:
                    sizes.append(size)
    return sizes


def list_likely_head_sizes(block: nn.Module) -> list[int]:
    """Return what modules call their head's size, or the widths of matrices divided by numbers that they call heads."""
    named_sizes = list_head_sizes(block)
    if named_sizes:
        return named_sizes
    widths = {p.shape[0] for p in block.parameters() if p.dim() == 2}
    named = (item for module in block.modules() for item in vars(module).items())
    counts = {value for name, value in named if "head" in name and type(value) is int and value > 1}
    return sorted({width // count for width in widths for count in counts if width % (2 * count) == 0})


def list_head_counts(block: nn.Module) -> list[int]:
    """Return the numbers that modules of the block call their number of heads."""
    counts = (getattr(module, name, None) for module in block.modules() for name in ("num_heads", "n_heads"))
    return [count for count in counts if isinstance(count, int)]


def make_turns(x: Tensor, size: int) -> Tensor:
    """Return random angles [T, size]."""
    return torch.rand(x.shape[1], size, generator=torch.Generator().manual_seed(2)).to(x.device) * 6
