"""The simulated caching allocator: its rounding, its pools, and that no memory is lost."""

from __future__ import annotations

import itertools
import random

from narrowgauge.forecast.memory.allocator import CachingAllocator

MIB = 1 << 20


def test_sizes_are_rounded_and_small_ones_share_a_segment() -> None:
    memory = CachingAllocator()
    first = memory.allocate(1)
    second = memory.allocate(513)
    assert (memory.allocated, memory.reserved) == (512 + 1024, 2 * MIB)
    memory.release(first)
    memory.release(second)
    assert (memory.allocated, memory.reserved) == (0, 2 * MIB)


def test_large_blocks_have_their_own_segments() -> None:
    memory = CachingAllocator()
    memory.allocate(5 * MIB)  # from a segment of 20 MiB
    assert (memory.allocated, memory.reserved) == (5 * MIB, 20 * MIB)
    memory.allocate(12 * MIB)
    assert memory.reserved == 20 * MIB, "the rest of the segment serves"
    memory.allocate(101 * MIB)  # rounded up to 2 MiB; the remainder is too small to split off
    assert (memory.allocated, memory.reserved) == (17 * MIB + 102 * MIB, 122 * MIB)


def test_freed_blocks_are_reused_and_merged() -> None:
    memory = CachingAllocator()
    places = [memory.allocate(30 * MIB) for _ in range(3)]
    assert memory.reserved == 90 * MIB
    memory.release(places[1])
    assert memory.allocate(28 * MIB) == places[1] and memory.reserved == 90 * MIB
    whole = CachingAllocator()
    parts = [whole.allocate(4 * MIB) for _ in range(5)]  # one segment of 20 MiB
    for part in parts:
        whole.release(part)
    assert whole.allocate(19 * MIB + 512) == 0 and whole.reserved == 20 * MIB


def test_a_remainder_of_at_most_one_mebibyte_counts_as_allocated() -> None:
    memory = CachingAllocator()
    memory.release(memory.allocate(30 * MIB))
    memory.allocate(29 * MIB)
    assert memory.allocated == 30 * MIB
    other = CachingAllocator()
    other.release(other.allocate(30 * MIB))
    other.allocate(28 * MIB)
    assert other.allocated == 28 * MIB


def test_no_memory_is_lost_after_many_allocations() -> None:
    draw = random.Random(0)
    memory, held = CachingAllocator(), {}
    for _ in range(4000):
        if held and draw.random() < 0.5:
            memory.release(held.pop(draw.choice(list(held)))[0])
        else:
            size = int(2 ** draw.uniform(0, 27))
            held[len(held) + draw.random()] = memory.allocate(size), size
        assert memory.allocated <= memory.reserved
        assert memory.allocated >= sum(size for _, size in held.values())
    spans = sorted((address, address + size) for address, size in held.values())
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans)), "blocks overlap"
    for address, _ in held.values():
        memory.release(address)
    assert memory.allocated == 0
