"""FunctionReader: reads what functions compute between modules, in the forward of an update that is read.

Hooks see the outputs of modules. Much is computed in functions: activations (``F.relu``), attention, rotary positions.
A function mode sees each call, and its result is not changed. It reads

    dead_units         of an activation: the share of its units that no sample of the microbatch activates
    attention_logits   of an attention: how far the largest logit of a row is above the row's mean, at most
    coarse_angles      of sin and cos in 16 bits: the rounding error of the largest angle, in radians
    coarse_positions   1 for positions counted in a 16-bit format beyond what it can count
    intermediate       the largest magnitude of a result that FP16 autocast would hold in FP16 (``autocast_flow``)

Values computed without gradients, inside torch.func's transforms or in compiled code are not read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from narrowgauge.gauges.watch.attention_logits import measure_attention, measure_packed_attention, measure_softmax
from narrowgauge.gauges.watch.autocast_flow import AutocastFlow
from narrowgauge.nn.eager_modes import EagerFunctionMode

_MIN_UNITS, _MIN_SAMPLES = 16, 16
_MASK = -1e30
"""Values below this are masks, which code writes in the range of its own format."""
_COUNTS = {torch.bfloat16: 256, torch.float16: 2048}
"""The integers up to which a format holds each one."""
_ANGLES = frozenset({torch.sin, torch.cos, Tensor.sin, Tensor.cos, Tensor.sin_, Tensor.cos_})
_SOFTMAXES = frozenset({F.softmax, torch.softmax, Tensor.softmax})
_ZERO_BELOW = frozenset({F.relu, F.relu_, torch.relu, torch.relu_, Tensor.relu, Tensor.relu_, F.relu6, F.hardswish})
_DEAD_BELOW = {F.gelu: -5.0, F.silu: -12.0, F.mish: -12.0, F.softplus: -15.0}
"""Inputs below which a smooth activation has a slope of less than 1e-4: GELU 2e-6, SiLU 7e-5."""
_CHANNELS_FIRST = frozenset({F.conv1d, F.conv2d, F.conv3d, F.batch_norm, F.group_norm, F.instance_norm})
_UNITS_LAST = frozenset({F.linear, F.layer_norm, F.rms_norm})
_SUMS = frozenset({torch.add, Tensor.add, Tensor.__add__, Tensor.__iadd__, Tensor.add_, F.dropout})


class FunctionReader(EagerFunctionMode):
    """Reads the results of functions during one forward, and adds them to the facts of a snapshot."""

    def __init__(self, facts: dict[tuple[str, str], Tensor], autocast: bool) -> None:
        super().__init__()
        self.facts = facts
        self.flow = AutocastFlow(autocast)
        self.path: list[str] = [""]
        """The modules that are being called, the innermost last."""
        self._layers: WeakIdKeyDictionary = WeakIdKeyDictionary()
        """The dimension of the units of each tensor that a layer, or a sum with one, has computed."""
        self._calls: dict[str, int] = {}

    def enter(self, path: str) -> Callable[..., None]:
        """Return the hook to call before a module's forward."""
        return lambda *_: self.path.append(path)

    def leave(self, *_: Any) -> None:
        """The hook to call after a module's forward."""
        self.path.pop()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_compiling() or not torch.is_grad_enabled() or any(map(_is_wrapped, args)):
            return func(*args, **kwargs)
        with torch.no_grad(), torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
            self._read_inputs(func, args, kwargs)
        result = func(*args, **kwargs)
        for part in result if isinstance(result, tuple | list) else ():  # of chunk, split, unbind
            if isinstance(part, Tensor) and part.is_floating_point():
                self.flow.add(func, args, part)
        if isinstance(result, Tensor) and result.is_floating_point() and result.numel() and not _is_wrapped(result):
            with torch.no_grad(), torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
                self._read_result(func, args, kwargs, result)
        return result

    def _read_inputs(self, func: Any, args: Any, kwargs: Any) -> None:
        first = args[0] if args and isinstance(args[0], Tensor) else None
        if func in _SOFTMAXES and first is not None:
            self._keep_largest("attention_logits", self.path[-1], measure_softmax(first, args, kwargs))
        elif func is F.scaled_dot_product_attention:
            self._keep_largest("attention_logits", self.path[-1], measure_attention(*args, **kwargs))
        elif func is F.multi_head_attention_forward:
            self._keep_largest("attention_logits", self.path[-1], measure_packed_attention(*args, **kwargs))
        elif func in _ANGLES and first is not None and first.dtype in _COUNTS and first.numel():
            error = first.abs().amax().float() / (2 * _COUNTS[first.dtype])
            self._keep_largest("coarse_angles", self.path[-1], error)
        elif func in _DEAD_BELOW and first is not None and first in self._layers:
            self._add_units(func, first < _DEAD_BELOW[func], self._layers[first])
        for place, tensor in self.flow.find_narrowed(func, args):
            self._keep_largest("intermediate", f"{self.path[-1]}\n{place}", _measure_largest(tensor))

    def _read_result(self, func: Any, args: Any, kwargs: Any, result: Tensor) -> None:
        first = args[0] if args and isinstance(args[0], Tensor) else None
        if func is torch.arange and result.numel() > _COUNTS.get(result.dtype, result.numel()):
            self.facts["coarse_positions", self.path[-1]] = result.new_ones(())
        dimension = self._layers.get(first) if first is not None else None
        is_relu = func in _ZERO_BELOW or (func in (torch.clamp, Tensor.clamp, Tensor.clamp_) and _is_relu(args, kwargs))
        if is_relu and dimension is not None:
            self._add_units(func, result == 0, dimension)
        if func in _CHANNELS_FIRST:
            self._layers[result] = 1
        elif func in _UNITS_LAST:
            self._layers[result] = -1
        elif func in _SUMS:
            known = [self._layers[one] for one in args[:2] if isinstance(one, Tensor) and one in self._layers]
            if known:
                self._layers[result] = known[0]
        if self.flow.add(func, args, result) and result._base is None:
            name = getattr(func, "__name__", str(func)).strip("_")
            self._keep_largest("intermediate", f"{self.path[-1]}\n{name}", _measure_largest(result))

    def _add_units(self, func: Any, inactive: Tensor, dimension: int) -> None:
        if inactive.dim() < 2:
            return
        units = inactive.movedim(dimension, -1)
        units = units.reshape(-1, units.shape[-1])
        if units.shape[0] < _MIN_SAMPLES or units.shape[1] < _MIN_UNITS:
            return
        place = self.path[-1] or getattr(func, "__name__", "activation")
        self._calls[place] = self._calls.get(place, 0) + 1
        place += f" (call {self._calls[place]})" if self._calls[place] > 1 else ""
        self.facts["dead_units", place] = units.all(0).float().mean()

    def _keep_largest(self, name: str, place: str, value: Tensor | None) -> None:
        if value is not None:
            before = self.facts.get((name, place))
            value = value.detach().float()
            self.facts[name, place] = value if before is None else torch.maximum(before, value.to(before.device))


def has_compiled_parts(model: nn.Module) -> bool:
    """Whether parts of the model are compiled by the user: a mode around them would compile them once more."""
    return any(hasattr(one, "_orig_mod") or one._compiled_call_impl is not None for one in model.modules())


def _measure_largest(tensor: Tensor) -> Tensor:
    """The largest magnitude; 0 if it is not finite. Large negative masks do not count."""
    low, high = torch.aminmax(tensor.detach())
    low, high = low.float(), high.float()
    return torch.nan_to_num(torch.maximum(torch.where(low > _MASK, -low, 0), high), nan=0.0, posinf=0.0, neginf=0.0)


def _is_relu(args: Any, kwargs: Any) -> bool:
    low = args[1] if len(args) > 1 else kwargs.get("min")
    return isinstance(low, int | float) and low == 0


def _is_wrapped(value: Any) -> bool:
    return isinstance(value, Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(value)
