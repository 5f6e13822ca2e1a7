"""The trace of a training step as data: its operations in order, the memory they allocate, and when it is freed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

ROLES = ("weights", "master", "gradients", "moments", "activations", "workspace")
"""What memory is used for. Products read ``weights``; ``master`` exists only for exact updates."""


class Owner(NamedTuple):
    """The parameter that a weight, a gradient or a state belongs to, and how it is sharded over ranks."""

    part: str
    """block: in a module that is gathered on its own; outside: gathered for the whole step; copied: on every rank."""
    rows: int
    """Rows, along which it is sharded."""
    numel: int
    stacked: bool = False
    """For a copy: whether it stacks several weights."""


@dataclass(slots=True)
class MemoryBlock:
    """A block of memory that the trace allocated."""

    bytes: int
    born: int
    """The operation that allocated it."""
    role: str = "activations"
    owner: Owner | None = None
    is_copy: bool = False
    """A weight in another format, cast during a step."""


@dataclass(slots=True)
class TensorRef:
    """A tensor that an operation reads or writes."""

    block: int
    bytes: int
    shape: tuple[int, ...]
    dtype: torch.dtype


class Spec(NamedTuple):
    """Shape, strides and format of a tensor: enough to make one like it."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


class Call(NamedTuple):
    """The call of an operation, with specs instead of tensors; equal calls cost the same."""

    func: Any
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]


@dataclass(slots=True)
class Op:
    """One operation of the trace."""

    name: str
    kind: str
    phase: str
    """build, forward, backward or step."""
    step: int
    where: str
    """The module it belongs to, as a path."""
    compiled: bool
    reads: list[TensorRef]
    writes: list[TensorRef]
    flops: float
    workspace: int = 0
    """Bytes it allocates in addition to its results while it runs."""
    causal: bool = False
    accumulates: bool = False
    """Autograd's own sum of two gradients, which is written into the first."""
    call: Call | None = None
    """To run it again with other data; None for kernels that torch's dispatcher does not see."""

    @property
    def bytes(self) -> int:
        """Bytes read and written, each operand once."""
        return sum(piece.bytes for piece in self.reads) + sum(piece.bytes for piece in self.writes)

    @property
    def format(self) -> str:
        """The format it multiplies in."""
        widths = [piece.dtype for piece in self.reads if piece.dtype.is_floating_point and len(piece.shape) > 1]
        return FORMAT_OF.get(widths[0], "fp32") if widths else "fp32"


FORMAT_OF = {torch.float8_e4m3fn: "fp8", torch.float8_e5m2: "fp8", torch.bfloat16: "bf16", torch.float16: "fp16"}


@dataclass
class Trace:
    """Operations and allocations of building a model and of some steps."""

    ops: list[Op] = field(default_factory=list)
    blocks: list[MemoryBlock] = field(default_factory=list)
    events: list[tuple[int, int]] = field(default_factory=list)
    """(operation, block + 1) where a block is allocated, (operation, -(block + 1)) where it is freed, in order."""
    returned: list[tuple[int, int]] = field(default_factory=list)
    """(operation, block): an output of a compiled model other than its loss, and the block of its gradient."""

    def of_step(self, step: int) -> list[Op]:
        """The operations of a step."""
        return [op for op in self.ops if op.step == step and op.phase != "build"]
