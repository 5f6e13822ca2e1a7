"""The processes that train together, as torchrun starts them (RANK, WORLD_SIZE, ...); one alone is a world of its own.

What they agree on beside the tensors (whether to stop, where to write) goes over a gloo group of its own, on the CPU,
so that it neither waits for a GPU nor mixes with what the model sends. Gloo notices at once when a process is gone.
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
"""How long a rank waits for one that is there but does not answer; that one is gone is noticed at once."""
PATIENCE = timedelta(hours=1)
"""The same where one rank may have long work to do while the others wait: data to encode, a model to draw."""
_LOST = re.compile(r"gloo/transport|connectFullMesh|closed by peer|reset by peer|recvBytes")
"""How gloo says that a peer is gone, in plain RuntimeErrors; whatever else goes wrong keeps its traceback."""
_PLACE = re.compile(r"\[\S+\.(cc|cpp|h):\d+\] ?")
"""Where in whose source an error was noticed: of no use to who trains."""


class RankLost(UsageError):
    """Another process of the run has ended, so that this one cannot go on."""


class Elsewhere(UsageError):
    """The first rank has refused something, and said so."""

    already_shown = True


@dataclass(frozen=True)
class World:
    """This process among those that train with it."""

    rank: int = 0
    size: int = 1
    host: dist.ProcessGroup | None = None
    """For agreement on the CPU."""
    saving: dist.ProcessGroup | None = None
    """For checkpoints, which are written while training goes on."""

    @property
    def first(self) -> bool:
        """Whether this process is the one that writes and speaks for all."""
        return self.rank == 0

    @property
    def alone(self) -> bool:
        return self.size == 1

    def most(self, number: int) -> int:
        """The largest of the ranks' numbers."""
        return number if self.alone else int(self._reduce([float(number)], dist.ReduceOp.MAX)[0])

    def sum(self, values: Sequence[float]) -> list[float]:
        """The sums of numbers over all ranks, in FP64."""
        return list(values) if self.alone else self._reduce(values, dist.ReduceOp.SUM)

    def _reduce(self, values: Sequence[float], how: Any) -> list[float]:
        numbers = torch.tensor(list(values), dtype=torch.float64)
        dist.all_reduce(numbers, how, group=self.host)
        return numbers.tolist()

    def told(self, value: Any) -> Any:
        """What the first rank says, on every rank."""
        if self.alone:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self.host)
        return box[0]

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """What the first rank refuses in the block, all refuse."""
        wrong: UsageError | None = None
        try:
            yield
        except UsageError as error:
            wrong = error
        said = self.told(str(wrong) if wrong is not None else None)
        if said is not None and not self.first:
            raise Elsewhere(said)
        if wrong is not None:
            raise wrong

    def wait(self) -> None:
        """Until all are here."""
        if not self.alone:
            dist.barrier(group=self.host)


ALONE = World()


def torchrun_size() -> int:
    """How many processes torchrun has started; 1 where it has not, or where the environment is none of its."""
    return int(os.environ.get("WORLD_SIZE", "1")) if os.environ.get("RANK", "").isdigit() else 1


def restarts() -> int:
    """How often torchrun has started these processes again."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def local_device(asked: str | None) -> str | None:
    """The device of this process: of several GPUs the one with its number on the machine."""
    if torchrun_size() > 1 and asked in (None, "cuda") and torch.cuda.is_available():
        return f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
    return asked


@contextlib.contextmanager
def joined(device: str) -> Iterator[World]:
    """The world, joined for the block. A process that torchrun did not start is alone in it."""
    size = torchrun_size()
    if size == 1:
        yield ALONE
        return
    kind = torch.device(device).type
    if kind == "cuda":
        torch.cuda.set_device(device)
    with _explained():
        store, rank, _ = next(rendezvous("env://", timeout=TIMEOUT))
        # torchrun may keep one store for all its restarts, in which gloo would find the addresses of the dead.
        store = PrefixStore(f"narrowgauge/{restarts()}", store)
        backend = "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=TIMEOUT)
        host, saving = (dist.new_group(backend="gloo", timeout=PATIENCE) for _ in range(2))
    try:
        with _explained():
            yield World(dist.get_rank(), size, host, saving)
    finally:
        with contextlib.suppress(Exception):  # the others may be gone, and nothing more is asked of them
            dist.destroy_process_group()


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    """A line instead of the traceback of whatever collective first noticed that a rank is gone."""
    try:
        yield
    except UsageError:
        raise
    except (dist.DistError, RuntimeError) as error:
        if not isinstance(error, dist.DistError) and not _LOST.search(str(error)):
            raise
        raise lost(error) from error


def lost(error: BaseException) -> RankLost:
    """The line about a rank that is gone, from the error by which it was noticed."""
    reason = _PLACE.sub("", str(error)).strip().partition("\n")[0].partition(". ")[0][:120]
    return RankLost(
        f"rank {os.environ.get('RANK')}: another process of the run has ended or does not answer ({reason}); what "
        "was saved is intact: start the same torchrun command again with --resume RUN"
    )
