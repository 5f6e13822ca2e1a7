"""A GPU that is not there: inside ``pretend`` the engine and the model believe in it, and no memory is touched.

Tensors of the pretended GPU are torch's meta tensors, which have shapes, formats and storages but no data. A function
mode says that they are on ``cuda:0``, turns requests for that device into requests for meta tensors, and answers what
torch decides by device and meta tensors would decide otherwise (``cuda_rules``). Everything that asks the machine
itself (``hardware.detect``, ``torch.cuda``, Triton) gets its answer from the table of GPUs. This is the one place that
does so: nothing in the engine or its kernels knows that it is being forecast. FakeTensor, which would be the obvious
means, cannot run autograd for CUDA on a PyTorch that was built without it.

Tensors on the host stay real, so that what the host reckons (sizes, tables of addresses) is reckoned. A number that is
asked of the GPU is 0: gradients are then finite, nothing is skipped, and ``asked`` counts the questions.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor
from torch.overrides import TorchFunctionMode

from narrowgauge import hardware, kernels
from narrowgauge.forecast.trace import cuda_rules
from narrowgauge.hardware import Device, Gpu
from narrowgauge.kernels import adamw, multi_tensor
from narrowgauge.nn.products import choose_formats

CUDA = torch.device("cuda:0")
META = torch.device("meta")
_NUMBERS: dict[Any, Callable[[Tensor], Any]] = {
    Tensor.item: lambda t: t.new_zeros((), device="cpu").item(),
    Tensor.tolist: lambda t: torch.zeros(t.shape, dtype=t.dtype).tolist(),
    Tensor.numpy: lambda t: torch.zeros(t.shape, dtype=t.dtype).numpy(),
    Tensor.cpu: lambda t: torch.zeros(t.shape, dtype=t.dtype),
    Tensor.__bool__: lambda t: False,
    Tensor.__int__: lambda t: 0,
    Tensor.__index__: lambda t: 0,
    Tensor.__float__: lambda t: 0.0,
}
"""Questions for values, and what is answered: zeros."""


def device_of(gpu: Gpu) -> Device:
    """A GPU of the table as if it were at hand."""
    return hardware.describe_gpu(f"NVIDIA {gpu.name}", 0, gpu.capability, gpu.memory_bytes)


@contextlib.contextmanager
def pretend(gpu: Gpu, compiling: Callable[[Any], Any] | None = None) -> Iterator[Pretence]:
    """Make code believe that ``gpu`` is at hand as cuda:0; ``compiling`` stands for torch.compile."""
    device, rules = device_of(gpu), cuda_rules.Rules(gpu.capability)
    with contextlib.ExitStack() as stack:
        for owner, name, value in _patches(gpu, device, rules, compiling or (lambda function: function)):
            stack.enter_context(mock.patch.object(owner, name, value))
        # Recomputation compares devices too, which hooks see with and without the lie.
        checks: Any = torch.utils.checkpoint._allowed_determinism_checks_to_fns
        stack.enter_context(mock.patch.dict(checks, default=lambda tensor: (tensor.shape, tensor.dtype)))
        yield stack.enter_context(Pretence(rules))


class Pretence(TorchFunctionMode):
    """Says that meta tensors are on cuda:0, and lets them be made, moved and asked as if they were."""

    def __init__(self, rules: cuda_rules.Rules) -> None:
        super().__init__()
        self.rules = rules
        self.asked = 0
        """How often a value was asked of the GPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = {name: _placed(value) if name == "device" else value for name, value in (kwargs or {}).items()}
        getter = _GETTERS.get(getattr(func, "__self__", None)) if getattr(func, "__name__", "") == "__get__" else None
        if getter is not None:
            return getter(args[0])
        if func is Tensor.backward:
            return self._backward(*args, **kwargs)
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        first = args[0] if args and isinstance(args[0], Tensor) else None
        if first is not None and first.device.type == "meta" and func in _NUMBERS:
            self.asked += 1
            return _NUMBERS[func](first)
        if func in _MOVES:
            return _MOVES[func](self, func, *args, **kwargs)
        return self.rules.run(func, args, kwargs)

    def _backward(self, loss: Tensor, gradient: Tensor | None = None, *rest: Any, **options: Any) -> None:
        """As Tensor.backward, whose own body would run the whole backward pass outside of this mode."""
        keep, create = (*rest, options.get("retain_graph"), options.get("create_graph", False))[:2]
        inputs = options.get("inputs")
        leaves = () if inputs is None else (inputs,) if isinstance(inputs, Tensor) else tuple(inputs)
        gradient = torch.ones_like(loss) if gradient is None else gradient
        run: Any = torch.autograd.Variable._execution_engine.run_backward
        with self:
            run((loss,), (gradient,), bool(keep or create), create, leaves, allow_unreachable=True,
                accumulate_grad=True)  # fmt: skip


def _placed(device: Any) -> Any:
    """The device that stands for a device."""
    name = device.type if isinstance(device, torch.device) else device
    return META if isinstance(name, str) and name.split(":")[0] == "cuda" else device


def _move(mode: Pretence, func: Any, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Tensor.to: what leaves the GPU is zeros."""
    args = tuple(_placed(argument) for argument in args)
    targets = (*args, *kwargs.values())
    leaves = any(str(target).startswith("cpu") for target in targets if isinstance(target, str | torch.device))
    if tensor.device.type == "meta" and leaves:
        mode.asked += 1
        return torch.zeros(tensor.shape, dtype=next((t for t in targets if isinstance(t, torch.dtype)), tensor.dtype))
    return func(tensor, *args, **kwargs)


def _copy(mode: Pretence, func: Any, target: Tensor, source: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Tensor.copy_: a host tensor that is read back into becomes zeros."""
    if target.device.type == "cpu" and source.device.type == "meta":
        mode.asked += 1
        return target.zero_()
    copied: Tensor = func(target, source, *args, **kwargs)
    return copied


_MOVES: dict[Any, Callable[..., Any]] = {
    Tensor.to: _move,
    Tensor.cuda: lambda mode, func, tensor, *args, **kwargs: tensor.to(META),
    Tensor.copy_: _copy,
    Tensor.pin_memory: lambda mode, func, tensor, *args, **kwargs: tensor,
    Tensor.get_device: lambda mode, func, tensor: func(tensor) if tensor.device.type == "cpu" else 0,
}
_GETTERS: dict[Any, Callable[[Tensor], Any]] = {
    Tensor.device: lambda t: CUDA if t.device.type == "meta" else t.device,
    Tensor.is_cuda: lambda t: t.device.type == "meta",
    Tensor.is_meta: lambda t: False,
}
"""Attributes that are lied about. In here the mode is off, so that a tensor's own answer is the true one."""


class _Mark:
    """Stands for CUDA's events and streams: everything has happened already."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.cuda_stream = 0

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Any) -> float:
        return 1.0

    def _nothing(self, *args: Any, **kwargs: Any) -> None:
        return None

    record = synchronize = wait = wait_stream = wait_event = record_event = __enter__ = __exit__ = _nothing


class _Launch:
    """Stands for a Triton kernel that is launched directly."""

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return lambda *args, **kwargs: None


def _patches(
    gpu: Gpu, device: Device, rules: cuda_rules.Rules, compiling: Callable[[Any], Any]
) -> Iterator[tuple[Any, str, Any]]:
    """What is set in whose place, and put back afterwards."""
    yield hardware, "detect", lambda device_text=None: device
    yield choose_formats, "measured", lambda *args: None  # nothing is timed: the table of GPUs predicts
    yield kernels, "HAVE_TRITON", True
    for kernel in ("_squares_kernel", "_norms_kernel", "_adamw_kernel"):
        yield adamw, kernel, _Launch()
    yield (
        adamw,
        "pieces",
        functools.lru_cache(multi_tensor.pieces.__wrapped__),
    )  # its own cache: meta tensors must not stay

    def compile(function: Any = None, **options: Any) -> Any:
        return compiling if function is None else compiling(function)

    yield torch, "compile", compile
    yield torch, "clear_autocast_cache", rules.forget
    yield F, "scaled_dot_product_attention", rules.attention  # called from inside of torch's own Python functions,
    yield F, "dropout", rules.dropout  # where no mode looks
    properties = SimpleNamespace(
        name=device.name, major=gpu.capability[0], minor=gpu.capability[1], total_memory=gpu.memory_bytes,
        multi_processor_count=gpu.sms, L2_cache_size=gpu.l2_bytes,
    )  # fmt: skip
    answers: dict[str, Any] = {
        "is_available": True,
        "is_initialized": False,  # so that seeds are noted, not sent
        "device_count": 1,
        "current_device": 0,
        "get_device_name": device.name,
        "get_device_capability": gpu.capability,
        "get_device_properties": properties,
        "is_bf16_supported": "bf16" in device.native,
        "is_current_stream_capturing": False,
        "memory_allocated": 0,
        "max_memory_allocated": 0,
        "current_stream": _Mark(),
        "device": contextlib.nullcontext(),
        **dict.fromkeys(("synchronize", "empty_cache", "reset_peak_memory_stats", "set_device")),
    }
    for name, answer in answers.items():
        yield torch.cuda, name, functools.partial(_answer, answer)
    yield torch.cuda, "_initialized", False  # recomputation would fetch random states
    yield torch.cuda, "Event", _Mark
    yield torch.cuda, "Stream", _Mark


def _answer(value: Any, *args: Any, **kwargs: Any) -> Any:
    return value
