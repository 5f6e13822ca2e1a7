"""The tensors of a checkpoint that several ranks write and read together, by torch.distributed.checkpoint (shards.py).

Every rank writes its shards into a file of its own, while training goes on: the tensors are copied first. A rank reads
what belongs to its shards, on whatever number of ranks; one process reads tensors whole. Beside them lie state.json, as
in any checkpoint, and each rank's random generators, for as many ranks again.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import Tensor

from narrowgauge.engine import Engine
from narrowgauge.errors import UsageError
from narrowgauge.optim.sharded import is_sharded
from narrowgauge.serialization import Flattener, copy_tensors, unflatten, write_tensors

STATE = "state.json"
TABLE = "shards.json"
"""By which a manifest is known to be of several ranks."""
_MOMENT = re.compile(r"state/engine/optimizers/(\d+)/state/(\d+)/\w+")


class _Gatherer(Flattener):
    """Takes nests apart, leaving tensors as they are spread; copied, as training goes on while they are written."""

    def _store(self, tensor: Tensor, path: str) -> str:
        name = path
        while name in self.tensors:
            name += "'"
        self.tensors[name] = tensor.clone() if tensor.device.type == "cpu" else tensor
        return name


def take_apart(weights: Mapping[str, Any], state: Any) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """What state.json says, and the tensors by name."""
    model, rest = _Gatherer(), _Gatherer()
    content = {"weights": model.flatten(weights), "state": rest.flatten(state)}
    tensors = {f"weights/{name}": tensor for name, tensor in model.tensors.items()}
    return content, tensors | {f"state/{name}": tensor for name, tensor in rest.tensors.items()}


def write(folder: Path, tensors: dict[str, Tensor], group: dist.ProcessGroup | None) -> Future[Any]:
    """Begin to write; every rank calls it, and the result is there when all have written."""
    from torch.distributed.checkpoint.state_dict_saver import async_save

    from narrowgauge.runs.checkpoints.shard_storage import ShardWriter

    with _quiet():
        answer: Any = async_save(tensors, storage_writer=ShardWriter(folder), process_group=group)
    written: Future[Any] = getattr(answer, "upload_completion", answer)  # some torch tell staging and upload apart
    return written


def write_random(folder: Path, rank: int, random: Any) -> None:
    """A rank's random generators."""
    flattener = Flattener()
    tree = json.dumps(flattener.flatten(random))
    write_tensors(flattener.tensors, folder / f"random-{rank}.safetensors", {"tree": tree})


def read_random(folder: Path, rank: int, size: int) -> Any:
    """A rank's random generators, or None where the checkpoint was written by another number of ranks."""
    if len(list(folder.glob("random-*.safetensors"))) != size:
        return None
    path = folder / f"random-{rank}.safetensors"
    try:
        with safe_open(path, "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            return unflatten(json.loads((file.metadata() or {})["tree"]), copy_tensors(tensors))
    except (SafetensorError, OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise UsageError(f"{path} holds no random states ({error}); take an earlier checkpoint") from None


def read(path: Path, engine: Engine | None = None) -> tuple[dict[str, Any], Any]:
    """Weights and state: whole, or spread as the engine's parameters are."""
    from torch.distributed.checkpoint.state_dict_loader import load

    from narrowgauge.runs.checkpoints.shard_storage import ShardReader

    reader = ShardReader(path)
    like = _spread_as(engine) if engine is not None else lambda name: None
    kinds: dict[str, Any] = dict(reader.read_metadata().state_dict_metadata)
    tensors = {name: _empty(kind.size, kind.properties.dtype, like(name)) for name, kind in kinds.items()}
    try:
        with _quiet():
            load(tensors, storage_reader=reader, no_dist=True)
    except BaseException as error:
        raise cause(error) from error
    text = json.loads((path / STATE).read_text())
    parts = []
    for part in ("weights", "state"):
        mine = {name.removeprefix(f"{part}/"): t for name, t in tensors.items() if name.startswith(f"{part}/")}
        parts.append(unflatten(text[part], mine))
    return parts[0], parts[1]


def _spread_as(engine: Engine) -> Callable[[str], Tensor | None]:
    """Which parameter of the engine a saved tensor may be spread like."""
    named = dict(engine.inner.named_parameters(remove_duplicate=False))
    stepped = [[p for group in o.param_groups for p in group["params"]] for o in engine.optimizers]

    def like(name: str) -> Tensor | None:
        if name.startswith("weights/"):
            return named.get(name.removeprefix("weights/"))
        found = _MOMENT.fullmatch(name)
        own = stepped[int(found[1])] if found and int(found[1]) < len(stepped) else []
        return own[int(found[2])] if found and int(found[2]) < len(own) else None

    return like


def _empty(size: torch.Size, dtype: torch.dtype, like: Tensor | None) -> Tensor:
    if like is not None and is_sharded(like) and like.shape == size:
        return torch.empty_like(like, dtype=dtype, requires_grad=False)
    return torch.empty(size, dtype=dtype)


def cause(error: BaseException) -> BaseException:
    """What went wrong on the first rank that failed, where torch's checkpointing has wrapped it; else the error itself.

    Its CheckpointException is no Exception, so that nothing else would catch it.
    """
    failures = getattr(error, "failures", None)
    return next(iter(failures.values()))[0] if type(error).__name__ == "CheckpointException" and failures else error


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what torch's checkpointing warns of within itself."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
