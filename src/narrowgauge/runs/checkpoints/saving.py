"""Saves the checkpoints of a run: synchronously from one process, in the background from several ranks.

With several ranks, each copies its shards and continues to train while a thread writes them. When all ranks have
written, rank 0 writes the manifest and renames the folder. Until then the checkpoint does not exist, so a rank that
dies cannot damage an existing one.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from narrowgauge.errors import UsageError
from narrowgauge.ranks.world import World, explain_lost_rank
from narrowgauge.runs import atomic_files
from narrowgauge.runs.checkpoints import checkpoint, sharded
from narrowgauge.runs.checkpoints.layout import STATE


class Saver:
    """Saves the checkpoints of a single process, synchronously."""

    def __init__(self, run: Path, keep: int) -> None:
        self.run, self.keep = run, keep
        self._done: list[tuple[int, Path]] = []

    def save(self, step: int, weights: Mapping[str, Any], state: dict[str, Any], random: Any) -> None:
        """Save a checkpoint, or start to.

        Args:
            step: The number of updates so far.
            weights: The model's state dict.
            state: Everything else.
            random: The states of the random generators of this process.
        """
        path = checkpoint.save(self.run, step, weights, {**state, "random": random}, self.keep)
        self._done.append((step, path))

    def collect_saved(self, wait: bool = False) -> list[tuple[int, Path]]:
        """Return step and path of the checkpoints completed since the last call.

        Args:
            wait: Whether to wait for a checkpoint that is being written.
        """
        done, self._done = self._done, []
        return done


class ShardedSaver(Saver):
    """Saves the checkpoints of several ranks, one at a time, while training continues."""

    def __init__(self, run: Path, keep: int, world: World) -> None:
        super().__init__(run, keep)
        self.world = world
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="narrowgauge-saving")
        self._pending: Future[Any] | None = None

    def save(self, step: int, weights: Mapping[str, Any], state: dict[str, Any], random: Any) -> None:
        self._wait_for_pending()
        folder, wrong = None, None
        if self.world.is_first:
            try:
                folder = checkpoint.create_hidden(self.run, step)
            except OSError as error:
                wrong = str(atomic_files.explain_error(checkpoint.make_path(self.run, step), error))
        folder, wrong = self.world.broadcast((folder, wrong))
        if wrong is not None:
            raise UsageError(wrong)
        assert folder is not None
        sharded.write_random(folder, self.world.rank, random)
        trees, tensors = sharded.split_tensors(weights, state)
        written = sharded.write(folder, tensors, self.world.saving)
        if self.world.is_first:
            written = self._thread.submit(self._finish, step, folder, trees, written)
        self._pending = written

    def _finish(self, step: int, folder: Path, trees: dict[str, Any], written: Future[Any]) -> None:
        try:
            written.result()
            (folder / STATE).write_text(checkpoint.dump_state(**trees))
            checkpoint.commit(self.run, step, self.keep)
        except BaseException as error:  # torch's CheckpointException is not an Exception
            shutil.rmtree(folder, ignore_errors=True)  # a partial checkpoint would only fill the disk
            reason = sharded.unwrap_error(error)
            if isinstance(reason, OSError | SafetensorError):
                raise atomic_files.explain_error(checkpoint.make_path(self.run, step), reason) from error
            raise
        self._done.append((step, checkpoint.make_path(self.run, step)))

    def _wait_for_pending(self) -> None:
        pending, self._pending = self._pending, None
        try:
            if pending is not None:
                pending.result()
        except BaseException as error:
            reason = sharded.unwrap_error(error)
            if isinstance(reason, OSError | SafetensorError):
                raise atomic_files.explain_error(self.run, reason) from error
            if reason is not error:
                raise explain_lost_rank(reason) from error
            raise

    def collect_saved(self, wait: bool = False) -> list[tuple[int, Path]]:
        if self._pending is not None and (wait or self._pending.done()):
            self._wait_for_pending()
        if wait:
            self.world.wait()  # no rank exits before rank 0 has renamed the checkpoint
        return super().collect_saved()


def make_saver(run: Path, keep: int, world: World) -> Saver:
    """Make the saver for a run: one for a single process, or one for several ranks."""
    return Saver(run, keep) if world.is_single else ShardedSaver(run, keep, world)
