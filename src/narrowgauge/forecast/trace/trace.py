"""The trace of a training step as data: its operations in order, the memory they allocate, and when it is freed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

ROLES = ("weights", "master", "gradients", "moments", "activations", "workspace")
"""What memory is for. ``weights`` is what products read, ``master`` what exists only to be updated exactly."""


class Owner(NamedTuple):
    """The parameter that a weight, a gradient or a state belongs to, as a model spread over ranks sees it."""

    part: str
    """block: of a module that is gathered by itself; outside: gathered for the whole step; copied: on every rank."""
    rows: int
    """Along which it is cut into shards."""
    numel: int
    stacked: bool = False
    """For a copy: whether it is of several weights, one below the other."""


@dataclass(slots=True)
class Block:
    """A piece of memory."""

    bytes: int
    born: int
    """The operation that allocated it."""
    role: str = "activations"
    owner: Owner | None = None
    is_copy: bool = False
    """A weight in another format, made from it in a step."""


@dataclass(slots=True)
class Piece:
    """A tensor that an operation read or wrote."""

    block: int
    bytes: int
    shape: tuple[int, ...]
    dtype: torch.dtype


class Spec(NamedTuple):
    """What is known of a tensor without its data: enough to make one like it."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


class Call(NamedTuple):
    """An operation's call, with specs in the place of tensors: equal calls cost the same."""

    func: Any
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]


@dataclass(slots=True)
class Op:
    """One operation."""

    name: str
    kind: str
    phase: str
    """build, forward, backward or step."""
    step: int
    where: str
    """The module it belongs to, as a path."""
    compiled: bool
    reads: list[Piece]
    writes: list[Piece]
    flops: float
    workspace: int = 0
    """Bytes it takes beside its results, for as long as it runs."""
    causal: bool = False
    accumulates: bool = False
    """Autograd's own sum of two gradients, which takes place in the first."""
    call: Call | None = None
    """To do it again with other data; None for what does not pass through torch."""

    @property
    def bytes(self) -> int:
        """What must pass between memory and processor: each operand once."""
        return sum(piece.bytes for piece in self.reads) + sum(piece.bytes for piece in self.writes)

    @property
    def format(self) -> str:
        """The format it multiplies in."""
        widths = [piece.dtype for piece in self.reads if piece.dtype.is_floating_point and len(piece.shape) > 1]
        return FORMAT_OF.get(widths[0], "fp32") if widths else "fp32"


FORMAT_OF = {torch.float8_e4m3fn: "fp8", torch.float8_e5m2: "fp8", torch.bfloat16: "bf16", torch.float16: "fp16"}


@dataclass
class Trace:
    """Operations and allocations of a build and some steps."""

    ops: list[Op] = field(default_factory=list)
    blocks: list[Block] = field(default_factory=list)
    events: list[tuple[int, int]] = field(default_factory=list)
    """(operation, block + 1) for an allocation, (operation, -(block + 1)) for the end of one, in order."""
    returned: list[tuple[int, int]] = field(default_factory=list)
    """(operation, block): where a compiled model returned something beside its loss, and a gradient of it."""

    def of_step(self, step: int) -> list[Op]:
        """The operations of a step that cost time."""
        return [op for op in self.ops if op.step == step and op.phase != "build"]
