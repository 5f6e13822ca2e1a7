"""A captured step on the disk: everything needed to run it again, and no code.

step-00000007/
    capture.json         what was captured and why: step, recipe, accumulation, loss scale, versions, how to make the
                         task, size and SHA-256 of the other file
    state.safetensors    weights, buffers, FP8 scales, and for each microbatch its batch and the random states before
                         its forward: raw numbers, and in the header the JSON that says where each belongs (tree.py)

A capture is written to a hidden folder and renamed: it is whole or not there.
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
from narrowgauge.serialization import Taker, own, rebuild, write_tensors

FORMAT = 2
FACTS, STATE = "capture.json", "state.safetensors"
_NAMED = "__namedtuple__"
REQUESTED = ("it was requested", "it was asked for")
"""Reasons of captures that a user asked for; the second is in older captures."""


@dataclass(frozen=True)
class Capture:
    """A capture that was read back."""

    path: Path
    facts: dict[str, Any]
    """What capture.json says."""
    state: dict[str, Any]
    """model, buffers, tensor_scales, microbatches."""

    @property
    def step(self) -> int:
        return int(self.facts["step"])


def path_of(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}"


def captures_in(folder: Path) -> list[Path]:
    """The captures of a folder, earliest step first."""
    return sorted(path for path in folder.glob("step-*") if path.is_dir()) if folder.is_dir() else []


def write(path: Path, facts: Mapping[str, Any], state: Mapping[str, Any]) -> None:
    """Put a capture on the disk, whole or not at all."""
    temporary = path.with_name(f".{path.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        taker = Taker()
        tree = json.dumps(taker.take(dict(state)), allow_nan=False)
        write_tensors(taker.tensors, temporary / STATE, {"tree": tree})
        described = {"bytes": (temporary / STATE).stat().st_size, "sha256": _digest(temporary / STATE)}
        text = json.dumps({"format": FORMAT, **_plain(facts), STATE: described}, indent=1, allow_nan=False)
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
    """Read a capture, or the first one of a run or a folder of captures; what is wrong with it is said in one line."""
    path = _locate(path)
    try:
        facts = files.parse_json(files.read(path / FACTS))
    except UsageError as error:
        raise UsageError(f"{path} is no capture: {error}") from None
    except ValueError:
        raise UsageError(f"capture {path} is damaged: {FACTS} is not JSON; capture the step again") from None
    if isinstance(facts, dict) and facts.get("format") in (1, "1"):
        raise UsageError(f"capture {path} is in the old form, a pickle, which is not read any more; capture it again")
    if not isinstance(facts, dict) or not isinstance(facts.get(STATE), dict):
        raise UsageError(f"{path / FACTS} is not what narrowgauge writes; capture the step again")
    if facts.get("format") != FORMAT:
        raise UsageError(
            f"capture {path} has format {facts.get('format')}, this version reads {FORMAT}; replay it with the "
            "narrowgauge that wrote it, or capture the step again"
        )
    try:
        size = (path / STATE).stat().st_size
        if size != facts[STATE].get("bytes"):
            raise UsageError(f"capture {path} is damaged: {STATE} has {size} bytes, not {facts[STATE].get('bytes')}")
        if _digest(path / STATE) != facts[STATE].get("sha256"):
            raise UsageError(f"capture {path} is damaged: {STATE} does not match its SHA-256")
        with safe_open(path / STATE, "pt") as file:
            tensors = own({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
            state = rebuild(json.loads((file.metadata() or {})["tree"]), tensors)
        if not isinstance(state, dict):
            raise ValueError("it holds no state")
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
        found = captures_in(folder)
        if found:
            return found[0]
    if not files.exists(path):
        raise UsageError(f"there is no capture {path}; train writes them to RUN/captures")
    raise UsageError(f"{path} holds no capture; give a folder with {FACTS} in it, or a run that has captures")


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _plain(value: Any) -> Any:
    """The value with what JSON has no word for as text."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    return value if value is None or isinstance(value, bool | int | str) else str(value)


def pack(batch: Any) -> Any:
    """A batch as it is written without code: its tensors on the CPU, its containers plain."""
    if isinstance(batch, Tensor):
        held = batch.detach().cpu()
        if held.layout != torch.strided:
            return held
        # A slice of a large dataset must not keep all of it in memory until it is written.
        return held.clone() if held.untyped_storage().nbytes() > held.numel() * held.element_size() else held
    if batch is None or isinstance(batch, bool | int | float | str):
        return batch
    if isinstance(batch, Mapping):
        return {key: pack(item) for key, item in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return {_NAMED: type(batch).__name__, "fields": list(batch._fields), "items": [pack(item) for item in batch]}
    if isinstance(batch, list | tuple):
        return type(batch)(pack(item) for item in batch)
    raise TypeError(f"the batch holds a {type(batch).__name__}, which cannot be saved without code")


def unpack(packed: Any) -> Any:
    """The batch that was packed; named tuples get a class with the same fields."""
    if isinstance(packed, dict):
        if _NAMED in packed:
            items = [unpack(item) for item in packed["items"]]
            return namedtuple(packed[_NAMED], packed["fields"])(*items)
        return {key: unpack(item) for key, item in packed.items()}
    if isinstance(packed, list | tuple):
        return type(packed)(unpack(item) for item in packed)
    return packed


def tensors_in(batch: Any) -> list[tuple[str, Tensor]]:
    """The tensors of a batch, each with its place in it, such as [0] or ['mask']."""
    if isinstance(batch, Tensor):
        return [("", batch)]
    if isinstance(batch, Mapping):
        parts = [(f"[{key!r}]", item) for key, item in batch.items()]
    elif isinstance(batch, list | tuple):
        parts = [(f"[{index}]", item) for index, item in enumerate(batch)]
    else:
        return []
    return [(f"{place}{inner}", tensor) for place, item in parts for inner, tensor in tensors_in(item)]
