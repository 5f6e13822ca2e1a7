"""Copies device scalars and tensors to the host without blocking: they arrive a little later.

    push:   stack the scalars on the device, start a copy into pinned host memory, record an event
    ready:  return the pushes whose event has completed, in order; never blocks
    drain:  wait for all of them (at the end of a run, or before a checkpoint)

On a CPU every push is ready immediately.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

MOST_PENDING = 64
"""With more unread pushes than this, wait for the oldest: a host that far ahead of its GPU loses nothing."""


@dataclass
class _Push:
    tag: Any
    names: tuple[str, ...]
    values: Tensor
    event: torch.cuda.Event | None

    def done(self) -> bool:
        return self.event is None or self.event.query()

    def read(self) -> tuple[Any, dict[str, float]]:
        if self.event is not None:
            self.event.synchronize()
        return self.tag, dict(zip(self.names, self.values.tolist(), strict=True))


class Readback:
    """A queue of scalars being copied from the device to the host."""

    def __init__(self) -> None:
        self._pending: deque[_Push] = deque()

    def push(self, tag: Any, scalars: Mapping[str, Tensor]) -> None:
        """Start copying named scalars; ``tag`` is returned with them."""
        values = torch.stack([value.detach().double().reshape(()) for value in scalars.values()])
        event = None
        if values.is_cuda:
            host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            host.copy_(values, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
            values = host
        self._pending.append(_Push(tag, tuple(scalars), values, event))

    def ready(self) -> list[tuple[Any, dict[str, float]]]:
        """Return what has arrived, oldest first."""
        arrived = []
        while self._pending and (self._pending[0].done() or len(self._pending) > MOST_PENDING):
            arrived.append(self._pending.popleft().read())
        return arrived

    def drain(self) -> list[tuple[Any, dict[str, float]]]:
        """Wait for all pushes and return them, oldest first."""
        arrived = [push.read() for push in self._pending]
        self._pending.clear()
        return arrived


class TensorReadback:
    """A queue of whole tensors being copied from the device to the host."""

    def __init__(self) -> None:
        self._pending: deque[tuple[Any, dict[str, Tensor], torch.cuda.Event | None]] = deque()

    def push(self, tag: Any, tensors: Mapping[str, Tensor]) -> None:
        """Start copying named tensors, which may be changed afterwards; ``tag`` is returned with them."""
        sent, event = {}, None
        for name, tensor in tensors.items():
            if tensor.is_cuda:
                sent[name] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
                sent[name].copy_(tensor, non_blocking=True)
            else:
                sent[name] = tensor.detach().clone()
        if any(tensor.is_cuda for tensor in tensors.values()):
            event = torch.cuda.Event()
            event.record()
        self._pending.append((tag, sent, event))

    def ready(self) -> list[tuple[Any, dict[str, Tensor]]]:
        """Return what has arrived, oldest first."""
        arrived = []
        while self._pending and (self._pending[0][2] is None or self._pending[0][2].query()):
            tag, tensors, _ = self._pending.popleft()
            arrived.append((tag, tensors))
        return arrived

    def drain(self) -> list[tuple[Any, dict[str, Tensor]]]:
        """Wait for all pushes and return them, oldest first."""
        arrived = []
        for tag, tensors, event in self._pending:
            if event is not None:
                event.synchronize()
            arrived.append((tag, tensors))
        self._pending.clear()
        return arrived
