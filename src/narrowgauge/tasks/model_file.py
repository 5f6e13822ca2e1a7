"""A model class in a Python file of the user's, such as nanoGPT's ``model.py:GPT``, with random tokens and targets.

The class takes the fields of ``--config`` as arguments, or one configuration object: then its class is the annotation
of that parameter, or is named after the model (``GPT``: ``GPTConfig``). ``forward(tokens, targets)`` returns a loss,
alone or beside logits. Tokens are below ``vocab_size``, and rows have up to ``block_size`` of them (or another
usual name).
"""

from __future__ import annotations

import contextlib
import inspect
import sys
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from narrowgauge.errors import UsageError, one_line
from narrowgauge.task import find_line, load_function
from narrowgauge.tasks.model_inputs import Inputs, draw_tokens

LENGTHS = ("block_size", "max_position_embeddings", "max_seq_len", "seq_len", "context", "context_length", "n_ctx")
"""Names of the largest number of tokens in a row."""


@dataclass(frozen=True)
class FileModel:
    """A class of a user's file with its configuration."""

    option: str
    name: str
    make: Callable[[], nn.Module]
    sizes: Mapping[str, Any]
    """The fields of its configuration, with their defaults."""


def find_model(spec: str, fields: Mapping[str, Any]) -> FileModel:
    """Run the file and find the class.

    Args:
        spec: ``file.py:Class``.
        fields: Fields of the configuration.

    Raises:
        UsageError: There is no such file or class, or the class does not take these fields.
    """
    cls: Any = load_function(spec, "--model", "class")
    option = f"--model {spec}"
    if not isinstance(cls, type) or not issubclass(cls, nn.Module):
        raise UsageError(f"{option}: {spec.rpartition(':')[2]} is not a class of nn.Module")
    parameters = _list_parameters(cls)
    required = [name for name, one in parameters.items() if one.default is one.empty]
    maker = _find_config_class(cls, required[0]) if len(required) == 1 and required[0] not in fields else None
    taken = parameters if maker is None else _list_parameters(maker)
    sizes = {name: one.default for name, one in taken.items() if one.default is not one.empty} | dict(fields)
    for name in fields:
        if name not in taken:
            raise UsageError(f"--config: {(maker or cls).__name__} has no field {name!r}; it has {', '.join(taken)}")
    missing = [name for name in taken if name not in sizes]
    if missing:
        raise UsageError(f"{option} needs {', '.join(missing)}: give it with --config '{{...}}'")

    def make() -> nn.Module:
        with contextlib.redirect_stdout(sys.stderr):  # stdout is for results, and nanoGPT prints its size
            try:
                made: nn.Module = cls(**fields) if maker is None else cls(maker(**fields))
            except Exception as error:
                raise UsageError(f"{option} cannot be made: {describe_error(error, spec)}; check --config") from error
        return made.to(torch.get_default_device()).train()  # also what the class made on the CPU

    return FileModel(option, cls.__name__, make, sizes)


def make_inputs(model: FileModel, context: int | None, small: bool) -> Inputs:
    """Return how to make batches: random tokens, and the next token of each as its target."""
    vocab = model.sizes.get("vocab_size")
    limit = next((model.sizes[name] for name in LENGTHS if isinstance(model.sizes.get(name), int)), None)
    if not isinstance(vocab, int) or vocab < 2:
        raise UsageError(f"{model.option}: its configuration has no vocab_size, which tokens need; write a task")
    length = context or min(128 if small else 2048, limit or 2048)
    if length < 2 or (limit is not None and length > limit):
        raise UsageError(f"--context {length}: {model.option} takes 2 to {limit or 'any number of'} tokens")

    def make(rows: int, seed: int) -> dict[str, Tensor]:
        tokens = draw_tokens((rows, length + 1), vocab, None, torch.Generator().manual_seed(seed))
        return {"tokens": tokens[:, :-1].contiguous(), "targets": tokens[:, 1:].contiguous()}

    return Inputs(make, "token", length, True)


def compute_loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Return the loss among what the model returns for tokens and targets."""
    output: Any = model(batch["tokens"], batch["targets"])
    values = output if isinstance(output, tuple | list) else [getattr(output, "loss", output)]
    losses = [value for value in values if isinstance(value, Tensor) and value.numel() == 1]
    if len(losses) != 1:
        raise UsageError(f"forward(tokens, targets) of {type(model).__name__} must return one loss; write a task")
    return losses[0]


def describe_error(error: BaseException, spec: str) -> str:
    """Return an error of a user's model, with the line of its file."""
    return one_line(f"{type(error).__name__}: {error}", 300) + find_line(error, Path(spec.rpartition(":")[0]))


def _list_parameters(cls: type[Any]) -> dict[str, inspect.Parameter]:
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {name: one for name, one in inspect.signature(cls).parameters.items() if one.kind in kinds}


def _find_config_class(cls: type[Any], parameter: str) -> type[Any] | None:
    """Return the class of the configuration object that a model takes, or None if it takes none."""
    try:
        hint = typing.get_type_hints(cls.__init__).get(parameter)
    except Exception:  # an annotation names something that is not imported
        hint = None
    named = getattr(sys.modules.get(cls.__module__), f"{cls.__name__}Config", None)
    found = hint if isinstance(hint, type) and hint.__module__ != "builtins" else named
    return found if isinstance(found, type) else None
