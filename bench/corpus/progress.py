"""Long work: lines of progress, several processes whose results stay in order, and sizes as users write them."""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import re
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

START = time.perf_counter()
EVERY_SECONDS = 10
"""Time between two lines of progress."""


def say(text: str) -> None:
    print(f"[{time.perf_counter() - START:.0f} s] {text}", flush=True)


def track(results: Iterator[Any], total: int, what: str) -> Iterator[Any]:
    """Pass results on, and say now and then how many there were."""
    said = time.perf_counter()
    for number, result in enumerate(results, 1):
        if time.perf_counter() - said > EVERY_SECONDS:
            said = time.perf_counter()
            say(f"{what} {number} of {total}")
        yield result


@contextlib.contextmanager
def map_in_order(function: Callable[[Any], Any], tasks: Sequence[Any], jobs: int) -> Iterator[Iterator[Any]]:
    """Map in several processes. The results have the order of the tasks, so the number of processes changes nothing."""
    if jobs == 1:
        yield map(function, tasks)
        return
    context = multiprocessing.get_context("spawn")
    with context.Pool(jobs, signal.signal, (signal.SIGINT, signal.SIG_IGN)) as pool:  # the parent ends the workers
        yield pool.imap(function, tasks, chunksize=max(1, min(64, len(tasks) // 1000)))


def parse_count(text: str) -> int:
    """Parse a number of bytes or tokens: 200MB, 40M, 1.5GB."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kMG]?)B?", text)
    if match is None or float(match[1]) * {"": 1, "k": 1e3, "M": 1e6, "G": 1e9}[match[2]] < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 200MB or 40M")
    return int(float(match[1]) * {"": 1, "k": 1e3, "M": 1e6, "G": 1e9}[match[2]])
