"""Inputs of recomputed blocks in host memory between forward and backward.

    forward     A block's input is copied to pinned host memory on a stream of its own, while the next block runs. It
                stays on the GPU until a next block begins: the last block's backward reads it at once.
    backward    The backward of the block that came next starts the copy back. A block's own backward waits for its
                copy, and starts that of the input before it.

Copies in both directions are on one stream, so that memory of the host can be written again as soon as the copy from it
has been started. It consists of pages of one size, which serve all models and lengths of a process and are never freed:
from the second step on nothing is allocated. torch rounds a pinned allocation up to a power of two, hence pages.

On a CPU the copies are ordinary ones. In a forecast nothing is copied, and bytes are reported (``events``).
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections import deque
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from narrowgauge import events
from narrowgauge.errors import UsageError
from narrowgauge.kernels.dry_run import is_dry_run

HOST_SHARE = 0.5
"""Share of the host's memory that a plan may use, for all ranks together."""
MOST_PENDING = 2
"""Copies to the host that may be on their way: forward waits before one more, as their tensors still exist."""
PAGE_BYTES = 1 << 24
"""A copy of 16 MiB takes 0.3 ms over PCIe 5; the host needs a few microseconds to start one."""
LARGEST_SLAB = 1 << 30
"""Pages are allocated many at a time: as many as there are already, up to this many bytes."""

Form = tuple[torch.Size, tuple[int, ...], torch.dtype, torch.device]
"""Shape, strides, dtype and device of a tensor. With other strides, sums over its rows would round differently."""


class PagePool:
    """Pages of host memory; pinned, if a GPU copies to them."""

    def __init__(self, is_pinned: bool) -> None:
        self._is_pinned = is_pinned
        self._free: list[Tensor] = []
        self.allocated_bytes = 0

    def take(self, size: int) -> list[Tensor]:
        """Return pages for so many bytes."""
        count = -(-size // PAGE_BYTES)
        while len(self._free) < count:
            slab = min(max(PAGE_BYTES, self.allocated_bytes), LARGEST_SLAB)
            memory = self._allocate(slab)
            self._free += memory.split(PAGE_BYTES)
            self.allocated_bytes += slab
        taken, self._free = self._free[len(self._free) - count :], self._free[: len(self._free) - count]
        return taken

    def _allocate(self, size: int) -> Tensor:
        try:
            return torch.empty(size, dtype=torch.uint8, pin_memory=self._is_pinned)
        except RuntimeError as error:
            held = self.allocated_bytes / 1e9
            raise UsageError(
                f"offload: the host has no {size / 1e9:.1f} GB more of memory for inputs of blocks, which have "
                f"{held:.1f} GB already; use offload=none, a larger memory budget, or fewer tokens per batch"
            ) from error

    def give_back(self, pages: list[Tensor]) -> None:
        """Take back pages whose copies have been started."""
        self._free += pages


class Offloader:
    """Moves tensors of one device to the host and back."""

    def __init__(self, device: torch.device) -> None:
        self.pool = PagePool(device.type == "cuda")
        self._stream: Any = torch.cuda.Stream(device) if device.type == "cuda" and not is_dry_run() else None
        self._newest: Any = lambda: None
        self._pending: deque[Any] = deque()

    def put(self, x: Tensor) -> Offloaded:
        """Start the copy of a tensor to the host. The caller holds the result, and no longer the tensor."""
        before: Offloaded | None = self._newest()
        if before is not None:
            before.drop_original()
        made = Offloaded(self, x.detach() if _is_dense(x) else x.detach().contiguous(), before)
        self._newest = weakref.ref(made)
        return made

    def begin_block(self) -> Offloaded | None:
        """A block begins its forward: free the newest tensor on the device, and return what it has become."""
        newest: Offloaded | None = self._newest()
        return newest if newest is not None and newest.drop_original() else None

    def copy_out(self, x: Tensor) -> list[Tensor]:
        """Start the copy to pages of the host."""
        events.report_offload(x.nbytes)
        if is_dry_run():
            return []
        source = _list_bytes(x)
        pages = self.pool.take(source.numel())
        if self._stream is not None:
            current = torch.cuda.current_stream(x.device)
            while len(self._pending) >= MOST_PENDING:
                current.wait_event(self._pending.popleft())
            self._stream.wait_stream(current)
        with _on(self._stream):
            for page, piece in zip(pages, source.split(PAGE_BYTES), strict=True):
                page[: len(piece)].copy_(piece, non_blocking=True)
        if self._stream is not None:
            x.record_stream(self._stream)  # its memory serves nothing else before the copy is done
            self._pending.append(self._stream.record_event())
        return pages

    def copy_in(self, pages: list[Tensor], form: Form) -> Any:
        """Start the copy from pages of the host; return the tensor, and an event for its end."""
        shape, strides, dtype, device = form
        x = torch.empty_strided(shape, strides, dtype=dtype, device=device)
        if is_dry_run():
            return x, None
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(device))  # x's memory may still be in use there
        with _on(self._stream):
            for page, piece in zip(pages, _list_bytes(x).split(PAGE_BYTES), strict=True):
                piece.copy_(page[: len(piece)], non_blocking=True)
        if self._stream is None:
            return x, None
        x.record_stream(self._stream)
        return x, self._stream.record_event()


class Offloaded:
    """A tensor on the host."""

    def __init__(self, owner: Offloader, x: Tensor, before: Offloaded | None) -> None:
        self._pages: list[Tensor] | None = None
        self._owner, self._before = owner, None if before is None else weakref.ref(before)
        self._form: Form = x.shape, x.stride(), x.dtype, x.device
        self._original: tuple[Tensor, int] | None = (x, x._version)
        self._fetched: tuple[Tensor, Any] | None = None
        self._pages = owner.copy_out(x)

    def drop_original(self) -> bool:
        """Free the tensor on the device; return whether it was there."""
        was_there, self._original = self._original is not None, None
        return was_there

    def fetch(self) -> None:
        """Start the copy back to the device, if it has not been started."""
        if self._fetched is None and self._pages is not None:
            self._fetched = self._owner.copy_in(self._pages, self._form)

    def take(self, is_last: bool = True) -> Tensor:
        """Return the tensor on the device, and start to fetch the one that was put before it.

        Unless ``is_last``, it can be taken again.
        """
        held, self._original = self._original, None
        if held is not None and held[0]._version == held[1]:
            x = held[0]
        else:
            self.fetch()
            assert self._fetched is not None
            x, event = self._fetched
            if event is not None:
                torch.cuda.current_stream(x.device).wait_event(event)
        self._fetched = None
        if is_last:
            self._give_back()
        before = None if self._before is None else self._before()
        if before is not None:
            before.fetch()
        return x

    def _give_back(self) -> None:
        pages, self._pages = self._pages, None
        if pages:
            self._owner.pool.give_back(pages)

    def __del__(self) -> None:
        self._give_back()  # a forward without backward


def _is_dense(x: Tensor) -> bool:
    """Whether a tensor fills its memory without gaps, in any order of its dimensions."""
    expected = 1
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def _list_bytes(x: Tensor) -> Tensor:
    """Return the bytes of a dense tensor in the order in which they are in memory."""
    return x.as_strided((x.numel(),), (1,)).view(torch.uint8)


def _on(stream: Any) -> Any:
    return contextlib.nullcontext() if stream is None else torch.cuda.stream(stream)


def offload(x: Tensor) -> Offloaded:
    """Move a tensor to the host."""
    return _get_offloader(x.device, is_dry_run()).put(x)


def begin_block(device: torch.device) -> Offloaded | None:
    """A block begins its forward: free the input of the block before it if that was offloaded, and return it.

    The backward of this block fetches it, so that it is there in time.
    """
    found = _OFFLOADERS.get((device, is_dry_run()))
    return None if found is None else found.begin_block()


_OFFLOADERS: dict[tuple[torch.device, bool], Offloader] = {}
"""By device; a forecast has its own."""


def _get_offloader(device: torch.device, is_dry: bool) -> Offloader:
    """Return the offloader of a device."""
    key = device, is_dry
    if key not in _OFFLOADERS:
        _OFFLOADERS[key] = Offloader(device)
    return _OFFLOADERS[key]


def get_host_room() -> float:
    """Return how many bytes of host memory a plan may use; unlimited in a forecast, whose host is not known."""
    if is_dry_run():
        return float("inf")
    sizes = [float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))]
    with contextlib.suppress(OSError, ValueError):  # a container's own limit; "max" is none
        sizes.append(float(Path("/sys/fs/cgroup/memory.max").read_text()))
    return HOST_SHARE * min(sizes)
