"""Reads and writes captured steps: everything needed to run a step again, and no code.

step-00000007/
    capture.json         what was captured and why: step, recipe, accumulation, loss scale, versions, how to create
                         the task, size and SHA-256 of the other file
    state.safetensors    weights, buffers, FP8 scales, and for each microbatch its batch and the random states before
                         its forward; the header has the structure as JSON (serialization.py)

A capture is written to a hidden folder and then renamed, so it is complete or absent.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
from collections import namedtuple
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from narrowgauge import files
from narrowgauge.errors import UsageError
from narrowgauge.serialization import Flattener, copy_tensors, unflatten, write_tensors

FORMAT = 2
FACTS, STATE = "capture.json", "state.safetensors"
_NAMED = "__namedtuple__"
REQUESTED = ("it was requested", "it was asked for")
"""Reasons of captures that a user asked for; the second is in older captures."""


@dataclass(frozen=True)
class Capture:
    """A capture that was read from disk."""

    path: Path
    facts: dict[str, Any]
    """The contents of capture.json."""
    state: dict[str, Any]
    """Keys: model, buffers, tensor_scales, microbatches."""

    @property
    def step(self) -> int:
        """Number of the step, counted from 1."""
        return int(self.facts["step"])


def make_path(folder: Path, step: int) -> Path:
    """Return the path of a step's capture."""
    return folder / f"step-{step:08d}"


def list_captures(folder: Path) -> list[Path]:
    """Return the captures in a folder, earliest step first."""
    return sorted(path for path in folder.glob("step-*") if path.is_dir()) if folder.is_dir() else []


def write(path: Path, facts: Mapping[str, Any], state: Mapping[str, Any]) -> None:
    """Write a capture atomically.

    Args:
        path: Folder of the capture.
        facts: What goes into capture.json.
        state: What goes into state.safetensors.

    Raises:
        OSError: The disk is full or not writable.
        TypeError: The state has objects that cannot be saved.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        flattener = Flattener()
        tree = json.dumps(flattener.flatten(dict(state)), allow_nan=False)
        write_tensors(flattener.tensors, temporary / STATE, {"tree": tree})
        described = {"bytes": (temporary / STATE).stat().st_size, "sha256": _compute_digest(temporary / STATE)}
        text = json.dumps({"format": FORMAT, **_to_json(facts), STATE: described}, indent=1, allow_nan=False)
        (temporary / FACTS).write_text(text)
        for name in (STATE, FACTS):
            descriptor = os.open(temporary / name, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)
        temporary.rename(path)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def read(path: Path) -> Capture:
    """Read a capture.

    Args:
        path: A capture, a folder of captures, or a run; for the latter two, the first capture is read.

    Raises:
        UsageError: There is no capture, or it is damaged or of another version. The message is one line.
    """
    path = _locate(path)
    try:
        facts = files.parse_json(files.read(path / FACTS))
    except UsageError as error:
        raise UsageError(f"{path} is not a capture: {error}") from None
    except ValueError:
        raise UsageError(f"capture {path} is damaged: {FACTS} is not JSON; capture the step again") from None
    if isinstance(facts, dict) and facts.get("format") in (1, "1"):
        raise UsageError(
            f"capture {path} has the old pickle format, which is no longer supported; capture the step again"
        )
    if not isinstance(facts, dict) or not isinstance(facts.get(STATE), dict):
        raise UsageError(f"{path / FACTS} was not written by narrowgauge; capture the step again")
    if facts.get("format") != FORMAT:
        raise UsageError(
            f"capture {path} has format {facts.get('format')}, this version reads {FORMAT}; replay it with the "
            "narrowgauge that wrote it, or capture the step again"
        )
    try:
        size = (path / STATE).stat().st_size
        if size != facts[STATE].get("bytes"):
            raise UsageError(f"capture {path} is damaged: {STATE} has {size} bytes, not {facts[STATE].get('bytes')}")
        if _compute_digest(path / STATE) != facts[STATE].get("sha256"):
            raise UsageError(f"capture {path} is damaged: {STATE} does not match its SHA-256")
        with safe_open(path / STATE, "pt") as file:
            tensors = copy_tensors({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
            state = unflatten(json.loads((file.metadata() or {})["tree"]), tensors)
        if not isinstance(state, dict):
            raise ValueError("it has no state")
    except OSError as error:
        raise UsageError(f"capture {path} is damaged: {STATE} cannot be read ({error.strerror})") from None
    except UsageError:
        raise
    except (SafetensorError, RuntimeError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = f"{type(error).__name__}: {error}".strip().splitlines()[0][:200]
        raise UsageError(f"capture {path} is damaged: {STATE} does not load ({reason})") from None
    return Capture(path, facts, state)


def _locate(path: Path) -> Path:
    if files.exists(path / FACTS):
        return path
    for folder in (path / "captures", path):
        found = list_captures(folder)
        if found:
            return found[0]
    if not files.exists(path):
        raise UsageError(f"there is no capture {path}; train writes captures to RUN/captures")
    raise UsageError(f"{path} has no capture; give a folder with {FACTS} in it, or a run that has captures")


def _compute_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _to_json(value: Any) -> Any:
    """Convert a value for JSON; what JSON cannot represent becomes a string."""
    if isinstance(value, Mapping):
        return {str(key): _to_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_to_json(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    return value if value is None or isinstance(value, bool | int | str) else str(value)


def pack(batch: Any) -> Any:
    """Convert a batch for saving: tensors on the CPU in plain containers.

    Raises:
        TypeError: The batch has an object that cannot be saved without code.
    """
    if isinstance(batch, Tensor):
        held = batch.detach().cpu()
        if held.layout != torch.strided:
            return held
        # A slice must not keep the memory of a whole dataset alive until it is written.
        return held.clone() if held.untyped_storage().nbytes() > held.numel() * held.element_size() else held
    if batch is None or isinstance(batch, bool | int | float | str):
        return batch
    if isinstance(batch, Mapping):
        return {key: pack(item) for key, item in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return {_NAMED: type(batch).__name__, "fields": list(batch._fields), "items": [pack(item) for item in batch]}
    if isinstance(batch, list | tuple):
        return type(batch)(pack(item) for item in batch)
    raise TypeError(f"the batch contains a {type(batch).__name__}, which cannot be saved without code")


def unpack(packed: Any) -> Any:
    """Restore a batch that was packed; named tuples get a new class with the same fields."""
    if isinstance(packed, dict):
        if _NAMED in packed:
            items = [unpack(item) for item in packed["items"]]
            return namedtuple(packed[_NAMED], packed["fields"])(*items)
        return {key: unpack(item) for key, item in packed.items()}
    if isinstance(packed, list | tuple):
        return type(packed)(unpack(item) for item in packed)
    return packed


def list_tensors(batch: Any) -> list[tuple[str, Tensor]]:
    """Return the tensors of a batch, each with its path in it, such as [0] or ['mask']."""
    if isinstance(batch, Tensor):
        return [("", batch)]
    if isinstance(batch, Mapping):
        parts = [(f"[{key!r}]", item) for key, item in batch.items()]
    elif isinstance(batch, list | tuple):
        parts = [(f"[{index}]", item) for index, item in enumerate(batch)]
    else:
        return []
    return [(f"{place}{inner}", tensor) for place, item in parts for inner, tensor in list_tensors(item)]
