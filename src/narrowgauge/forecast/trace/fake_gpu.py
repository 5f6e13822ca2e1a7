"""Simulates a GPU that is not installed: inside ``simulate_gpu`` the engine and the model run as if on it.

Tensors of the simulated GPU are torch's meta tensors, which have shapes, formats and storages but no data. A function
mode reports them as being on ``cuda:0``, turns requests for that device into requests for meta tensors, and makes the
choices that torch makes by device and that meta tensors would get otherwise (``cuda_rules``). What describes the
machine (``hardware.detect``, ``torch.cuda``, Triton) is answered from the table of GPUs. FakeTensor, the obvious
alternative, cannot run autograd for CUDA on a PyTorch that was built without it.

Tensors on the host stay real, so that what the host computes (sizes, tables of addresses) is computed. A value that is
read from the GPU is 0: gradients are then finite and nothing is skipped. ``values_read`` counts these reads. Numbers of
tokens per expert are those of balanced experts instead (``expert_counts``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from narrowgauge import hardware
from narrowgauge.forecast.trace import cuda_rules, expert_counts
from narrowgauge.forecast.trace.meter import MemoryMeter
from narrowgauge.forecast.trace.torch_overrides import override_torch
from narrowgauge.hardware import Device, Gpu
from narrowgauge.kernels.dry_run import dry_run
from narrowgauge.nn.fused.lazy_logits import METADATA, LazyLogits

_SELECTS = (Tensor.__getitem__, Tensor.__setitem__)
CUDA = torch.device("cuda:0")
META = torch.device("meta")
_READS: dict[Any, Callable[[Tensor], Any]] = {
    Tensor.item: lambda t: t.item(),
    Tensor.tolist: lambda t: t.tolist(),
    Tensor.numpy: lambda t: t.numpy(),
    Tensor.cpu: lambda t: t,
    Tensor.__bool__: bool,
    Tensor.__int__: int,
    Tensor.__index__: lambda t: t.__index__(),
    Tensor.__float__: float,
}
"""Functions that read values, and what they return for host values in place of those of the GPU."""


def describe_device(gpu: Gpu) -> Device:
    """The ``Device`` of a GPU in the table, as if it was installed."""
    return hardware.describe_gpu(f"NVIDIA {gpu.name}", 0, gpu.capability, gpu.memory_bytes)


@contextlib.contextmanager
def simulate_gpu(
    gpu: Gpu,
    compile_function: Callable[[Any], Any] | None = None,
    has_documents: bool = False,
    meter: MemoryMeter | None = None,
) -> Iterator[SimulatedGpu]:
    """Run code as if ``gpu`` was installed as cuda:0.

    Args:
        gpu: The GPU to simulate.
        compile_function: Replaces torch.compile.
        has_documents: Batches give the positions of their tokens, so that rows may be packed documents.
        meter: Answers how much memory is allocated; by default nothing.
    """
    device, rules = describe_device(gpu), cuda_rules.Rules(gpu.capability)
    compiled = compile_function or (lambda function: function)
    with contextlib.ExitStack() as stack:
        stack.enter_context(hardware.assume(device))
        stack.enter_context(dry_run())
        stack.enter_context(override_torch(gpu, device, rules, compiled, has_documents, meter))
        yield stack.enter_context(SimulatedGpu(rules))


class SimulatedGpu(TorchFunctionMode):
    """Reports meta tensors as being on cuda:0, and lets them be made, moved and read as if they were."""

    def __init__(self, rules: cuda_rules.Rules) -> None:
        super().__init__()
        self.rules = rules
        self.values_read = 0
        """How often a value was read from the GPU."""
        self.balances_experts = False
        """Whether numbers of tokens per expert were read."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in METADATA and any(issubclass(kind, LazyLogits) for kind in types):
            with self:  # what they compute is on the GPU as well
                return LazyLogits.__torch_function__(func, types, args, kwargs)
        kwargs = dict(kwargs or {})
        if "device" in kwargs:
            kwargs["device"] = _replace_cuda(kwargs["device"])
        getter = _GETTERS.get(getattr(func, "__self__", None)) if getattr(func, "__name__", "") == "__get__" else None
        if getter is not None:
            return getter(args[0])
        if func is Tensor.backward:
            return self._backward(*args, **kwargs)
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        first = args[0] if args and isinstance(args[0], Tensor) else None
        if first is not None and first.device.type == "meta" and func in _READS:
            return _READS[func](self.read(first))
        if func in _SELECTS and isinstance(args[1], Tensor | tuple):
            args = args[0], self._read_positions(args[1]), *args[2:]
        if func in _MOVES:
            return _MOVES[func](self, func, *args, **kwargs)
        return self.rules.run(func, args, kwargs)

    def read(self, tensor: Tensor) -> Tensor:
        """The values of a tensor of the GPU, on the host: zeros, or those of balanced experts."""
        known = expert_counts.get_values(tensor)
        if known is not None:
            self.balances_experts = True
            return known
        self.values_read += 1
        return torch.zeros(tensor.shape, dtype=tensor.dtype)

    def _read_positions(self, index: Any) -> Any:
        """A position that is a single number on the GPU is read, as torch does: ``weights[expert]``."""
        if isinstance(index, tuple):
            return tuple(self._read_positions(one) for one in index)
        is_number = isinstance(index, Tensor) and index.dim() == 0 and index.device.type == "meta"
        if not is_number or index.dtype is torch.bool or index.is_floating_point():
            return index
        return int(self.read(index))

    def _backward(self, loss: Tensor, gradient: Tensor | None = None, *rest: Any, **options: Any) -> None:
        """Tensor.backward, whose own body would run the whole backward pass outside of this mode."""
        keep, create = (*rest, options.get("retain_graph"), options.get("create_graph", False))[:2]
        inputs = options.get("inputs")
        leaves = () if inputs is None else (inputs,) if isinstance(inputs, Tensor) else tuple(inputs)
        gradient = torch.ones_like(loss) if gradient is None else gradient
        run: Any = torch.autograd.Variable._execution_engine.run_backward
        with self:
            run((loss,), (gradient,), bool(keep or create), create, leaves, allow_unreachable=True,
                accumulate_grad=True)  # fmt: skip


def _replace_cuda(device: Any) -> Any:
    """The meta device for a CUDA device; any other as it is."""
    name = device.type if isinstance(device, torch.device) else device
    return META if isinstance(name, str) and name.split(":")[0] == "cuda" else device


def _move(mode: SimulatedGpu, func: Any, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Tensor.to: what leaves the GPU is zeros."""
    args = tuple(_replace_cuda(argument) for argument in args)
    targets = (*args, *kwargs.values())
    leaves = any(str(target).startswith("cpu") for target in targets if isinstance(target, str | torch.device))
    if tensor.device.type == "meta" and leaves:
        return mode.read(tensor).to(next((t for t in targets if isinstance(t, torch.dtype)), tensor.dtype))
    return func(tensor, *args, **kwargs)


def _copy(mode: SimulatedGpu, func: Any, target: Tensor, source: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Tensor.copy_: a host tensor that receives values from the GPU becomes zeros."""
    if target.device.type == "cpu" and source.device.type == "meta":
        return target.copy_(mode.read(source))
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
"""Attributes that are simulated. The mode is off in these functions, so a tensor's own attributes are the real ones."""
