"""Saves the checkpoints of a run: one process at once, several ranks together while training goes on.

Of several ranks each copies its shards and goes on training; a thread writes them. When all have written, the first
rank describes and names the checkpoint: until then it is not there, and who dies takes nothing with it that was.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from narrowgauge.errors import UsageError
from narrowgauge.ranks.world import World, lost
from narrowgauge.runs import atomic_files
from narrowgauge.runs.checkpoints import checkpoint, sharded


class Saver:
    """Saves checkpoints of one process, at once."""

    def __init__(self, run: Path, keep: int) -> None:
        self.run, self.keep = run, keep
        self._done: list[tuple[int, Path]] = []

    def save(self, step: int, weights: Mapping[str, Any], state: dict[str, Any], random: Any) -> None:
        """Save a step: now, or soon."""
        path = checkpoint.save(self.run, step, weights, {**state, "random": random}, self.keep)
        self._done.append((step, path))

    def done(self, wait: bool = False) -> list[tuple[int, Path]]:
        """The checkpoints that have come to be since the last call; ``wait`` for one that is under way."""
        done, self._done = self._done, []
        return done


class RankedSaver(Saver):
    """Saves checkpoints of several ranks, one at a time, while training goes on."""

    def __init__(self, run: Path, keep: int, world: World) -> None:
        super().__init__(run, keep)
        self.world = world
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="narrowgauge-saving")
        self._pending: Future[Any] | None = None

    def save(self, step: int, weights: Mapping[str, Any], state: dict[str, Any], random: Any) -> None:
        self._settle()
        folder, wrong = None, None
        if self.world.first:
            try:
                folder = checkpoint.begin(self.run, step)
            except OSError as error:
                wrong = str(atomic_files.refuse(checkpoint.path_of(self.run, step), error))
        folder, wrong = self.world.told((folder, wrong))
        if wrong is not None:
            raise UsageError(wrong)
        assert folder is not None
        sharded.write_random(folder, self.world.rank, random)
        content, tensors = sharded.take_apart(weights, state)
        written = sharded.write(folder, tensors, self.world.saving)
        if self.world.first:
            written = self._thread.submit(self._finish, step, folder, content, written)
        self._pending = written

    def _finish(self, step: int, folder: Path, content: dict[str, Any], written: Future[Any]) -> None:
        try:
            written.result()
            (folder / sharded.STATE).write_text(checkpoint.dump(content))
            checkpoint.commit(self.run, step, self.keep)
        except BaseException as error:  # torch's own is no Exception
            shutil.rmtree(folder, ignore_errors=True)  # half a checkpoint would only keep the disk full
            reason = sharded.cause(error)
            if isinstance(reason, OSError | SafetensorError):
                raise atomic_files.refuse(checkpoint.path_of(self.run, step), reason) from error
            raise
        self._done.append((step, checkpoint.path_of(self.run, step)))

    def _settle(self) -> None:
        pending, self._pending = self._pending, None
        try:
            if pending is not None:
                pending.result()
        except BaseException as error:
            reason = sharded.cause(error)
            if isinstance(reason, OSError | SafetensorError):
                raise atomic_files.refuse(self.run, reason) from error
            if reason is not error:
                raise lost(reason) from error
            raise

    def done(self, wait: bool = False) -> list[tuple[int, Path]]:
        if self._pending is not None and (wait or self._pending.done()):
            self._settle()
        if wait:
            self.world.wait()  # nobody leaves before the first rank has named what all have written
        return super().done()


def make_saver(run: Path, keep: int, world: World) -> Saver:
    return Saver(run, keep) if world.alone else RankedSaver(run, keep, world)
