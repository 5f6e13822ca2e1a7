"""Writes and reads the tensors of a sharded checkpoint, by torch.distributed.checkpoint (shard_storage.py).

Every rank copies its shards, and a thread writes them to the rank's own file while training continues. The checkpoint
can be read by any number of ranks: each reads the parts of its own shards, and a single process reads whole tensors.
state.json is as in any checkpoint. The random generators of each rank are saved too; they fit the same number of ranks.
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
from narrowgauge.parameters import is_sharded
from narrowgauge.runs.checkpoints.layout import STATE
from narrowgauge.serialization import Flattener, copy_tensors, unflatten, write_tensors

_MOMENT = re.compile(r"state/engine/optimizers/(\d+)/state/(\d+)/\w+")


class _ShardCopier(Flattener):
    """Collects the tensors of a nest without gathering their shards. Copies them, since training changes them."""

    def _store(self, tensor: Tensor, path: str) -> str:
        name = path
        while name in self.tensors:
            name += "'"
        self.tensors[name] = tensor.clone() if tensor.device.type == "cpu" else tensor
        return name


def split_tensors(weights: Mapping[str, Any], state: Any) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Split a checkpoint into the trees for state.json (``weights`` and ``state``) and the tensors by name."""
    model, rest = _ShardCopier(), _ShardCopier()
    trees = {"weights": model.flatten(weights), "state": rest.flatten(state)}
    tensors = {f"weights/{name}": tensor for name, tensor in model.tensors.items()}
    return trees, tensors | {f"state/{name}": tensor for name, tensor in rest.tensors.items()}


def write(folder: Path, tensors: dict[str, Tensor], group: dist.ProcessGroup | None) -> Future[Any]:
    """Start writing. Every rank must call it; the future completes when all ranks have written."""
    from torch.distributed.checkpoint.state_dict_saver import async_save

    from narrowgauge.runs.checkpoints.shard_storage import ShardWriter

    with _quiet():
        answer: Any = async_save(tensors, storage_writer=ShardWriter(folder), process_group=group)
    # Some versions of torch return two futures, one for staging and one for the upload.
    written: Future[Any] = getattr(answer, "upload_completion", answer)
    return written


def write_random(folder: Path, rank: int, random: Any) -> None:
    """Write the states of a rank's random generators."""
    flattener = Flattener()
    tree = json.dumps(flattener.flatten(random))
    write_tensors(flattener.tensors, folder / f"random-{rank}.safetensors", {"tree": tree})


def read_random(folder: Path, rank: int, size: int) -> Any:
    """Read the states of a rank's random generators. None: another number of ranks wrote the checkpoint."""
    if len(list(folder.glob("random-*.safetensors"))) != size:
        return None
    path = folder / f"random-{rank}.safetensors"
    try:
        with safe_open(path, "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            return unflatten(json.loads((file.metadata() or {})["tree"]), copy_tensors(tensors))
    except (SafetensorError, OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise UsageError(f"{path} holds no random states ({error}); use an earlier checkpoint") from None


def read(path: Path, engine: Engine | None = None) -> tuple[dict[str, Any], Any]:
    """Read weights and state: whole tensors, or sharded like the parameters of ``engine``."""
    from torch.distributed.checkpoint.state_dict_loader import load

    from narrowgauge.runs.checkpoints.shard_storage import ShardReader

    reader = ShardReader(path)
    like = _match_parameters(engine) if engine is not None else lambda name: None
    kinds: dict[str, Any] = dict(reader.read_metadata().state_dict_metadata)
    tensors = {name: _empty(kind.size, kind.properties.dtype, like(name)) for name, kind in kinds.items()}
    try:
        with _quiet():
            load(tensors, storage_reader=reader, no_dist=True)
    except BaseException as error:
        raise unwrap_error(error) from error
    text = json.loads((path / STATE).read_text())
    parts = []
    for part in ("weights", "state"):
        mine = {name.removeprefix(f"{part}/"): t for name, t in tensors.items() if name.startswith(f"{part}/")}
        parts.append(unflatten(text[part], mine))
    return parts[0], parts[1]


def _match_parameters(engine: Engine) -> Callable[[str], Tensor | None]:
    """Return a function that maps the name of a saved tensor to the parameter whose sharding it has."""
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


def unwrap_error(error: BaseException) -> BaseException:
    """Return the error of the first rank that failed, out of torch's CheckpointException; else the error itself.

    CheckpointException is not an Exception, so ``except Exception`` does not catch it.
    """
    failures = getattr(error, "failures", None)
    return next(iter(failures.values()))[0] if type(error).__name__ == "CheckpointException" and failures else error


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress the warnings that torch's checkpointing raises about its own code."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
