"""Checkpoints of a run: whole or not there at all, checked by SHA-256, and without pickle.

checkpoints/step-00000100/
    weights.safetensors    the model's state dict, under its own names: opens anywhere
    state.safetensors      every other tensor (moments, random states), named by its path
    state.json             everything that is not a tensor, and where each tensor belongs
    manifest.json          size and SHA-256 of the other files

save:           write a hidden folder, fsync each file and the folder, rename it, fsync the parent, prune old ones
newest_whole:   from the newest on, the first whose manifest verifies; a damaged one costs a line

Several ranks write one together, as shards instead of the first two (ranked.py); either kind is read by any number of
ranks, and by one process. Which kind it is, the manifest says; what it does not name is never opened.
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
from narrowgauge.serialization import Flattener, copy_tensors, unflatten, write_tensors

FORMAT = 1
FILES = ("weights.safetensors", "state.safetensors", "state.json")
PICKLED = ".metadata"
"""The table of contents of torch's own storage, which earlier versions wrote for several ranks."""
_NAME = re.compile(r"step-(\d{8,})")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was read back."""

    step: int
    path: Path
    weights: dict[str, Any]
    state: Any


def path_of(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step-{step:08d}"


def steps_of(run: Path) -> list[int]:
    """The steps that have a checkpoint folder, oldest first; whether each is whole is not looked at."""
    folder = run / "checkpoints"
    names = [entry.name for entry in folder.iterdir()] if folder.is_dir() else []
    return sorted(int(match[1]) for name in names if (match := _NAME.fullmatch(name)))


def save(run: Path, step: int, weights: Mapping[str, Any], state: Any, keep: int = 3) -> Path:
    """Write the checkpoint of a step, then remove all but the ``keep`` newest up to it. Only for who holds the lock."""
    with writing(run, step, keep) as folder:
        model, rest = Flattener(), Flattener()
        text = dump({"weights": model.flatten(weights), "state": rest.flatten(state)})
        # "format": "pt" is what transformers and others look for in a file that torch wrote.
        write_tensors(model.tensors, folder / FILES[0], {"format": "pt", **model.aliases})
        write_tensors(rest.tensors, folder / FILES[1])
        (folder / FILES[2]).write_text(text)
    return path_of(run, step)


def dump(content: Mapping[str, Any]) -> str:
    """The text of state.json."""
    return json.dumps({"format": FORMAT, **content}, allow_nan=False)


@contextlib.contextmanager
def writing(run: Path, step: int, keep: int) -> Iterator[Path]:
    """A hidden folder to write a checkpoint's files into, which takes its name once the block has left them all."""
    try:
        folder = begin(run, step)
        yield folder
        commit(run, step, keep)
    except (OSError, SafetensorError) as error:
        _discard(_hidden(run, step))
        raise atomic_files.refuse(path_of(run, step), error) from error


def begin(run: Path, step: int) -> Path:
    """The hidden folder of a checkpoint, empty."""
    folder = _hidden(run, step)
    _clean(folder.parent)
    folder.mkdir(parents=True)
    return folder


def commit(run: Path, step: int, keep: int) -> None:
    """Put the hidden folder on the disk, describe it in its manifest, give it its name, and prune what is older."""
    temporary, final = _hidden(run, step), path_of(run, step)
    described = {}
    for file in sorted(entry for entry in temporary.iterdir() if entry.is_file()):
        atomic_files.sync(file)
        described[file.name] = {"bytes": file.stat().st_size, "sha256": _digest(file)}
    manifest = temporary / "manifest.json"
    manifest.write_text(json.dumps({"format": FORMAT, "step": step, "files": described}, indent=1))
    atomic_files.sync(manifest)
    atomic_files.sync(temporary)
    if final.exists():  # a damaged one that was passed over, and is now made again
        final.rename(final.with_name(f".{final.name}.old"))
    temporary.rename(final)
    atomic_files.sync(final.parent)
    for old in [s for s in steps_of(run) if s <= step][: -max(1, keep)]:
        # Renamed first, so that a kill in the middle of the removal leaves no half checkpoint under a good name.
        hidden = path_of(run, old).with_name(f".{path_of(run, old).name}.old")
        with contextlib.suppress(OSError):
            path_of(run, old).rename(hidden)
    _clean(final.parent)


def _hidden(run: Path, step: int) -> Path:
    final = path_of(run, step)
    return final.with_name(f".{final.name}.tmp")


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def damage(path: Path) -> str | None:
    """What is wrong with a checkpoint folder, or None where it is whole."""
    try:
        manifest = _manifest(path)
        files = manifest["files"]
        if manifest["format"] != FORMAT:
            return f"its format is {manifest['format']}, this version reads {FORMAT}"
        if path.name != path_of(path, manifest["step"]).name:
            return f"manifest.json is of step {manifest['step']}"
        for name in files if sharded.TABLE in files else FILES:
            if Path(name).name != name:
                return f"manifest.json names {name}, which is not in the folder"
            status = (path / name).stat()
            if not stat.S_ISREG(status.st_mode):
                return f"{name} is not a file"
            if status.st_size != files[name]["bytes"]:
                return f"{name} has {status.st_size} bytes instead of {files[name]['bytes']}"
            if _digest(path / name) != files[name]["sha256"]:
                return f"{name} does not match its SHA-256"
    except OSError as error:
        return f"{Path(error.filename or path).name}: {os.strerror(error.errno or 0)}"
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return "manifest.json is not readable"
    return None


def _manifest(path: Path) -> dict[str, Any]:
    file = path / "manifest.json"
    if file.exists() and not file.is_file():  # a device or a pipe could be read without end
        raise ValueError("manifest.json is not a file")
    manifest: dict[str, Any] = json.loads(file.read_text())
    return manifest


def refuse_pickle(path: Path) -> None:
    """Refuse what several ranks wrote with an earlier version: its table of contents is a pickle."""
    try:
        old = PICKLED in _manifest(path)["files"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return  # damaged, which is said elsewhere
    if old:
        raise UsageError(
            f"checkpoint {path} is in the old form of several ranks, whose {PICKLED} is a pickle and could run code; "
            "if you trust who wrote it, finish the run with the version in its run.json, or convert the tensors: "
            f"python -m torch.distributed.checkpoint.format_utils dcp_to_torch {path} weights.pt"
        )


def load(path: Path) -> Checkpoint:
    """Read one checkpoint, refusing a damaged one."""
    refuse_pickle(path)
    wrong = damage(path)
    if wrong:
        raise UsageError(f"checkpoint {path} is damaged: {wrong}; take an earlier one")
    return read(path)


def step_of(path: Path) -> int:
    """The step that a checkpoint folder is of."""
    return int(_manifest(path)["step"])


def is_ranked(path: Path) -> bool:
    """Whether several ranks wrote it; by its manifest, as anybody may put a file beside it."""
    return sharded.TABLE in _manifest(path)["files"]


def read(path: Path, engine: Engine | None = None) -> Checkpoint:
    """Read one that is whole; what ranks have written is spread as the parameters of ``engine`` are."""
    refuse_pickle(path)
    try:
        if is_ranked(path):
            return Checkpoint(step_of(path), path, *sharded.read(path, engine))
        text = json.loads((path / FILES[2]).read_text())
        weights = unflatten(text["weights"], copy_tensors(load_file(path / FILES[0])))
        state = unflatten(text["state"], copy_tensors(load_file(path / FILES[1])))
        return Checkpoint(step_of(path), path, weights, state)
    except UsageError:
        raise
    except (SafetensorError, OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        reason = f"{type(error).__name__}: {error}".strip().splitlines()[0][:200]
        raise UsageError(f"checkpoint {path} is not what narrowgauge writes ({reason}); take an earlier one") from error


def newest_whole(run: Path, tell: Callable[[str], None] = lambda line: None) -> Checkpoint | None:
    """The newest checkpoint that verifies, or None where there never was one. Damaged ones are told of, and kept."""
    path = newest_path(run, tell)
    return None if path is None else read(path)


def newest_path(run: Path, tell: Callable[[str], None] = lambda line: None) -> Path | None:
    """Where that checkpoint is."""
    steps = steps_of(run)
    for step in reversed(steps):
        path = path_of(run, step)
        refuse_pickle(path)
        wrong = damage(path)
        if wrong is None:
            return path
        tell(f"checkpoint {path} is damaged ({wrong}); looking for an earlier one")
    if steps:
        raise UsageError(
            f"run {run} has no whole checkpoint left ({len(steps)} damaged); train anew with another --out"
        )
    return None


def clean(run: Path) -> None:
    """Remove what interrupted writes left behind. Only for who holds the run's lock."""
    _clean(run / "checkpoints")


def _clean(folder: Path) -> None:
    for leftover in folder.glob(".step-*") if folder.is_dir() else ():
        _discard(leftover)


def _discard(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)
