"""Converts a user's AdamW to narrowgauge's in place, and keeps its groups, learning rates and state.

The optimizer stays the object that the user, schedulers and hooks refer to. Its class becomes one that steps, saves,
loads and adds groups as narrowgauge's AdamW does, and that still derives from the original class.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.optim import Adam, Optimizer

from narrowgauge.errors import UsageError
from narrowgauge.optim import moments as eight_bit
from narrowgauge.optim.adamw import FORMATS, AdamW, check_group, set_grad_dtype
from narrowgauge.optim.masters import narrow
from narrowgauge.optim.sharded import check_gradients
from narrowgauge.optim.state_dict_format import strip_format_suffixes

REPLACED = ("step", "state_dict", "load_state_dict", "add_param_group")
"""Methods that narrowgauge's AdamW replaces."""
_classes: dict[type[Optimizer], type[AdamW]] = {}


def convert_optimizer(
    optimizer: Optimizer, master: str, moments: str, narrowed: Iterable[nn.Parameter], gradients: str = "bf16"
) -> AdamW:
    """Convert an AdamW optimizer to ``narrowgauge.optim.AdamW`` in place.

    Args:
        optimizer: torch.optim.AdamW, Adam without coupled weight decay, a plain subclass, or narrowgauge's AdamW.
        master: Format of the masters, as in ``AdamW``.
        moments: Format of the moments, as in ``AdamW``.
        narrowed: Parameters to turn into BF16 with remainders, as ``narrow`` does.
        gradients: Format of the gradients of BF16 parameters, as in ``AdamW``.

    Returns:
        The same object, now also an instance of ``AdamW``.

    Raises:
        UsageError: The optimizer is not AdamW, overrides a method that would be replaced, or gradients exist already.
    """
    formats = {"master": master, "moments": moments, "gradients": gradients}
    if not isinstance(optimizer, AdamW):
        _check(optimizer)
    for group in optimizer.param_groups:
        check_group({"maximize": False} | group | formats)
    own = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    for parameter in narrowed:
        if parameter in own:
            if parameter.grad is not None:
                raise UsageError("lean recipe: a parameter already has a gradient; create the engine before backward")
            check_gradients(parameter, gradients)
            set_grad_dtype(narrow(parameter), gradients)
    state = Optimizer.state_dict(optimizer) if not isinstance(optimizer, AdamW) else optimizer.state_dict()
    new = optimizer if isinstance(optimizer, AdamW) else _change_class(optimizer)
    new.defaults |= {"maximize": False} | new.defaults | formats
    for group in new.param_groups:
        group.update({"maximize": False} | group | formats)
    new.__dict__.pop("release", None)  # of an earlier engine
    if state["state"]:
        new.load_state_dict(state)
    return new


def can_convert(optimizer: Optimizer) -> bool:
    """Whether an optimizer is an AdamW, or a plain subclass, that can be converted."""
    return isinstance(optimizer, AdamW) or (_is_adamw(optimizer) and not _find_own_methods(optimizer))


def _is_adamw(optimizer: Optimizer) -> bool:
    decoupled = isinstance(optimizer, Adam) and all(
        group.get("decoupled_weight_decay", False) or not group["weight_decay"] for group in optimizer.param_groups
    )
    return decoupled and not any(group.get("amsgrad") for group in optimizer.param_groups)


def _find_own_methods(optimizer: Optimizer) -> list[str]:
    """Return the methods to be replaced that are not torch's: defined in a subclass, or set on the object."""
    kind, at_object = type(optimizer), dict(vars(optimizer))
    if hasattr(at_object.get("step"), "_wrapped_by_lr_sched"):
        del at_object["step"]  # a scheduler wrapped it
    # torch wraps a class's step at its first use; the wrapper refers to the original.
    return [
        name
        for name in REPLACED
        if name in at_object or inspect.unwrap(getattr(kind, name)) is not inspect.unwrap(getattr(Adam, name))
    ]


def _check(optimizer: Optimizer) -> None:
    name, own = type(optimizer).__name__, _find_own_methods(optimizer)
    if not _is_adamw(optimizer):
        raise UsageError(
            f"a lean recipe needs AdamW, not {name} (nor amsgrad, nor Adam's coupled weight decay); use "
            "torch.optim.AdamW, or a recipe with master=fp32 and moments=fp32"
        )
    if own:
        raise UsageError(
            f"a lean recipe replaces AdamW's {own[0]}() and would never call the one that {name} defines; use "
            "torch.optim.AdamW with register_step_pre_hook for what it adds, or a recipe with master=fp32 and "
            "moments=fp32"
        )


def _change_class(optimizer: Optimizer) -> AdamW:
    vars(optimizer).pop("step", None)  # a scheduler's wrapper of the replaced step
    optimizer.state.clear()
    optimizer.__class__ = _derive_class(type(optimizer))
    assert isinstance(optimizer, AdamW)
    optimizer._patch_step_function()  # torch installs step hooks in the constructor
    return optimizer


def _derive_class(kind: type[Optimizer]) -> type[AdamW]:
    """Return a class derived from narrowgauge's AdamW and the user's class, pickled by the user's class."""

    def reduce(self: AdamW, protocol: Any) -> Any:
        return _make_empty, (kind,), self.__getstate__()

    if kind not in _classes:
        content = {"__reduce_ex__": reduce, "__module__": kind.__module__}
        _classes[kind] = type(kind.__name__, (AdamW, kind), content)
    return _classes[kind]


def _make_empty(kind: type[Optimizer]) -> AdamW:
    made = _derive_class(kind)
    return made.__new__(made)


def plain_state(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Convert a state of narrowgauge's AdamW to one that torch.optim.AdamW loads: FP32 moments, no masters.

    Load ``full_precision(model)`` into the model as well, so that no bit of the master weights is lost.

    Args:
        state_dict: From ``AdamW.state_dict()``.

    Returns:
        A new state dictionary.
    """
    states: dict[Any, Any] = {}
    for index, named in state_dict["state"].items():
        saved = strip_format_suffixes(named)
        if "exp_avg" not in saved or not ({"exp_avg_scale", "remainder", "master"} & set(saved)):
            states[index] = named
            continue
        first, second = saved["exp_avg"], saved["exp_avg_sq"]
        if "exp_avg_scale" in saved:
            first = eight_bit.decode_first(first.reshape(-1), saved["exp_avg_scale"]).view(first.shape)
            second = eight_bit.decode_second(second.reshape(-1), saved["exp_avg_sq_scale"]).view(second.shape)
        states[index] = {"step": saved["step"], "exp_avg": first.float(), "exp_avg_sq": second.float()}
    groups = [{k: v for k, v in group.items() if k not in FORMATS} for group in state_dict["param_groups"]]
    return {"state": states, "param_groups": groups}


def drop_masters(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return a state without remainders and copies, for checkpoints whose model is already in FP32."""
    states = {
        index: {name: value for name, value in saved.items() if name not in ("remainder", "check", "master")}
        for index, saved in state_dict["state"].items()
    }
    return {**state_dict, "state": states}
