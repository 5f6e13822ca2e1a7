"""Checkpoints of a run: whole or not there at all, checked by SHA-256, and without pickle.

checkpoints/step-00000100/
    weights.safetensors    the model's state dict, under its own names: opens anywhere
    state.safetensors      every other tensor (moments, random states), named by its path
    state.json             everything that is not a tensor, and where each tensor belongs
    manifest.json          size and SHA-256 of the other three

save:           write a hidden folder, fsync each file and the folder, rename it, fsync the parent, prune old ones
newest_whole:   from the newest on, the first whose manifest verifies; a damaged one costs a line
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from narrowgauge.errors import UsageError
from narrowgauge.runs import disk
from narrowgauge.runs.tree import Taker, own, rebuild

FORMAT = 1
FILES = ("weights.safetensors", "state.safetensors", "state.json")
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
    final = path_of(run, step)
    temporary = final.with_name(f".{final.name}.tmp")
    try:
        _clean(final.parent)
        temporary.mkdir(parents=True)
        _write(temporary, step, weights, state)
        if final.exists():  # a damaged one that was passed over, and is now made again
            final.rename(final.with_name(f".{final.name}.old"))
        temporary.rename(final)
        disk.sync(final.parent)
    except (OSError, SafetensorError) as error:
        _discard(temporary)
        raise disk.refuse(final, error) from error
    for old in [s for s in steps_of(run) if s <= step][: -max(1, keep)]:
        # Renamed first, so that a kill in the middle of the removal leaves no half checkpoint under a good name.
        hidden = path_of(run, old).with_name(f".{path_of(run, old).name}.old")
        with contextlib.suppress(OSError):
            path_of(run, old).rename(hidden)
    _clean(final.parent)
    return final


def _write(folder: Path, step: int, weights: Mapping[str, Any], state: Any) -> None:
    model, rest = Taker(), Taker()
    text = json.dumps({"format": FORMAT, "weights": model.take(weights), "state": rest.take(state)}, allow_nan=False)
    # "format": "pt" is what transformers and others look for in a file that torch wrote.
    save_file(model.tensors, folder / FILES[0], {"format": "pt", **model.aliases})
    save_file(rest.tensors, folder / FILES[1])
    (folder / FILES[2]).write_text(text)
    mode = (folder / FILES[2]).stat().st_mode
    for name in FILES[:2]:
        (folder / name).chmod(mode)  # safetensors writes for the owner alone, whatever the umask says
    described = {}
    for name in FILES:
        disk.sync(folder / name)
        described[name] = {"bytes": (folder / name).stat().st_size, "sha256": _digest(folder / name)}
    manifest = folder / "manifest.json"
    manifest.write_text(json.dumps({"format": FORMAT, "step": step, "files": described}, indent=1))
    disk.sync(manifest)
    disk.sync(folder)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def damage(path: Path) -> str | None:
    """What is wrong with a checkpoint folder, or None where it is whole."""
    try:
        manifest = json.loads((path / "manifest.json").read_text())
        files = manifest["files"]
        if manifest["format"] != FORMAT:
            return f"its format is {manifest['format']}, this version reads {FORMAT}"
        if path.name != path_of(path, manifest["step"]).name:
            return f"manifest.json is of step {manifest['step']}"
        for name in FILES:
            size = (path / name).stat().st_size
            if size != files[name]["bytes"]:
                return f"{name} has {size} bytes instead of {files[name]['bytes']}"
            if _digest(path / name) != files[name]["sha256"]:
                return f"{name} does not match its SHA-256"
    except OSError as error:
        return f"{Path(error.filename or path).name}: {os.strerror(error.errno or 0)}"
    except (ValueError, KeyError, TypeError):
        return "manifest.json is not readable"
    return None


def load(path: Path) -> Checkpoint:
    """Read one checkpoint, refusing a damaged one."""
    wrong = damage(path)
    if wrong:
        raise UsageError(f"checkpoint {path} is damaged: {wrong}; take an earlier one")
    return _read(path)


def _read(path: Path) -> Checkpoint:
    text = json.loads((path / FILES[2]).read_text())
    weights = rebuild(text["weights"], own(load_file(path / FILES[0])))
    state = rebuild(text["state"], own(load_file(path / FILES[1])))
    return Checkpoint(json.loads((path / "manifest.json").read_text())["step"], path, weights, state)


def newest_whole(run: Path, tell: Callable[[str], None] = lambda line: None) -> Checkpoint | None:
    """The newest checkpoint that verifies, or None where there never was one. Damaged ones are told of, and kept."""
    steps = steps_of(run)
    for step in reversed(steps):
        path = path_of(run, step)
        wrong = damage(path)
        if wrong is None:
            return _read(path)
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
