"""Adds LoRA adapters to a model with PEFT, and gives them their first values.

    inject        PEFT replaces linear layers by layers with an adapter. The parameters of the base stay the same
                  objects and no longer require gradients; those of the adapters are on the meta device.
    allocate      gives the adapters memory, in FP32
    initialize    by PEFT's own rule: a from a uniform or normal distribution, b zero
    read_weights  or: from an adapter_model.safetensors

So a model on the meta device can have adapters before its weights are read.
"""

from __future__ import annotations

import contextlib
import importlib.util
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from narrowgauge.errors import UsageError, one_line
from narrowgauge.pretrained.folder import StoredTensor, read_header
from narrowgauge.pretrained.lora_options import ALL_LINEAR, UNDERSTOOD, WEIGHTS, LoraOptions
from narrowgauge.pretrained.tensor_readers import FileReader, load_values
from narrowgauge.pretrained.transformers_model import describe_error

NAME = "default"
"""PEFT's name for the only adapter of a model."""
PREFIX = "base_model.model."
"""What PEFT puts before the names of a model's weights in a file."""


def inject(model: nn.Module, options: LoraOptions) -> None:
    """Replace the targets by layers with adapters, whose parameters are on the meta device. Freeze all others.

    Raises:
        UsageError: PEFT is not installed, or a target names nothing, or something else than a linear layer.
    """
    if importlib.util.find_spec("peft") is None:
        raise UsageError(f"{options.option}: LoRA needs the package peft; pip install peft")
    _check_targets(model, options)
    with _quiet():
        try:
            import peft

            given = {"fan_in_fan_out": _is_transposed(model), **options.config}
            if given["target_modules"] == ALL_LINEAR:  # by which PEFT also means the tensors of experts and routers
                given["target_modules"] = _list_linear(model)
            config = peft.LoraConfig(**given)
            peft.inject_adapter_in_model(config, model, NAME, low_cpu_mem_usage=True)
        except Exception as error:  # PEFT raises all kinds for a configuration that it cannot apply
            raise UsageError(f"{options.option}: PEFT cannot add the adapter: {describe_error(error)}") from None
    for path, layer in find_layers(model).items():
        base = layer.get_base_layer()
        if not _is_linear(base) or not hasattr(layer, "lora_A") or NAME not in layer.lora_A:
            raise UsageError(
                f"{options.option}: {path} is {_with_article(type(base).__name__)}; adapters are for linear layers"
            )


def find_layers(model: nn.Module) -> dict[str, Any]:
    """Return the layers with an adapter, by path."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    return {path: module for path, module in model.named_modules() if isinstance(module, BaseTunerLayer)}


def describe(model: nn.Module, options: LoraOptions) -> str:
    """Say in a line how much of a model is trained."""
    sizes = [(parameter.numel(), parameter.requires_grad) for parameter in model.parameters()]
    total, trained = sum(size for size, _ in sizes), sum(size for size, is_trained in sizes if is_trained)
    layers = find_layers(model)
    ranks = sorted({layer.r[NAME] for layer in layers.values()})
    rank = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]} to {ranks[-1]}"
    origin = f", continued from {options.folder}" if options.folder is not None else ""
    return (
        f"training {trained:,} of {total:,} parameters ({trained / total:.2%}): LoRA {rank} on "
        f"{len(layers)} layers{', none on experts' if _has_experts(model) else ''}{origin}"
    )


def read_config(model: nn.Module) -> dict[str, Any]:
    """Return the fields of adapter_config.json that decide what the adapters of a model compute."""
    config = model.peft_config[NAME].to_dict()  # type: ignore[index, union-attr]
    found = {name: config[name] for name in (*UNDERSTOOD, "init_lora_weights") if config.get(name) is not None}
    listed = {name: sorted(value) if isinstance(value, set | list) else value for name, value in found.items()}
    return {"peft_type": "LORA", **listed, "target_modules": _shorten_targets(model, listed["target_modules"])}


def _shorten_targets(model: nn.Module, targets: str | list[str]) -> str | list[str]:
    """Return the last parts of the targets' paths, which other tools prefer, if they name the same layers."""
    layers = find_layers(model)
    ends = {path.rpartition(".")[2] for path in layers}
    inside = tuple(f"{path}." for path in layers)
    paths = [path for path, _ in model.named_modules() if not path.startswith(inside)]
    same = {path for path in paths if path.rpartition(".")[2] in ends} == set(layers)
    return sorted(ends) if same and not isinstance(targets, str) else targets


def get_weights(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the weights of all adapters by their names in the model."""
    found = {}
    for path, layer in find_layers(model).items():
        for part in ("lora_A", "lora_B"):
            found[f"{path}.{part}.{NAME}.weight"] = getattr(layer, part)[NAME].weight
    return found


def to_file_name(name: str) -> str:
    """Return the name of an adapter's weight in an adapter_model.safetensors."""
    return PREFIX + name.replace(f".{NAME}.", ".")


def allocate(model: nn.Module, device: torch.device) -> None:
    """Give the adapters memory on a device, in FP32. Their values are undefined."""
    for layer in find_layers(model).values():
        for part in (layer.lora_A[NAME], layer.lora_B[NAME]):
            part.weight = nn.Parameter(torch.empty(part.weight.shape, dtype=torch.float32, device=device))


@torch.no_grad()
def initialize(model: nn.Module, options: LoraOptions) -> None:
    """Give adapters their first values: by PEFT's own rule, with torch's generator; or from a folder."""
    if options.folder is None:
        for layer in find_layers(model).values():
            layer.reset_lora_parameters(NAME, options.config["init_lora_weights"])
    else:
        read_weights(model, options.folder, options.option)


def match_weights(model: nn.Module, folder: Path, option: str) -> dict[str, StoredTensor]:
    """Find the stored tensor of each adapter's weight, by its name in the model.

    Raises:
        UsageError: The file is damaged, or it is of an adapter for another model.
    """
    stored = dict(read_header(folder / WEIGHTS, option))
    found: dict[str, StoredTensor] = {}
    for name, weight in get_weights(model).items():
        tensor = stored.pop(to_file_name(name), None)
        if tensor is None:
            raise UsageError(f"{option}: {WEIGHTS} has no {to_file_name(name)}; it is of an adapter for another model")
        if tensor.shape != tuple(weight.shape) or not tensor.dtype.is_floating_point or tensor.dtype.itemsize == 1:
            kind = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
            raise UsageError(
                f"{option}: {one_line(tensor.name)} in {WEIGHTS} is {kind}, expected float {list(weight.shape)}; it is "
                "of an adapter for another model"
            )
        found[name] = tensor
    if stored:
        raise UsageError(f"{option}: {WEIGHTS} has {one_line(next(iter(stored)), 200)}, which the adapter has not")
    return found


@torch.no_grad()
def read_weights(model: nn.Module, folder: Path, option: str) -> None:
    """Read the weights of the adapters from a folder."""
    weights = get_weights(model)
    places = match_weights(model, folder, option)
    device = next(iter(weights.values())).device
    with FileReader(device, option) as reader:
        for name, tensor in places.items():
            weights[name].copy_(load_values(tensor, torch.float32, device, reader))


def compute_update(layer: Any, a: Tensor, b: Tensor) -> Tensor:
    """Return what an adapter adds to its layer's weight, in the weight's layout: scale * b a, as PEFT computes it."""
    product = b @ a
    return (product.t() if layer.fan_in_fan_out else product) * float(layer.scaling[NAME])


def _check_targets(model: nn.Module, options: LoraOptions) -> None:
    """Refuse a target that names no module: PEFT refuses only if none of them does."""
    targets = options.config["target_modules"]
    if isinstance(targets, str):
        return
    paths = [path for path, _ in model.named_modules()]
    for target in targets:
        if not any(path == target or path.endswith(f".{target}") for path in paths):
            linear = {path.rpartition(".")[2] for path, module in model.named_modules() if _is_linear(module)}
            raise UsageError(
                f"{options.option}: the target {one_line(target, 80)} is no module of {type(model).__name__}; its "
                f"linear layers are {', '.join(sorted(linear)[:20])}, or give {ALL_LINEAR}"
            )


def _list_linear(model: Any) -> list[str]:
    """Return the paths of all linear layers but the head."""
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    return [path for path, module in model.named_modules() if _is_linear(module) and module is not head]


def _has_experts(model: nn.Module) -> bool:
    """Whether a model has matrices of experts, stacked in one tensor, which no adapter is for."""
    return any(parameter.dim() == 3 and not parameter.requires_grad for parameter in model.parameters())


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or _is_conv1d(module)


def _is_conv1d(module: nn.Module) -> bool:
    """Whether it is the linear layer of GPT-2, which stores its weight transposed."""
    return type(module).__name__ == "Conv1D"


def _is_transposed(model: nn.Module) -> bool:
    return any(map(_is_conv1d, model.modules()))


def _with_article(name: str) -> str:
    return f"an {name}" if name[:1] in "AEIOU" else f"a {name}"


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Hide the advice of PEFT."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
