"""Records a training step on tensors without data: every operation in order, and when memory is allocated and freed.

Memory is tracked by storages, not by tensors: views share a storage, which is freed with the last of them. An operation
allocated a storage if the storage is seen for the first time in its results; a weak reference reports when it is freed.
"""

from __future__ import annotations

import bisect
import functools
import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from narrowgauge.forecast.trace import expert_counts, flops
from narrowgauge.forecast.trace.known_results import KnownResults
from narrowgauge.forecast.trace.meter import MemoryMeter
from narrowgauge.forecast.trace.trace import Call, MemoryBlock, Op, Owner, Spec, TensorRef, Trace
from narrowgauge.op_kinds import classify

_NO_KERNEL = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view", "lift_fresh"}
_ONLY_WRITTEN = {
    "copy_",
    "fill_",
    "zero_",
    "normal_",
    "uniform_",
    "bernoulli_",
    "zeros_like",
    "full_like",
    "grad_logits",
}


class Recorder(TorchDispatchMode):
    """A dispatch mode that records a trace of what runs inside it."""

    def __init__(
        self,
        workspace: Callable[[str, list[TensorRef], list[TensorRef]], int] | None = None,
        cublas_bytes: int = 0,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.trace = Trace()
        self.meter = MemoryMeter()
        """What is allocated now, for code that asks for it while it runs."""
        self._cublas_bytes, self._threads = cublas_bytes, set[str]()
        self.phase, self.step = "build", -1
        self.compiling = False
        self.balances_experts = False
        """Whether the number of tokens per expert was needed, and assumed to be equal."""
        self._workspace = workspace or (lambda name, reads, writes: 0)
        self._paths: list[str] = [""]
        self._live: dict[int, tuple[int, Any]] = {}
        self._origin: list[tuple[int, str, bool]] = []
        self._node = -1
        self._makers: dict[int, int] = {}
        self._known = KnownResults()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Leave out torch's wrapper around ``__torch_dispatch__``, which is for compiled code: nothing is compiled."""
        return False

    @property
    def path(self) -> str:
        """The module that operations are attributed to now."""
        return self._paths[-1]

    def enter(self, path: str) -> None:
        """Attribute operations to the module at this path until ``leave``."""
        self._paths.append(path)

    def leave(self) -> None:
        """Return to the module before."""
        if len(self._paths) > 1:
            self._paths.pop()

    def compile(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Replaces torch.compile: the function runs in eager mode, and its operations are marked as compiled."""

        def run(*args: Any, **kwargs: Any) -> Any:
            before, self.compiling = self.compiling, True
            try:
                result = function(*args, **kwargs)
            finally:
                self.compiling = before
            if not before:
                self._record_outputs(result)
            return result

        return run

    def _record_outputs(self, result: Any) -> None:
        given = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor) and leaf.requires_grad]
        if any(tensor.numel() == 1 for tensor in given):
            for tensor in given:
                known = self._live.get(tensor.untyped_storage()._cdata)
                if tensor.numel() > 1 and known is not None:
                    self.trace.returned.append((len(self.trace.ops) - 1, len(self.trace.blocks)))
                    self.trace.blocks.append(MemoryBlock(tensor.numel() * tensor.element_size(), len(self.trace.ops)))

    def mark(self, tensor: Tensor | None, role: str, owner: Owner | None = None, is_copy: bool = False) -> None:
        """Set what a tensor's memory is used for, and to which parameter it belongs."""
        if tensor is not None:
            known = self._live.get(tensor.untyped_storage()._cdata)
            if known is not None:
                block = self.trace.blocks[known[0]]
                block.role, block.owner, block.is_copy = role, owner or block.owner, is_copy

    def mark_copy(self, tensor: Tensor, owner: Owner | None = None) -> None:
        """Mark a copy of a weight; a copy that shares the weight's memory keeps its role."""
        known = self._live.get(tensor.untyped_storage()._cdata)
        if known is not None and self.trace.blocks[known[0]].role == "activations":
            self.mark(tensor, "weights", owner, is_copy=True)

    def launch(self, kernel: str, reads: Sequence[Tensor], writes: Sequence[Tensor]) -> None:
        """Record a kernel that is launched without going through torch's dispatcher."""
        read, written = ([self._ref(tensor) for tensor in tensors] for tensors in (reads, writes))
        where, kind = self._paths[-1], classify(f"narrowgauge::{kernel}")
        name = f"narrowgauge.{kernel}"
        self.trace.ops.append(Op(name, kind, self.phase, self.step, where, False, read, written, flops=0.0))

    def close(self) -> Trace:
        """Return the trace; what is freed later does not belong to it."""
        done, self.trace = self.trace, Trace(self.trace.ops, self.trace.blocks, [], self.trace.returned)
        return done

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunction():  # meta tensors are reported as such in here
            return self._run(func, args, kwargs or {})

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        where, compiled = self._locate()
        result, balanced = self._known.call(func, args, kwargs, _call)
        expert_counts.track(func, args, kwargs, result)
        self.balances_experts |= balanced
        tensors, made = _tensors(args) + _tensors(tuple(kwargs.values())), _tensors(result)
        if not any(tensor.is_meta for tensor in (*tensors, *made)):
            return result  # on the host
        name, arguments, written = _read_schema(func)
        given = {**dict(zip(arguments, args, strict=False)), **kwargs}
        changed = _tensors([given[argument] for argument in written if argument in given])
        fresh = [tensor for tensor in made if self._is_new(tensor)]
        for tensor in fresh:
            self._allocate(tensor, len(self.trace.ops))
        reads = [t for t in tensors if not (name in _ONLY_WRITTEN and any(t is other for other in changed))]
        op = Op(
            name if func.namespace == "aten" else f"{func.namespace}.{name}",
            classify(func._schema.name),
            self.phase,
            self.step,
            where,
            compiled,
            [self._ref(tensor) for tensor in reads],
            [self._ref(tensor) for tensor in (*changed, *fresh)],
            flops.count_flops(func, args, kwargs, given, result),
            causal=bool(given.get("is_causal", False)),
            accumulates=name == "add" and self._is_accumulation(tensors),
        )
        if name in _NO_KERNEL or not op.writes:
            op.kind, op.reads, op.writes = "view", [], []  # no kernel runs
        else:
            op.call = Call(func, _specs(args), tuple((key, _specs(value)) for key, value in kwargs.items()))
            flops.correct_bytes(op)
            op.workspace = self._workspace(name, op.reads, op.writes)
            if compiled and op.kind == "product":
                op.workspace += flops.count_padding_bytes(op)
            self._meter_workspace(op)
        self.trace.ops.append(op)
        return result

    def _meter_workspace(self, op: Op) -> None:
        """Count what libraries allocate for an operation, in addition to its results."""
        if op.kind == "product" and self._cublas_bytes and op.phase not in self._threads:
            self._threads.add(op.phase)
            self.meter.add_forever(self._cublas_bytes)
        if op.workspace:
            self.meter.add_briefly(op.workspace)

    def _locate(self) -> tuple[str, bool]:
        """The module of an operation, and whether it is compiled; in backward those of the forward operation."""
        path, compiled = self._paths[-1], self.compiling
        node = torch._C._current_autograd_node() if self.phase == "backward" else None
        self._node = -1 if node is None else node._sequence_nr()
        if node is not None:
            place = bisect.bisect_right(self._origin, self._node, key=lambda entry: entry[0]) - 1
            if place >= 0:
                path, compiled = path or self._origin[place][1], compiled or self._origin[place][2]
        newest = torch.autograd._get_sequence_nr() - 1  # type: ignore[attr-defined]
        if not self._origin or self._origin[-1][0] < newest:
            self._origin.append((newest, path, compiled))
        return path, compiled

    def _is_accumulation(self, tensors: list[Tensor]) -> bool:
        """Whether autograd sums gradients of two nodes: it does so in C++, which no function mode sees."""
        if self.phase != "backward" or not torch._C._len_torch_function_stack() or len(tensors) != 2:
            return False
        known = self._live.get(tensors[0].untyped_storage()._cdata)
        maker = self._makers.get(known[0], self._node) if known is not None else self._node
        return maker != self._node and tensors[0].shape == tensors[1].shape

    def _is_new(self, tensor: Tensor) -> bool:
        return tensor.is_meta and tensor.layout is torch.strided and tensor.untyped_storage()._cdata not in self._live

    def _allocate(self, tensor: Tensor, op: int) -> None:
        storage = tensor.untyped_storage()
        address, number = storage._cdata, len(self.trace.blocks)
        if address in self._live or not storage.nbytes():
            return

        def gone(_: Any) -> None:
            self._live.pop(address, None)
            self.meter.release(number)
            self.trace.events.append((len(self.trace.ops) - 1, -(number + 1)))

        role = "workspace" if self.phase == "build" else "activations"
        self.trace.blocks.append(MemoryBlock(storage.nbytes(), op, role))
        self.trace.events.append((op, number + 1))
        self.meter.allocate(number, storage.nbytes())
        self._live[address] = number, weakref.ref(storage, gone)
        if self.phase == "backward":
            self._makers[number] = self._node

    def _ref(self, tensor: Tensor) -> TensorRef:
        known = self._live.get(tensor.untyped_storage()._cdata) if tensor.is_meta else None
        shape, stride = tuple(tensor.shape), tensor.stride()
        count = math.prod(shape)
        if 0 in stride:  # an expanded dimension is read once
            count = math.prod(size for size, step in zip(shape, stride, strict=True) if step)
        return TensorRef(known[0] if known else -1, count * tensor.element_size(), shape, tensor.dtype)


def _call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, bool]:
    """Run an operation without data; for those that some versions of torch cannot, return what they would.

    The second value says whether its tokens were assumed to be divided equally among experts.
    """
    if func is torch.ops.aten._grouped_mm.default and args[0].is_meta and args[0].dtype is not torch.bfloat16:
        # Its kernels support FP32 and FP16 as well, its meta function does not.
        shapes = [x.new_empty_strided(x.shape, x.stride(), dtype=torch.bfloat16) for x in args[:2]]
        return func(*shapes, *args[2:], **kwargs).to(args[0].dtype), True
    try:
        return expert_counts.call(func, args, kwargs)
    except NotImplementedError:
        if func is torch.ops.aten.mm.dtype:
            return args[0].new_empty((args[0].shape[0], args[1].shape[1]), dtype=args[2]), False
        if func is torch.ops.aten._amp_update_scale_.default:
            return args[0], False
        raise


@functools.cache
def _read_schema(func: Any) -> tuple[str, list[str], list[str]]:
    """The name of an operation, the names of its arguments, and of those that it writes."""
    arguments = func._schema.arguments
    written = [one.name for one in arguments if one.alias_info is not None and one.alias_info.is_write]
    return func._schema.name.split("::")[1], [one.name for one in arguments], written


def _specs(nest: Any) -> Any:
    if isinstance(nest, Tensor):
        return Spec(tuple(nest.shape), nest.stride(), nest.dtype)
    return tuple(_specs(item) for item in nest) if isinstance(nest, list | tuple) else nest


def _tensors(nest: Any) -> list[Tensor]:
    if isinstance(nest, Tensor):
        return [nest]
    if isinstance(nest, list | tuple):
        return [tensor for item in nest for tensor in _tensors(item)]
    return []
