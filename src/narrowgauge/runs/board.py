"""TensorBoard beside the record: the same numbers, for who likes to watch them there. Nothing depends on it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any


class Board:
    """Writes scalars for TensorBoard; where it is missing or fails, says so in one line and goes on without."""

    def __init__(self, folder: Path, first_step: int, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._writer: Any = None
        try:
            from torch.utils.tensorboard.writer import SummaryWriter
        except ImportError:
            tell("TensorBoard is not installed: its files are not written (events.jsonl holds the same numbers)")
            return
        with _Guard(self):
            # What an earlier life wrote after the checkpoint it is resumed from is purged when TensorBoard reads it.
            purge = first_step if first_step > 1 else None
            self._writer = SummaryWriter(str(folder / "tensorboard"), purge_step=purge)

    def add(self, group: str, step: int, values: Mapping[str, float]) -> None:
        if self._writer is not None:
            with _Guard(self):
                for name, value in values.items():
                    self._writer.add_scalar(f"{group}/{name}", value, step)

    def text(self, name: str, step: int, text: str) -> None:
        if self._writer is not None:
            with _Guard(self):
                self._writer.add_text(name, text, step)

    def flush(self) -> None:
        if self._writer is not None:
            with _Guard(self):
                self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            with _Guard(self):
                self._writer.close()
            self._writer = None

    def give_up(self, error: OSError) -> None:
        self._writer = None
        self._tell(f"TensorBoard's files cannot be written ({error.strerror or error}); going on without them")


class _Guard:
    """Lets a full disk cost the board alone."""

    def __init__(self, board: Board) -> None:
        self._board = board

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool:
        if isinstance(error, OSError):
            self._board.give_up(error)
            return True
        return False
