"""A user's model as a task for benchmarks: random batches, the model's own loss, no data.

transformers:CLASS, or a folder with config.json    (pretrained/, model_inputs.py)
file.py:Class                                       (model_file.py)
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from torch.utils.flop_counter import FlopCounterMode

from narrowgauge.errors import NarrowgaugeError, UsageError
from narrowgauge.pretrained import PretrainedModel, transformers_model
from narrowgauge.pretrained.lora_options import parse_lora
from narrowgauge.task import Task
from narrowgauge.tasks import model_file, model_inputs
from narrowgauge.tasks.model_inputs import Inputs

ROWS, ROWS_ON_CPU = 8, 2
"""Default number of rows of a batch."""
LEARNING_RATE = 1e-4
_FILE = re.compile(r".*\.py:\w+", re.DOTALL)


def make_task(
    spec: str,
    fields: Mapping[str, Any],
    batch: int | None,
    context: int | None,
    small: bool,
    lora: str | None = None,
    headers_only: bool = False,
) -> Task:
    """Make the task of a model.

    Args:
        spec: ``transformers:CLASS``, a folder, a name on the Hub, or ``file.py:Class``.
        fields: Fields of the model's configuration.
        batch: Rows of a batch. Default: 8, or 2 if ``small``.
        context: Tokens of a row. Default: as many as the model takes, at most 2048, or 128 if ``small``.
        small: Whether the model will run on a CPU.
        lora: Train adapters of the model only, as in ``narrowgauge train --lora``.
        headers_only: Do not download the weights of a model on the Hub: their shapes are enough.

    Raises:
        UsageError: There is no such model, its configuration is wrong, or its inputs are not known.
    """
    rows = (ROWS_ON_CPU if small else ROWS) if batch is None else batch
    if rows < 1:
        raise UsageError(f"--batch {rows} must be at least 1")
    if _FILE.fullmatch(spec):
        if lora is not None:
            raise UsageError(f"--lora {lora}: adapters are for models of transformers, not for {spec}")
        found = model_file.find_model(spec, fields)
        inputs = model_file.make_inputs(found, context, small)
        facts: dict[str, Any] = {"class": found.name, "weights": "random", "purpose": "tokens and targets"}
        with contextlib.suppress(UsageError), torch.device("meta"):  # not every class can be made without memory
            facts["parameters"] = sum(parameter.numel() for parameter in found.make().parameters())
        return _make(spec, found.make, inputs, model_file.compute_loss, rows, facts)
    model = transformers_model.find_model(spec, fields, quantized=True, headers_only=headers_only)
    purpose = model_inputs.find_purpose(model.cls, model.config.model_type, model.option)
    _prepare_config(model.config, purpose, fields)
    inputs = model_inputs.make_inputs(purpose, model.config, context, small, model.option)
    factory = PretrainedModel(model, None if lora is None else parse_lora(lora))
    with torch.device("meta"):
        without_memory = factory()
    facts = {
        "class": model.name,
        "weights": "safetensors" if model.weights else "random",
        "purpose": purpose,
        "parameters": sum(parameter.numel() for parameter in without_memory.parameters()),
    }
    return _make(spec, factory if model.weights else factory.__call__, inputs, compute_loss, rows, facts)


def _make(spec: str, model: Any, inputs: Inputs, loss: Any, rows: int, facts: dict[str, Any]) -> Task:
    return Task(
        name=spec,
        model=model,
        loss=loss,
        batch=lambda step, split: inputs.make(rows, step),
        synthetic=lambda step: inputs.make(rows, step),
        items_per_batch=rows * inputs.items_per_row,
        unit=inputs.unit,
        learning_rate=LEARNING_RATE,
        facts={**facts, "rows": rows, "causal": inputs.is_causal},
    )


def _prepare_config(config: Any, purpose: str, fields: Mapping[str, Any]) -> None:
    """Set what training needs: no cache of keys and values, a loss by name, special tokens."""
    for one in {id(one): one for one in (config, config.get_text_config())}.values():
        if "use_cache" not in fields and hasattr(one, "use_cache"):
            one.use_cache = False
        if purpose == model_inputs.SEQUENCES and getattr(one, "pad_token_id", None) is None:
            one.pad_token_id = 0
        if purpose == model_inputs.SEQ2SEQ and getattr(one, "decoder_start_token_id", None) is None:
            one.decoder_start_token_id = getattr(one, "pad_token_id", None) or 0
    config.return_dict = True


def compute_loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Return the loss that a model of transformers computes."""
    loss: Tensor = model(**batch).loss
    return loss


def try_model(task: Task, device: str) -> Task:
    """Run the unchanged model on one row, so that a wrong configuration is one line rather than a crash later.

    Args:
        task: A task of ``make_task``.
        device: The device to run on.

    Returns:
        The task with the FLOPs per item, as counted. Causal attention counts half of its square of scores, which is
        all that has to be computed.

    Raises:
        UsageError: The model does not run, or it returns no loss.
    """
    torch.manual_seed(0)
    with torch.device(device):
        model = task.model()
    full: Any = task.batch(0, "train")
    batch = tree_map_only(Tensor, lambda tensor: tensor[:1].to(device), full)
    counter = FlopCounterMode(display=False)
    try:
        with counter, torch.no_grad():
            loss = task.loss(model, batch)
    except (NarrowgaugeError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        shapes = ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in batch.items())
        what = model_file.describe_error(error, task.name)
        raise UsageError(f"--model {task.name} does not run on {shapes}: {what}; check --config") from error
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise UsageError(f"--model {task.name} returned no loss for its labels; write a task that computes one")
    counts = counter.get_flop_counts().get("Global", {})
    attention = sum(count for op, count in counts.items() if "attention" in str(op))
    flops = sum(counts.values()) - (attention / 2 if task.facts["causal"] else 0)
    items = task.items_per_batch / task.facts["rows"]
    return dataclasses.replace(task, flops_per_item=3.0 * flops / items if flops else None)
