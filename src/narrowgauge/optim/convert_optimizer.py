"""Converts a user's optimizer to narrowgauge's in place, and keeps its groups, learning rates and state.

The optimizer stays the object that the user, schedulers and hooks refer to. Its class becomes one that steps, saves,
loads and adds groups as narrowgauge's does, and that still derives from the original class.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Adam, Optimizer

from narrowgauge.errors import UsageError
from narrowgauge.optim import moments as eight_bit
from narrowgauge.optim.adafactor import Adafactor
from narrowgauge.optim.adamw import AdamW
from narrowgauge.optim.mastered import FORMATS, MasteredOptimizer, set_grad_dtype
from narrowgauge.optim.masters import narrow
from narrowgauge.optim.muon import Muon
from narrowgauge.optim.sgd import SGD
from narrowgauge.optim.sharded import check_gradients
from narrowgauge.optim.state_dict_format import strip_format_suffixes
from narrowgauge.parameters import is_sharded

REPLACED = ("step", "state_dict", "load_state_dict", "add_param_group")
"""Methods that narrowgauge's optimizers replace."""
_classes: dict[type[Optimizer], type[MasteredOptimizer]] = {}


class Counterpart(NamedTuple):
    """A class of torch, and the class of narrowgauge that has the same rule."""

    theirs: type[Optimizer]
    own: type[MasteredOptimizer]
    explain: Callable[[Optimizer], str | None]
    """Says why an optimizer of torch's class has another rule; None if it has the same."""


def _explain_adam(optimizer: Optimizer) -> str | None:
    for group in optimizer.param_groups:
        if group["weight_decay"] and not group.get("decoupled_weight_decay", False):
            return "its weight decay is coupled, unlike that of torch.optim.AdamW"
        if group.get("amsgrad"):
            return "amsgrad is not supported"
    return None


def _explain_adafactor(optimizer: Optimizer) -> str | None:
    sharded = any(is_sharded(parameter) for group in optimizer.param_groups for parameter in group["params"])
    return "rows and columns are of whole matrices, and its parameters are sharded" if sharded else None


def _explain_nothing(optimizer: Optimizer) -> str | None:
    return None


COUNTERPARTS = (
    Counterpart(Adam, AdamW, _explain_adam),
    Counterpart(torch.optim.SGD, SGD, _explain_nothing),
    Counterpart(torch.optim.Adafactor, Adafactor, _explain_adafactor),
    *([Counterpart(torch.optim.Muon, Muon, _explain_nothing)] if hasattr(torch.optim, "Muon") else []),
)


def convert_optimizer(
    optimizer: Optimizer, master: str, moments: str, narrowed: Iterable[nn.Parameter], gradients: str = "bf16"
) -> MasteredOptimizer:
    """Convert an optimizer to its counterpart in ``narrowgauge.optim``, in place.

    Args:
        optimizer: torch.optim.AdamW, Muon, SGD, Adafactor, Adam without coupled weight decay, a plain subclass of
            these, or an optimizer of narrowgauge.
        master: Format of the masters, as in ``AdamW``.
        moments: Format of the moments, as in ``AdamW``.
        narrowed: Parameters to turn into BF16 with remainders, as ``narrow`` does.
        gradients: Format of the gradients of BF16 parameters, as in ``AdamW``.

    Returns:
        The same object, now also an instance of narrowgauge's class.

    Raises:
        UsageError: The optimizer has no counterpart, overrides a method that would be replaced, or gradients exist
            already.
    """
    formats = {"master": master, "moments": moments, "gradients": gradients}
    is_own = isinstance(optimizer, MasteredOptimizer)
    kind = type(optimizer) if isinstance(optimizer, MasteredOptimizer) else _find_counterpart(optimizer)
    for group in optimizer.param_groups:
        kind.check_group(kind.missing_options | group | formats)
    own = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    for parameter in narrowed:
        if parameter in own:
            if parameter.grad is not None:
                raise UsageError("lean recipe: a parameter already has a gradient; create the engine before backward")
            check_gradients(parameter, gradients)
            set_grad_dtype(narrow(parameter), gradients)
    state = optimizer.state_dict() if is_own else Optimizer.state_dict(optimizer)
    new = optimizer if isinstance(optimizer, MasteredOptimizer) else _change_class(optimizer, kind)
    new.defaults |= MasteredOptimizer.missing_options | new.defaults | formats
    for group in new.param_groups:
        group.update(kind.missing_options | group | formats)
    new.__dict__.pop("release", None)  # of an earlier engine
    if state["state"]:
        new.load_state_dict(state)
    return new


def can_convert(optimizer: Optimizer) -> bool:
    """Whether an optimizer, or the class of torch that it extends, has a counterpart in narrowgauge."""
    if isinstance(optimizer, MasteredOptimizer):
        return True
    found = _find_kind(optimizer)
    return found is not None and found.explain(optimizer) is None and not _find_own_methods(optimizer, found.theirs)


def _find_kind(optimizer: Optimizer) -> Counterpart | None:
    return next((one for one in COUNTERPARTS if isinstance(optimizer, one.theirs)), None)


def _find_own_methods(optimizer: Optimizer, theirs: type[Optimizer]) -> list[str]:
    """Return the methods to be replaced that are not torch's: defined in a subclass, or set on the object."""
    kind, at_object = type(optimizer), dict(vars(optimizer))
    if hasattr(at_object.get("step"), "_wrapped_by_lr_sched"):
        del at_object["step"]  # a scheduler wrapped it
    # torch wraps a class's step at its first use; the wrapper refers to the original.
    return [
        name
        for name in REPLACED
        if name in at_object or inspect.unwrap(getattr(kind, name)) is not inspect.unwrap(getattr(theirs, name))
    ]


def _find_counterpart(optimizer: Optimizer) -> type[MasteredOptimizer]:
    name, found = type(optimizer).__name__, _find_kind(optimizer)
    reason = None if found is None else found.explain(optimizer)
    if found is not None and reason is not None:
        raise UsageError(
            f"a lean recipe cannot have this {name}: {reason}; change it, or use a recipe with master=fp32 and "
            "moments=fp32"
        )
    if found is None:
        alike = "Muon" if "muon" in name.lower() else "Lion" if "lion" in name.lower() else None
        other = f"narrowgauge.optim.{alike}" if alike else "torch.optim.AdamW"
        module = type(optimizer).__module__
        label = name if module.startswith("torch.") else f"{module}.{name}"  # its name may be one of those listed
        raise UsageError(
            f"a lean recipe needs AdamW, Muon, SGD or Adafactor of torch or narrowgauge, or narrowgauge's Lion, not "
            f"{label}; use {other}, or a recipe with master=fp32 and moments=fp32"
        )
    own = _find_own_methods(optimizer, found.theirs)
    if own:
        raise UsageError(
            f"a lean recipe replaces {found.own.__name__}'s {own[0]}() and would never call the one that {name} "
            f"defines; use torch.optim.{found.own.__name__} with register_step_pre_hook for what it adds, or a recipe "
            "with master=fp32 and moments=fp32"
        )
    return found.own


def _change_class(optimizer: Optimizer, own: type[MasteredOptimizer]) -> MasteredOptimizer:
    vars(optimizer).pop("step", None)  # a scheduler's wrapper of the replaced step
    optimizer.state.clear()
    optimizer.__class__ = _derive_class(type(optimizer), own)
    assert isinstance(optimizer, MasteredOptimizer)
    optimizer._patch_step_function()  # torch installs step hooks in the constructor
    return optimizer


def _derive_class(kind: type[Optimizer], own: type[MasteredOptimizer]) -> type[MasteredOptimizer]:
    """Return a class derived from narrowgauge's and the user's class, pickled by these."""

    def reduce(self: MasteredOptimizer, protocol: Any) -> Any:
        return _make_empty, (kind, own), self.__getstate__()

    if kind not in _classes:
        content = {"__reduce_ex__": reduce, "__module__": kind.__module__}
        _classes[kind] = type(kind.__name__, (own, kind), content)
    return _classes[kind]


def _make_empty(kind: type[Optimizer], own: type[MasteredOptimizer]) -> MasteredOptimizer:
    made = _derive_class(kind, own)
    return made.__new__(made)


def plain_state(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Convert a state of narrowgauge's optimizers to one that torch's load: FP32 moments, no masters.

    Load ``full_precision(model)`` into the model as well, so that no bit of the master weights is lost.

    Args:
        state_dict: From ``state_dict()`` of an optimizer, such as ``AdamW``.

    Returns:
        A new state dictionary.
    """
    states: dict[Any, Any] = {}
    for index, named in state_dict["state"].items():
        saved = strip_format_suffixes(named)
        has_masters = bool({"remainder", "master"} & set(saved))
        if not eight_bit.list_moments(saved) or not (has_masters or eight_bit.is_eight_bit(saved)):
            states[index] = named
            continue
        eight_bit.convert_moments(saved, "fp32")
        states[index] = {name: value for name, value in saved.items() if name not in ADDED}
    groups = [{k: v for k, v in group.items() if k not in FORMATS} for group in state_dict["param_groups"]]
    return {"state": states, "param_groups": groups}


ADDED = ("remainder", "check", "master", "seed")
"""Entries of a state that torch's optimizers do not have."""


def drop_masters(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return a state without remainders and copies, for checkpoints whose model is already in FP32."""
    states = {
        index: {name: value for name, value in saved.items() if name not in ADDED[:3]}
        for index, saved in state_dict["state"].items()
    }
    return {**state_dict, "state": states}
