"""Counts what a simulated GPU allocates while code runs, as ``torch.cuda.memory_allocated`` would on a real one."""

from __future__ import annotations

from narrowgauge.forecast.memory.allocator import CachingAllocator


class MemoryMeter:
    """The counters of torch's allocator. Blocks have numbers."""

    def __init__(self) -> None:
        self.peak = 0
        self._allocator = CachingAllocator()
        self._addresses: dict[int, int] = {}

    @property
    def allocated(self) -> int:
        """Bytes that are allocated now."""
        return self._allocator.allocated

    def allocate(self, block: int, size_bytes: int) -> None:
        """Allocate a block."""
        self._addresses[block] = self._allocator.allocate(size_bytes)
        self.peak = max(self.peak, self.allocated)

    def release(self, block: int) -> None:
        """Free a block."""
        address = self._addresses.pop(block, None)
        if address is not None:
            self._allocator.release(address)

    def add_forever(self, size_bytes: int) -> None:
        """Allocate memory that is never freed."""
        self._allocator.allocate(size_bytes)
        self.peak = max(self.peak, self.allocated)

    def add_briefly(self, size_bytes: int) -> None:
        """Allocate memory for one operation."""
        address = self._allocator.allocate(size_bytes)
        self.peak = max(self.peak, self.allocated)
        self._allocator.release(address)

    def reset_peak(self) -> None:
        """Begin a new peak."""
        self.peak = self.allocated
