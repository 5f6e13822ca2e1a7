"""Limits of time for tests, on machines of any speed that may be busy with other tests."""

from __future__ import annotations

import ast
import contextlib
import time
from collections.abc import Callable, Iterator

TEXT = "values = [one.name + str(index) for index, one in enumerate(found) if one is not None]\n" * 1500
TAKES_S = 0.1
"""How long a machine with nothing else to do takes to parse the text."""


def slowdown(clock: Callable[[], float] = time.perf_counter) -> float:
    """Return how many times as long as there an equal piece of work takes here and now, at least 1."""
    start = clock()
    ast.parse(TEXT)
    return max(1.0, (clock() - start) / TAKES_S)


@contextlib.contextmanager
def at_most(seconds: float, clock: Callable[[], float] = time.perf_counter) -> Iterator[None]:
    """Check that the block takes no longer than this, times the machine's slowdown before or after it.

    Args:
        seconds: The limit on a machine with nothing else to do.
        clock: ``time.process_time`` for work of this process that waits for nothing.
    """
    before, start = slowdown(clock), clock()
    yield
    took = clock() - start
    allowed = seconds * max(before, slowdown(clock))
    assert took < allowed, f"took {took:.2f} s, allowed are {allowed:.2f} s"
