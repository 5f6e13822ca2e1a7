"""Loads a model's weights from its folder directly in the form in which a recipe trains them.

    master=fp32        FP32 parameters
    other masters      matrices: BF16 parameters with 16-bit remainders, together the FP32 value (optim/masters.py)
                       vectors, and modules that the recipe keeps in FP32: FP32 parameters
    not trained        matrices: as ``frozen`` of the recipe says; all others in FP32

A value that is BF16 in the file is BF16 in the parameter, and its remainder is 0. Any other is converted to FP32 (FP8
by its scale) and split. This runs over pieces of ``PIECE`` values, so that besides the model there is never more than
one piece: an 8B model is predicted to take 32.4 GB to load. The engine takes such parameters over as they are.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from narrowgauge import files, hardware
from narrowgauge.engine.setup import find_narrowed, find_stored_narrow
from narrowgauge.errors import UsageError
from narrowgauge.kernels import compute_scale
from narrowgauge.kernels.fp8_formats import FP8_MAX
from narrowgauge.kernels.fp8_tile import quantize_reference
from narrowgauge.nn.convert import find_stored_groups
from narrowgauge.nn.experts.routers import find_routers
from narrowgauge.nn.keep_fp32 import find_modules
from narrowgauge.nn.products.gemm import E4M3
from narrowgauge.nn.products.stored_fp8 import SCALE
from narrowgauge.optim.masters import set_other_half
from narrowgauge.optim.split_fp32 import split
from narrowgauge.optim.weight_checksums import GROUP, compute_checksums
from narrowgauge.pretrained.folder import PretrainedFolder
from narrowgauge.pretrained.match import Match, match_folder
from narrowgauge.pretrained.stacked_tensors import AnyTensor
from narrowgauge.pretrained.tensor_readers import FileReader, Reader, load_values
from narrowgauge.pretrained.transformers_model import quiet
from narrowgauge.recipe import Recipe, is_auto, parse
from narrowgauge.weight_copies.adjacent import set_parts

NOTIFY_BYTES = 2_000_000_000
"""At least how much is loaded between two lines of progress."""


def load_model(
    folder: PretrainedFolder,
    recipe: str | Recipe,
    device: torch.device | str,
    notify: Callable[[str], None] | None = None,
) -> nn.Module:
    """Load the model of a folder in the form in which a recipe trains it, without an FP32 copy of the whole.

    Args:
        folder: From ``open_folder``.
        recipe: The recipe that the engine will use.
        device: Where to load it to.
        notify: Is called with lines of progress.

    Returns:
        The model, in training mode. Make an ``Engine`` with the same recipe from it.

    Raises:
        UsageError: The weights are damaged, quantized in another way than FP8, or not those of the model that
            config.json describes.
    """
    return load_matched(match_folder(folder), recipe, device, notify)


def load_matched(
    match: Match, recipe: str | Recipe, device: torch.device | str, notify: Callable[[str], None] | None = None
) -> nn.Module:
    """Load the weights of a matched model; its model is filled, so a match can be loaded once."""
    tell = notify or (lambda line: None)
    target = torch.device(device)
    if match.conversion is not None:
        whole = sum(parameter.numel() for parameter in match.model.parameters()) * 4e-9
        tell(f"loading takes {whole:,.1f} GB for FP32 weights: {match.conversion}")
        with target:
            return match.found.make(strict=True)
    with FileReader(target, match.folder.option) as reader:
        for first, second in match.twins:
            _check_equal(first, second, reader, match)
        return fill(match, recipe, target, reader, tell)


@torch.no_grad()
def fill(
    match: Match, recipe: str | Recipe, device: torch.device, reader: Reader, tell: Callable[[str], None]
) -> nn.Module:
    """Replace the meta tensors of a matched model by tensors on a device, in the form of a recipe.

    Args:
        match: The match; it needs no ``conversion``.
        recipe: The recipe.
        device: The device.
        reader: Reads the stored values.
        tell: Is called with lines of progress.
    """
    recipe, model = _choose_form(recipe, device), match.model
    kept = [*find_modules(model, recipe.keep), *find_routers(model)]
    named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    narrowed = {id(p) for p in find_narrowed(model, named, recipe, kept)}
    frozen = {id(p) for p in find_stored_narrow(model, recipe, kept)}
    groups = {name: group for group in _list_fp8_groups(match, recipe, device) for name in group}
    progress = _Progress(sum(tensor.nbytes for tensor in match.stored.values()), tell)
    made: dict[int, Tensor] = {}
    for name, tensor in match.stored.items():
        old = match.expected[name]
        progress.add(tensor.nbytes)
        if name in groups:
            if id(old) not in made:
                made |= load_in_fp8({match.expected[one]: match.stored[one] for one in groups[name]}, device, reader)
        elif id(old) in narrowed:
            made[id(old)] = _load_narrow(tensor, device, reader)
        elif id(old) in frozen:
            values = load_values(tensor, torch.bfloat16, device, reader)
            made[id(old)] = nn.Parameter(values, requires_grad=False)
        else:
            dtype = torch.float32 if old.dtype.is_floating_point else old.dtype
            values = load_values(tensor, dtype, device, reader)
            made[id(old)] = nn.Parameter(values, old.requires_grad) if isinstance(old, nn.Parameter) else values
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, old_tensor in tensors.items():
                if old_tensor is not None and id(old_tensor) in made:
                    tensors[name] = made[id(old_tensor)]  # type: ignore[assignment]
        scale = getattr(module._parameters.get("weight"), SCALE, None)
        if scale is not None:
            module.register_buffer(SCALE, scale)
    for loaded in made.values():
        vars(loaded).pop(SCALE, None)
    _compute_buffers(model, device, list(made.values()))
    _read_generation_config(model, match.folder.path)
    return model.train()


def _choose_form(recipe: str | Recipe, device: torch.device) -> Recipe:
    """Return the recipe. For ``auto`` any that it can choose: they all train the same form of weights."""
    return parse(recipe, hardware.detect(str(device))) if is_auto(recipe) else parse(recipe)


def _load_narrow(tensor: AnyTensor, device: torch.device, reader: Reader) -> nn.Parameter:
    """Load a BF16 parameter with its remainders."""
    weight = torch.empty(tensor.shape, dtype=torch.bfloat16, device=device)
    remainder = torch.zeros(tensor.shape, dtype=torch.int16, device=device)
    words = torch.empty(-(-tensor.numel // GROUP), dtype=torch.int32, device=device)
    for start, stop in reader.list_pieces(tensor):
        values, part = reader.read(tensor, start, stop), weight.view(-1)[start:stop]
        if tensor.dtype is torch.bfloat16:
            part.copy_(values)
        else:
            rounded, rest = split(values.float())
            part.copy_(rounded)
            remainder.view(-1)[start:stop].copy_(rest)
        words[start // GROUP : -(-stop // GROUP)] = compute_checksums(part)
    parameter = nn.Parameter(weight)
    set_other_half(parameter, remainder, words)
    return parameter


def _list_fp8_groups(match: Match, recipe: Recipe, device: torch.device) -> list[list[str]]:
    """Return the names of frozen weights that the engine stores in FP8, those with one scale together."""
    names = {id(tensor): name for name, tensor in match.expected.items() if name in match.stored}
    groups = find_stored_groups(match.model, recipe, hardware.detect(str(device)))
    found = [[names.get(id(match.model.get_submodule(path).weight)) for path in group] for group in groups]
    return [[name for name in group if name is not None] for group in found if None not in group]


def load_in_fp8(tensors: Mapping[Tensor, AnyTensor], device: torch.device, reader: Reader) -> dict[int, nn.Parameter]:
    """Load frozen weights [O, I] of layers whose products are one in FP8, with one scale.

    They are read twice: for the largest value, and to be cast. They are rounded to BF16 first, as the engine does with
    FP32 weights that it stores in FP8.

    Args:
        tensors: What is stored, by the parameters that it replaces.
        device: Where to load it to.
        reader: Reads the stored values.

    Returns:
        The loaded parameters by the id of those that they replace. They are adjacent in memory, and have their scale
        as attribute ``weight_scale``.
    """
    amax = torch.zeros((), device=device)
    for tensor in tensors.values():
        for piece in reader.list_pieces(tensor):
            amax = torch.maximum(amax, reader.read(tensor, *piece).to(torch.bfloat16).abs().amax().float())
    scale = compute_scale(amax, FP8_MAX[E4M3])
    rows = [tensor.shape[0] for tensor in tensors.values()]
    joint = torch.empty((sum(rows), next(iter(tensors.values())).shape[1]), dtype=E4M3, device=device)
    made = {}
    for (old, tensor), part in zip(tensors.items(), joint.split(rows), strict=True):
        flat = part.view(-1)
        for start, stop in reader.list_pieces(tensor):
            values = reader.read(tensor, start, stop).to(torch.bfloat16)
            flat[start:stop].copy_(quantize_reference(values, scale, E4M3))
        made[id(old)] = parameter = nn.Parameter(part.view(torch.uint8), requires_grad=False)
        parameter.weight_scale = scale.reciprocal()  # type: ignore[attr-defined]
    set_parts(list(made.values()), joint.view(torch.uint8))
    return made


def _check_equal(first: AnyTensor, second: AnyTensor, reader: Reader, match: Match) -> None:
    """Refuse two different tensors for one parameter: transformers would train two."""
    same = (first.dtype, first.shape) == (second.dtype, second.shape)
    for start, stop in reader.list_pieces(first) if same else ():
        values = reader.read(first, start, stop).clone()
        same = same and torch.equal(values, reader.read(second, start, stop))
    if not same:
        raise UsageError(
            f"{match.folder.option}: the weights cannot be loaded into {match.found.name}: config.json ties "
            f"{first.name} and {second.name}, but the stored tensors differ; set tie_word_embeddings to false there"
        )


def _compute_buffers(model: Any, device: torch.device, loaded: list[Any]) -> None:
    """Let the class compute the buffers that are not stored (rotary frequencies, masks), as from_pretrained does.

    transformers initializes everything in a model except for what has the mark ``_is_hf_initialized``.
    """
    for tensor in loaded:
        tensor._is_hf_initialized = True
    made: dict[int, Tensor] = {}
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name in module._non_persistent_buffers_set:
                module._buffers[name] = made.setdefault(id(buffer), torch.empty_like(buffer, device=device))
    with quiet():
        model.initialize_weights()
    for tensor in loaded:
        del tensor._is_hf_initialized


def _read_generation_config(model: Any, folder: Path) -> None:
    """Read how the model generates text, so that it is saved with the trained model."""
    if not model.can_generate() or not files.exists(folder / "generation_config.json"):
        return
    from transformers import GenerationConfig

    with quiet(), contextlib.suppress(OSError, ValueError, TypeError):  # training does not need it
        model.generation_config = GenerationConfig.from_pretrained(folder, local_files_only=True)


class _Progress:
    """Says from time to time how much of a large model is loaded."""

    def __init__(self, total: int, tell: Callable[[str], None]) -> None:
        self.total, self.tell, self.done = total, tell, 0
        self.every = max(NOTIFY_BYTES, total // 10)
        self.next = self.every

    def add(self, size: int) -> None:
        self.done += size
        if self.done >= self.next or (self.done == self.total >= self.every):
            self.tell(f"loaded {self.done / 1e9:.1f} of {self.total / 1e9:.1f} GB")
            self.next = self.done + self.every
