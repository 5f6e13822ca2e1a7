"""Saves and loads the checkpoints of a run: atomically, verified by SHA-256, without pickle.

    checkpoints/step-00000100/
        weights.safetensors    the model's state dict, under its own names: opens in any tool
        state.safetensors      every other tensor (moments, random states), named by its path
        state.json             everything that is not a tensor, and where each tensor belongs
        manifest.json          size and SHA-256 of the other files

    save:           write a hidden folder, fsync each file and the folder, rename it, fsync the parent, remove old ones
    load_newest:    the newest checkpoint whose manifest verifies; each damaged one costs a line

Several ranks write a checkpoint together, as shards in place of the first two files (sharded.py). Any number of ranks
can load either form, and so can one process. The manifest names the form. A file that the manifest does not
list is never opened.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file

from narrowgauge.engine import Engine
from narrowgauge.errors import UsageError
from narrowgauge.runs import atomic_files
from narrowgauge.runs.checkpoints import sharded
from narrowgauge.runs.checkpoints.layout import (
    FILES,
    FORMAT,
    MANIFEST,
    PICKLED,
    SHARD_TABLE,
    STATE,
    TENSORS,
    WEIGHTS,
)
from narrowgauge.serialization import Flattener, copy_tensors, unflatten, write_tensors

_NAME = re.compile(r"step-(\d{8,})")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was loaded."""

    step: int
    path: Path
    weights: dict[str, Any]
    """The model's state dict."""
    state: Any
    """Everything else: optimizers, loss scale, counters, random generators."""


def make_path(run: Path, step: int) -> Path:
    """Return the checkpoint folder of a step."""
    return run / "checkpoints" / f"step-{step:08d}"


def list_steps(run: Path) -> list[int]:
    """List the steps that have a checkpoint folder, oldest first. Does not check that the checkpoints are complete."""
    folder = run / "checkpoints"
    names = [entry.name for entry in folder.iterdir()] if folder.is_dir() else []
    return sorted(int(match[1]) for name in names if (match := _NAME.fullmatch(name)))


def save(run: Path, step: int, weights: Mapping[str, Any], state: Any, keep: int = 3) -> Path:
    """Write the checkpoint of a step, then remove old ones. The caller must hold the lock of the run.

    Args:
        run: The run folder.
        step: The number of updates so far.
        weights: The model's state dict.
        state: Everything else: a nest of dictionaries, lists, tensors, numbers and text.
        keep: How many checkpoints to keep, this one included.

    Returns:
        The checkpoint folder.

    Raises:
        UsageError: A file cannot be written. Earlier checkpoints are intact.
    """
    with _stage(run, step, keep) as folder:
        model, rest = Flattener(), Flattener()
        text = dump_state(model.flatten(weights), rest.flatten(state))
        # "format": "pt" is what transformers and others look for in a file that torch wrote.
        write_tensors(model.tensors, folder / WEIGHTS, {"format": "pt", **model.aliases})
        write_tensors(rest.tensors, folder / TENSORS)
        (folder / STATE).write_text(text)
    return make_path(run, step)


def dump_state(weights: Any, state: Any) -> str:
    """Make the text of state.json from the trees that ``Flattener.flatten`` returned."""
    return json.dumps({"format": FORMAT, "weights": weights, "state": state}, allow_nan=False)


@contextlib.contextmanager
def _stage(run: Path, step: int, keep: int) -> Iterator[Path]:
    """Yield a hidden folder for the files of a checkpoint, and rename it when the block has written them all."""
    try:
        folder = create_hidden(run, step)
        yield folder
        commit(run, step, keep)
    except (OSError, SafetensorError) as error:
        _discard(_hidden_path(run, step))
        raise atomic_files.explain_error(make_path(run, step), error) from error


def create_hidden(run: Path, step: int) -> Path:
    """Create the hidden folder of a checkpoint, empty."""
    folder = _hidden_path(run, step)
    _clean(folder.parent)
    folder.mkdir(parents=True)
    return folder


def commit(run: Path, step: int, keep: int) -> None:
    """Sync the hidden folder to disk, write its manifest, rename it to its final name, and remove old checkpoints."""
    temporary, final = _hidden_path(run, step), make_path(run, step)
    described = {}
    for file in sorted(entry for entry in temporary.iterdir() if entry.is_file()):
        atomic_files.sync(file)
        described[file.name] = {"bytes": file.stat().st_size, "sha256": _hash_file(file)}
    manifest = temporary / MANIFEST
    manifest.write_text(json.dumps({"format": FORMAT, "step": step, "files": described}, indent=1))
    atomic_files.sync(manifest)
    atomic_files.sync(temporary)
    if final.exists():  # a damaged checkpoint that was skipped on resume, and is now written again
        final.rename(final.with_name(f".{final.name}.old"))
    temporary.rename(final)
    atomic_files.sync(final.parent)
    for old in [s for s in list_steps(run) if s <= step][: -max(1, keep)]:
        # Renamed first, so that a kill during the removal leaves no partial checkpoint under a valid name.
        hidden = make_path(run, old).with_name(f".{make_path(run, old).name}.old")
        with contextlib.suppress(OSError):
            make_path(run, old).rename(hidden)
    _clean(final.parent)


def _hidden_path(run: Path, step: int) -> Path:
    final = make_path(run, step)
    return final.with_name(f".{final.name}.tmp")


def _hash_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def find_damage(path: Path) -> str | None:
    """Verify a checkpoint folder against its manifest.

    Returns:
        What is wrong with it, or None if it is complete and intact.
    """
    try:
        manifest = _read_manifest(path)
        files = manifest["files"]
        if manifest["format"] != FORMAT:
            return f"its format is {manifest['format']}, this version reads {FORMAT}"
        if path.name != make_path(path, manifest["step"]).name:
            return f"{MANIFEST} is of step {manifest['step']}"
        for name in files if SHARD_TABLE in files else FILES:
            if Path(name).name != name:
                return f"{MANIFEST} lists {name}, which is not in the folder"
            status = (path / name).stat()
            if not stat.S_ISREG(status.st_mode):
                return f"{name} is not a file"
            if status.st_size != files[name]["bytes"]:
                return f"{name} has {status.st_size} bytes instead of {files[name]['bytes']}"
            if _hash_file(path / name) != files[name]["sha256"]:
                return f"{name} does not match its SHA-256"
    except OSError as error:
        return f"{Path(error.filename or path).name}: {os.strerror(error.errno or 0)}"
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return f"{MANIFEST} is not readable"
    return None


def _read_manifest(path: Path) -> dict[str, Any]:
    file = path / MANIFEST
    if file.exists() and not file.is_file():  # reading a device or a pipe might never end
        raise ValueError(f"{MANIFEST} is not a file")
    manifest: dict[str, Any] = json.loads(file.read_text())
    return manifest


def refuse_pickle(path: Path) -> None:
    """Refuse a sharded checkpoint of an earlier version, whose table of contents is a pickle."""
    try:
        old = PICKLED in _read_manifest(path)["files"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return  # damaged: find_damage reports it
    if old:
        raise UsageError(
            f"checkpoint {path} has the old multi-rank format, whose {PICKLED} is a pickle and could run code; "
            "if you trust its author, finish the run with the version in its run.json, or convert the tensors: "
            f"python -m torch.distributed.checkpoint.format_utils dcp_to_torch {path} weights.pt"
        )


def load(path: Path) -> Checkpoint:
    """Verify and read one checkpoint.

    Args:
        path: The checkpoint folder.

    Returns:
        The checkpoint, with whole tensors on the CPU.

    Raises:
        UsageError: The checkpoint is damaged, or has the old format with a pickle.
    """
    verify(path)
    return read(path)


def verify(path: Path) -> None:
    """Refuse a checkpoint that is damaged, or has the old format with a pickle.

    Raises:
        UsageError: It is one of these.
    """
    refuse_pickle(path)
    wrong = find_damage(path)
    if wrong:
        raise UsageError(f"checkpoint {path} is damaged: {wrong}; use an earlier one")


def read_step(path: Path) -> int:
    """Read the step of a checkpoint from its manifest."""
    return int(_read_manifest(path)["step"])


def is_sharded(path: Path) -> bool:
    """Whether several ranks wrote it, according to its manifest: anyone may put another file into the folder."""
    return SHARD_TABLE in _read_manifest(path)["files"]


def read(path: Path, engine: Engine | None = None) -> Checkpoint:
    """Read a checkpoint that was verified.

    Args:
        path: The checkpoint folder.
        engine: If given, the tensors of a sharded checkpoint are sharded like the parameters of this engine. Each rank
            then reads only its own shards.

    Returns:
        The checkpoint.

    Raises:
        UsageError: The files do not have the expected content.
    """
    refuse_pickle(path)
    try:
        if is_sharded(path):
            return Checkpoint(read_step(path), path, *sharded.read(path, engine))
        text = json.loads((path / STATE).read_text())
        weights = unflatten(text["weights"], copy_tensors(load_file(path / WEIGHTS)))
        state = unflatten(text["state"], copy_tensors(load_file(path / TENSORS)))
        return Checkpoint(read_step(path), path, weights, state)
    except UsageError:
        raise
    except (SafetensorError, OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        reason = f"{type(error).__name__}: {error}".strip().splitlines()[0][:200]
        raise UsageError(f"checkpoint {path} was not written by narrowgauge ({reason}); use an earlier one") from error


def load_newest(run: Path, notify: Callable[[str], None] = lambda line: None) -> Checkpoint | None:
    """Load the newest checkpoint that verifies. See ``find_newest``."""
    path = find_newest(run, notify)
    return None if path is None else read(path)


def find_newest(run: Path, notify: Callable[[str], None] = lambda line: None) -> Path | None:
    """Find the newest checkpoint that verifies. Damaged ones are reported and kept.

    Args:
        run: The run folder.
        notify: Called with a line for each damaged checkpoint.

    Returns:
        The checkpoint folder, or None if the run has no checkpoints.

    Raises:
        UsageError: Every checkpoint is damaged.
    """
    steps = list_steps(run)
    for step in reversed(steps):
        path = make_path(run, step)
        refuse_pickle(path)
        wrong = find_damage(path)
        if wrong is None:
            return path
        notify(f"checkpoint {path} is damaged ({wrong}); looking for an earlier one")
    if steps:
        raise UsageError(
            f"run {run} has no intact checkpoint left ({len(steps)} damaged); start a new run with another --out"
        )
    return None


def clean(run: Path) -> None:
    """Remove what interrupted writes left behind. The caller must hold the lock of the run."""
    _clean(run / "checkpoints")


def _clean(folder: Path) -> None:
    for leftover in folder.glob(".step-*") if folder.is_dir() else ():
        _discard(leftover)


def _discard(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)
