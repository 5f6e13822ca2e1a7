"""The processes that train together, as torchrun starts them (RANK, WORLD_SIZE, ...). A single process is a world too.

Decisions (whether to stop, where to write) are exchanged over a separate gloo group on the CPU. So they neither wait
for a GPU nor mix with the model's collectives. Gloo notices immediately when a process is gone.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from narrowgauge.errors import UsageError

TIMEOUT = timedelta(minutes=10)
"""How long a rank waits for another that is running but does not answer. One that is gone is noticed immediately."""
LONG_TIMEOUT = timedelta(hours=1)
"""The same while one rank may work for long and the others wait: encoding data, initializing a model."""
_LOST = re.compile(r"gloo/transport|connectFullMesh|closed by peer|reset by peer|recvBytes")
"""Gloo's RuntimeErrors about a process that is gone. Every other error keeps its traceback."""
_SOURCE_LINE = re.compile(r"\[\S+\.(cc|cpp|h):\d+\] ?")
"""The line of gloo's source in its error messages, which does not help the user."""


class RankLost(UsageError):
    """Another process of the run has ended, so that this one cannot continue."""


class RefusedByRankZero(UsageError):
    """Rank 0 has refused something and printed the error."""

    already_shown = True


@dataclass(frozen=True)
class World:
    """This process among those that train with it."""

    rank: int = 0
    size: int = 1
    host: dist.ProcessGroup | None = None
    """Group for decisions, on the CPU."""
    saving: dist.ProcessGroup | None = None
    """Group for checkpoints, which are written while training continues."""

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which writes files and prints for all."""
        return self.rank == 0

    @property
    def is_single(self) -> bool:
        """Whether this is the only process."""
        return self.size == 1

    def max(self, number: int) -> int:
        """Return the maximum of a number over all ranks."""
        return number if self.is_single else int(self._reduce([float(number)], dist.ReduceOp.MAX)[0])

    def sum(self, values: Sequence[float]) -> list[float]:
        """Return the sum of each number over all ranks, in FP64."""
        return list(values) if self.is_single else self._reduce(values, dist.ReduceOp.SUM)

    def _reduce(self, values: Sequence[float], how: Any) -> list[float]:
        numbers = torch.tensor(list(values), dtype=torch.float64)
        dist.all_reduce(numbers, how, group=self.host)
        return numbers.tolist()

    def broadcast(self, value: Any) -> Any:
        """Return rank 0's value on every rank."""
        if self.is_single:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self.host)
        return box[0]

    @contextlib.contextmanager
    def fail_together(self) -> Iterator[None]:
        """Raise a UsageError of rank 0 in the block on every rank."""
        own: UsageError | None = None
        try:
            yield
        except UsageError as error:
            own = error
        first = self.broadcast(str(own) if own is not None else None)
        if first is not None and not self.is_first:
            raise RefusedByRankZero(first)
        if own is not None:
            raise own

    def wait(self) -> None:
        """Wait for all ranks (a barrier)."""
        if not self.is_single:
            dist.barrier(group=self.host)


SINGLE_PROCESS = World()


def read_world_size() -> int:
    """Read from the environment how many processes torchrun has started; 1 if it started none."""
    return int(os.environ.get("WORLD_SIZE", "1")) if os.environ.get("RANK", "").isdigit() else 1


def read_restart_count() -> int:
    """Read from the environment how often torchrun has restarted these processes."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def choose_device(requested: str | None) -> str | None:
    """Choose the device of this process: under torchrun the GPU of its local rank, else the requested one."""
    if read_world_size() > 1 and requested in (None, "cuda") and torch.cuda.is_available():
        return f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
    return requested


@contextlib.contextmanager
def join_world(device: str) -> Iterator[World]:
    """Join the process groups for the block. Without torchrun, yield ``SINGLE_PROCESS``.

    Args:
        device: The device of this process, which decides the backend.

    Yields:
        This process among the ranks.

    Raises:
        RankLost: Another process ended or does not answer.
    """
    size = read_world_size()
    if size == 1:
        yield SINGLE_PROCESS
        return
    kind = torch.device(device).type
    if kind == "cuda":
        torch.cuda.set_device(device)
    with _explain_lost_ranks():
        store, rank, _ = next(rendezvous("env://", timeout=TIMEOUT))
        # torchrun may keep one store over restarts, in which gloo would find the addresses of ended processes.
        store = PrefixStore(f"narrowgauge/{read_restart_count()}", store)
        backend = "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=TIMEOUT)
        host, saving = (dist.new_group(backend="gloo", timeout=LONG_TIMEOUT) for _ in range(2))
    try:
        with _explain_lost_ranks():
            yield World(dist.get_rank(), size, host, saving)
    finally:
        with contextlib.suppress(Exception):  # the other ranks may be gone, and are not needed any more
            dist.destroy_process_group()


@contextlib.contextmanager
def _explain_lost_ranks() -> Iterator[None]:
    """Replace the traceback of the collective that noticed a lost rank by one line."""
    try:
        yield
    except UsageError:
        raise
    except (dist.DistError, RuntimeError) as error:
        if not isinstance(error, dist.DistError) and not _LOST.search(str(error)):
            raise
        raise explain_lost_rank(error) from error


def explain_lost_rank(error: BaseException) -> RankLost:
    """Make the one-line error about a lost rank from the error that revealed it."""
    reason = _SOURCE_LINE.sub("", str(error)).strip().partition("\n")[0].partition(". ")[0][:120]
    return RankLost(
        f"rank {os.environ.get('RANK')}: another process of the run has ended or does not answer ({reason}); what "
        "was saved is intact: start the same torchrun command again with --resume RUN"
    )
