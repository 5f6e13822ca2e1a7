"""The FP32 masters of BF16 parameters: join, export, sample and load them from the model alone.

A parameter has attributes that complete it to FP32: ``other_half``, a 16-bit remainder or an FP32 copy, and for
remainders ``check_words``, checksums that tell whether something else has written the parameter since. If so, the
parameter is its own master. Reading changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from narrowgauge.optim import sharded
from narrowgauge.optim.sharded import shard_like, to_local
from narrowgauge.optim.split_fp32 import compute_remainder, split
from narrowgauge.optim.weight_checksums import compute_checksums, join_master, sample_valid_remainders


class OtherHalf(NamedTuple):
    """The tensors that complete a BF16 parameter to FP32."""

    values: Tensor
    """Remainders (int16) or FP32 copies, sharded like the parameter."""
    words: Tensor | None
    """The checksums for remainders; None disables the check."""


def set_other_half(parameter: nn.Parameter, values: Tensor | None, words: Tensor | None = None) -> None:
    """Attach to a parameter the tensors that complete it."""
    parameter.other_half = values  # type: ignore[attr-defined]
    parameter.check_words = words  # type: ignore[attr-defined]


def get_other_half(parameter: Tensor) -> OtherHalf | None:
    """Return the tensors that complete a parameter; None if there are none, or its dtype or shape has changed."""
    values: Tensor | None = getattr(parameter, "other_half", None)
    if values is None or parameter.dtype is not torch.bfloat16 or values.shape != parameter.shape:
        return None
    return OtherHalf(values, getattr(parameter, "check_words", None))


def has_master(parameter: Tensor) -> bool:
    """Whether a BF16 parameter has an FP32 master."""
    return get_other_half(parameter) is not None


def narrow(parameter: nn.Parameter) -> nn.Parameter:
    """Turn an FP32 parameter into a BF16 parameter with a 16-bit remainder, in place and without loss.

    FSDP2 replaces parameters, so call this after ``fully_shard`` and before the first forward.

    Args:
        parameter: The parameter; other dtypes than FP32 are not changed.

    Returns:
        The same parameter.

    Raises:
        UsageError: A sharded parameter has a gradient, or FSDP has already run a forward with it.
    """
    if parameter.dtype is torch.float32:
        values = to_local(parameter).detach()
        weight, remainder = split(values)
        sharded.replace_values(parameter, torch.empty_like(values, dtype=torch.bfloat16).copy_(weight))  # strides stay
        set_other_half(parameter, shard_like(remainder, parameter), compute_checksums(weight))
    return parameter


def widen(parameter: nn.Parameter) -> None:
    """Turn a BF16 parameter with a master back into an FP32 parameter, in place: the inverse of ``narrow``.

    Args:
        parameter: The parameter; one without a master is not changed.
    """
    if has_master(parameter):
        values = to_local(join_fp32(parameter))
        set_other_half(parameter, None)
        sharded.replace_values(parameter, torch.empty_like(to_local(parameter), dtype=torch.float32).copy_(values))
        if getattr(parameter, "grad_dtype", None) is not None:
            parameter.grad_dtype = torch.float32


def carry_masters(source: nn.Module, copy: nn.Module) -> None:
    """Copy masters to the parameters of a copied module, as torch does not copy attributes."""
    for parameter, other in zip(source.parameters(), copy.parameters(), strict=True):
        found = get_other_half(parameter)
        if found is not None and get_other_half(other) is None:
            set_other_half(other, found.values.clone(), None if found.words is None else found.words.clone())


def get_or_make_remainder(parameter: nn.Parameter) -> tuple[Tensor, Tensor]:
    """Return the remainders and checksums of a BF16 parameter; zeros if it has none."""
    found, weight = get_other_half(parameter), to_local(parameter).detach()
    if found is None:
        return new_filled(parameter, 0, torch.int16), compute_checksums(weight)
    values = found.values.to(parameter.device)
    if values.dtype is torch.int16:
        return values, compute_checksums(weight) if found.words is None else found.words.to(parameter.device)
    return shard_like(
        compute_remainder(weight, join_master(weight, to_local(values), None)), parameter
    ), compute_checksums(weight)


def split_master(master: Tensor) -> tuple[Tensor, Tensor]:
    """Return remainders and checksums of a saved FP32 master, independently of the model's current weight."""
    weight, remainder = split(to_local(master))
    return shard_like(remainder, master), compute_checksums(weight)


def new_filled(parameter: Tensor, value: int, dtype: torch.dtype) -> Tensor:
    """Return a constant tensor with the parameter's shape and sharding, in row-major order."""
    contiguous = torch.contiguous_format
    return torch.full_like(parameter, value, dtype=dtype, memory_format=contiguous, requires_grad=False)


def join_fp32(parameter: Tensor, device: torch.device | str | None = None) -> Tensor:
    """Return a parameter in FP32, completed by its remainder or copy; computed on ``device`` if given."""
    found, weight = get_other_half(parameter), parameter.detach().to(device)
    if found is None:
        return weight.float() if weight.is_floating_point() else weight
    values, words = found.values.to(weight.device), None if found.words is None else found.words.to(weight.device)
    return shard_like(join_master(to_local(weight), to_local(values), words), weight)


class Sample(NamedTuple):
    """Sampled values of parameters, one row per name, equally many of each."""

    names: list[str]
    values: Tensor


@torch.no_grad()
def sample_masters(parameters: Mapping[str, Tensor], most: int) -> list[Sample]:
    """Return up to ``most`` values of each parameter in FP32, evenly spaced, and the same ones in each call.

    Complex parameters give their real and imaginary parts.
    """
    alike: dict[tuple[Any, ...], dict[str, tuple[Tensor, Tensor | None]]] = {}
    for name, parameter in parameters.items():
        whole, found = to_local(parameter).detach(), get_other_half(parameter)
        whole = torch.view_as_real(whole.resolve_conj()) if whole.is_complex() else whole
        every = max(1, -(-whole.numel() // most))
        weight, rest = whole.reshape(-1)[::every], None
        if found is not None:
            rest = to_local(found.values)
            narrow = rest.dtype is torch.int16
            rest = sample_valid_remainders(whole, rest, found.words, every) if narrow else rest.reshape(-1)[::every]
        if weight.numel():
            kind = (weight.numel(), weight.dtype, weight.device, None if rest is None else rest.dtype)
            alike.setdefault(kind, {})[name] = weight, rest
    return [Sample(list(group), _join_stacked(list(group.values()))) for group in alike.values()]


def _join_stacked(pairs: list[tuple[Tensor, Tensor | None]]) -> Tensor:
    weights = torch.stack([weight for weight, _ in pairs])
    rests = [rest for _, rest in pairs if rest is not None]
    return join_master(weights, torch.stack(rests), None) if rests else weights.float()


def full_precision(model: nn.Module, device: torch.device | str | None = None) -> dict[str, Tensor]:
    """Return the model's state dictionary with FP32 masters in place of BF16 weights, as plain PyTorch loads it.

    Args:
        model: A model whose weights may be BF16 with masters.
        device: Where to compute the FP32 weights, for example "cpu" if they do not fit on the GPU.

    Returns:
        The state dictionary. Other tensors are the model's own.
    """
    state, parameters = _get_named_tensors(model)
    return {
        name: join_fp32(parameters[name], device) if name in parameters and has_master(parameters[name]) else value
        for name, value in state.items()
    }


def load_full_precision(model: nn.Module, state: dict[str, Tensor], strict: bool = True) -> None:
    """Load an FP32 state dictionary into a model with BF16 weights and masters, without loss.

    Args:
        model: The model.
        state: From ``full_precision``, or the state dictionary of an FP32 model. For sharded weights its tensors are
            either sharded in the same way, or full tensors on every rank.
        strict: As for ``Module.load_state_dict``.
    """
    _, parameters = _get_named_tensors(model)
    state = {
        name: sharded.place_like(value, parameters[name]) if name in parameters else value
        for name, value in state.items()
    }
    model.load_state_dict(state, strict=strict)
    for name, value in state.items():
        found = get_other_half(parameters[name]) if name in parameters else None
        if found is not None:
            values = to_local(found.values)
            master = to_local(value).detach().to(values.device, torch.float32)
            weight, remainder = split(master)
            with torch.no_grad():
                to_local(parameters[name]).copy_(weight)
                values.copy_(remainder if values.dtype is torch.int16 else master)
                if found.words is not None:
                    found.words.copy_(compute_checksums(weight))


def _get_named_tensors(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, nn.Parameter]]:
    """Return a model's state and parameters. Reading the state first makes FSDP2 reshard gathered parameters."""
    state = model.state_dict()
    return state, dict(model.named_parameters(remove_duplicate=False))
