"""Recordings of a block's forward and backward as CUDA graphs: their memory, and how inputs and outputs pass through.

What a graph leaves for later stays allocated: what forward saved, outputs, gradients of inputs. The memory of
intermediate results is free after a recording, and serves later recordings, also for what they leave. So a graph must
not run while a graph that was recorded after it has left something that is still needed (``Recorder.can_run``).
"""

from __future__ import annotations

import contextlib
import functools
import gc
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol, TypeVar
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import deterministic

from narrowgauge import events
from narrowgauge.nn.blocks.angles import read_angles
from narrowgauge.nn.fused.casts import WantedGradient
from narrowgauge.nn.fused.passes import BlockInput, Forwarded, run_backward, run_forward
from narrowgauge.nn.fused.plan import BlockTensors
from narrowgauge.scaling.operand import Operand

T = TypeVar("T")
MOST_BACKWARDS = 8
"""How often the backward of one forward is recorded: gradients can come from several places, in several orders."""
ALIGNED = 64
"""Gradients start at multiples of this many numbers."""
BOUNDS = "bounds of documents"
"""In place of an argument's name."""


@functools.cache
def _get_stream(device: torch.device) -> Any:
    """Return the stream for all recordings of a process: cuBLAS keeps some 60 MB for each stream it has seen."""
    return torch.cuda.Stream(device)


class Recording(Protocol):
    """A graph that leaves something for later."""

    number: int
    """Recordings are numbered in their order."""

    def is_free(self) -> bool: ...


class Recorder:
    """Records functions as CUDA graphs, all on one stream and with memory from one pool."""

    def __init__(self, device: torch.device, report_failure: Callable[[Exception], None]) -> None:
        self.device, self._report_failure = device, report_failure
        self._owned: WeakValueDictionary[int, Tensor] = WeakValueDictionary()
        self._live: list[Recording] = []
        self._recorded = 0
        self._buffers: dict[tuple[torch.dtype, int], Tensor] = {}
        self.pool = torch.cuda.graph_pool_handle()
        # The backward of attention runs on the stream of its forward, so both must be recorded on the same one.
        self.stream = _get_stream(device)

    def try_to(self, make: Callable[[Recorder], T]) -> T | None:
        """Make something that records graphs; None if that fails. Nothing has run then."""
        try:
            return make(self)
        except (RuntimeError, torch.cuda.OutOfMemoryError) as error:
            self._report_failure(error)
            return None

    def get_buffer(self, dtype: torch.dtype, size: int) -> Tensor:
        """Return memory in which graphs that run one after another leave results to copy."""
        if (dtype, size) not in self._buffers:
            self._buffers[dtype, size] = torch.empty(size, dtype=dtype, device=self.device)
        return self._buffers[dtype, size]

    def own(self, tensors: Iterable[Tensor | None]) -> None:
        """Note outputs of graphs, which other graphs can read where they are."""
        for tensor in tensors:
            if tensor is not None:
                self._owned[tensor.data_ptr()] = tensor

    def list_owned(self, tensors: list[Tensor]) -> tuple[int, ...]:
        """Return the addresses of those tensors that a graph wrote; 0 for the others."""
        return tuple(0 if self._find_owned(tensor) is None else tensor.data_ptr() for tensor in tensors)

    def make_input(self, tensor: Tensor) -> Tensor:
        """Return where a graph reads an input: the output of another graph, or memory to copy it to."""
        owned = self._find_owned(tensor)
        return torch.empty_like(tensor) if owned is None else owned.view(tensor.shape)

    def _find_owned(self, tensor: Tensor) -> Tensor | None:
        owned = self._owned.get(tensor.data_ptr())
        same = owned is not None and owned.dtype is tensor.dtype and owned.numel() == tensor.numel()
        return owned if same and tensor.is_contiguous() else None

    def can_run(self, recording: Recording) -> bool:
        """Whether running a graph overwrites nothing that graphs recorded after it have left."""
        self._live = [one for one in self._live if not one.is_free()]
        return all(one.number < recording.number for one in self._live)

    def note_live(self, recording: Recording) -> None:
        """Note that a graph has run, and what it left may be needed."""
        self._live.append(recording)

    def count(self) -> int:
        """Return the number of a new recording."""
        self._recorded += 1
        return self._recorded

    def record(self, function: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
        """Record a function without running it; return the graph and the function's result."""
        current = torch.cuda.current_stream(self.device)
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()  # memory of earlier steps is of no use to the pool
        graph = torch.cuda.CUDAGraph()
        settings: Any = deterministic
        collecting, filling = gc.isenabled(), settings.fill_uninitialized_memory
        gc.disable()  # freeing other graphs would invalidate the recording
        settings.fill_uninitialized_memory = False  # it would overwrite the inputs
        self.stream.wait_stream(current)
        try:
            with torch.cuda.stream(self.stream):
                graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
                try:
                    result = function()
                except BaseException:
                    with contextlib.suppress(RuntimeError):
                        graph.capture_end()
                    raise
                graph.capture_end()
        finally:
            settings.fill_uninitialized_memory = filling
            if collecting:
                gc.enable()
        current.wait_stream(self.stream)
        return graph, result


class _Ticket:
    """Exists as long as a forward may still be followed by its backward."""

    def __init__(self) -> None:
        self.done = False


class BlockGraph:
    """One block's recorded forward and its recorded backwards."""

    def __init__(self, recorder: Recorder, given: BlockInput, wanted: WantedGradient) -> None:
        self.wanted, self._recorder = wanted, recorder
        self._ticket: Callable[[], _Ticket | None] = lambda: None
        self._handed_out: list[StorageWeakRef] = []
        self._backwards: dict[Any, _BackwardGraph] = {}
        self._recorded = 0
        self.inputs: list[Tensor] = []

        def work() -> tuple[tuple[Tensor, ...], Forwarded]:
            self.inputs = [recorder.make_input(t) for t in _list_inputs(given)]
            return run_forward(_replace_inputs(given, self.inputs))

        self.number = recorder.count()
        self._graph, (self.outputs, self.left) = recorder.record(work)
        if self.left.kept is not None:
            self.left.kept.attended.recorded = True
        recorder.own(self.outputs)

    def is_free(self) -> bool:
        """Whether the graph may run again without changing anything that is still in use."""
        ticket = self._ticket()
        return (ticket is None or ticket.done) and all(ref.expired() for ref in self._handed_out)

    def run_forward(self, given: BlockInput) -> tuple[tuple[Tensor, ...], _Ticket]:
        """Run the recorded forward; the ticket is to be marked when its backward has run."""
        _copy_inputs(_list_inputs(given), self.inputs)
        self._graph.replay()
        if self.left.kept is not None:
            _, keys, values = self.left.kept.attended.leaves
            given.call.fill_cache(given.plan.spec, keys, values)
        ticket = _Ticket()
        self._ticket = weakref.ref(ticket)
        made = tuple(_hand_out(output) for output in self.outputs)
        self._handed_out = [StorageWeakRef(output.untyped_storage()) for output in made]
        self._recorder.note_live(self)
        return made, ticket

    def run_backward(
        self, tensors: BlockTensors, needs: BlockTensors, grad: Tensor, written: Operand | None
    ) -> tuple[Tensor, Operand, Sequence[Tensor | None]]:
        """Run the recorded backward of the last forward; record it first if there is none yet."""
        recorder, given = self._recorder, _GradInput(grad, written)
        inputs = given.list_tensors()
        key = (
            needs, grad.shape, grad.dtype, grad.stride(),
            None if written is None else tuple(t is None for t in written), recorder.list_owned(inputs),
        )  # fmt: skip
        if events.is_listening():
            return self._run_unrecorded(tensors, needs, grad, written)
        found = self._backwards.get(key)
        if found is not None and not found.is_free():
            return self._run_unrecorded(tensors, needs, grad, written)
        if (found is None or not recorder.can_run(found)) and self._recorded < MOST_BACKWARDS:
            self._recorded += 1
            self._backwards.pop(key, None)
            found = recorder.try_to(lambda recorder: _BackwardGraph(recorder, self, tensors, needs, given))
            if found is not None:
                self._backwards[key] = found
        if found is None or not recorder.can_run(found):
            return self._run_unrecorded(tensors, needs, grad, written)
        return found.run(inputs)

    def _run_unrecorded(
        self, tensors: BlockTensors, needs: BlockTensors, grad: Tensor, written: Operand | None
    ) -> tuple[Tensor, Operand, Sequence[Tensor | None]]:
        """Run backward from what the recorded forward saved, on the stream where attention's backward must run."""
        current, stream = torch.cuda.current_stream(grad.device), self._recorder.stream
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            grad_input, operand, grads, _ = run_backward(self.left, tensors, needs, grad, written, self.wanted)
        current.wait_stream(stream)
        for tensor in (grad_input, *operand, *grads.flatten()):
            if tensor is not None:
                tensor.record_stream(current)
        return grad_input, operand, grads.flatten()


class _GradInput(NamedTuple):
    """What a block's backward is given: the gradient of its output, and the same as its last projection reads it."""

    grad: Tensor
    written: Operand | None

    def list_tensors(self) -> list[Tensor]:
        return [self.grad, *(() if self.written is None else (t for t in self.written if t is not None))]

    def replace_tensors(self, tensors: list[Tensor]) -> _GradInput:
        grad, *rest = tensors
        left = iter(rest)
        written = None if self.written is None else Operand(*(None if t is None else next(left) for t in self.written))
        return _GradInput(grad, written)


class _BackwardGraph:
    """A recorded backward. Gradients of parameters are written to one buffer, of which callers get a copy."""

    def __init__(
        self, recorder: Recorder, forward: BlockGraph, tensors: BlockTensors, needs: BlockTensors, given: _GradInput
    ) -> None:
        self._recorder, self.number = recorder, recorder.count()
        self._handed_out: list[StorageWeakRef] = []
        self.inputs: list[Tensor] = []

        def work() -> tuple[Tensor, Operand, _ParameterGrads]:
            self.inputs = [recorder.make_input(t) for t in given.list_tensors()]
            fixed = given.replace_tensors(self.inputs)
            grad_input, operand, grads, _ = run_backward(forward.left, tensors, needs, *fixed, forward.wanted)
            return grad_input, operand, _ParameterGrads(recorder, grads.flatten(), tensors.flatten())

        self._graph, (self.grad_input, self.operand, self._grads) = recorder.record(work)
        recorder.own((self.grad_input, *self.operand))

    def is_free(self) -> bool:
        return all(ref.expired() for ref in self._handed_out)

    def run(self, inputs: list[Tensor]) -> tuple[Tensor, Operand, Sequence[Tensor | None]]:
        """Return the gradient of the block's input, the same as its reader reads it, and those of the parameters."""
        _copy_inputs(inputs, self.inputs)
        self._graph.replay()
        grad_input = _hand_out(self.grad_input)
        self._handed_out = [StorageWeakRef(grad_input.untyped_storage())]
        self._recorder.note_live(self)
        return grad_input, self.operand, self._grads.copy()


class _ParameterGrads:
    """Gradients of parameters, gathered in one buffer per dtype, in the layouts of the parameters."""

    def __init__(self, recorder: Recorder, grads: Sequence[Tensor | None], parameters: Sequence[Tensor | None]) -> None:
        self._places: list[tuple[int, Any, Any, int] | None] = []
        ends: dict[torch.dtype, int] = {}
        for grad, parameter in zip(grads, parameters, strict=True):
            if grad is None or parameter is None:
                self._places.append(None)
                continue
            start = ends.setdefault(grad.dtype, 0)
            strides = torch.empty_like(parameter, device="meta").stride()  # dense, in the parameter's layout
            self._places.append((list(ends).index(grad.dtype), parameter.shape, strides, start))
            ends[grad.dtype] = start + -(-parameter.numel() // ALIGNED) * ALIGNED
        self._buffers = [recorder.get_buffer(dtype, size) for dtype, size in ends.items()]
        present = [
            (grad, place) for grad, place in zip(self._view(self._buffers), grads, strict=True) if place is not None
        ]
        for dtype in ends:
            pairs = [(target, grad) for target, grad in present if target is not None and grad.dtype is dtype]
            torch._foreach_copy_([target for target, _ in pairs], [grad for _, grad in pairs])

    def _view(self, buffers: list[Tensor]) -> list[Tensor | None]:
        return [None if place is None else buffers[place[0]].as_strided(*place[1:]) for place in self._places]

    def copy(self) -> list[Tensor | None]:
        """Return the gradients in memory of their own."""
        return self._view([buffer.clone() for buffer in self._buffers])


def name_arguments(given: BlockInput) -> dict[str, Tensor]:
    """Return the tensors that attention reads besides qkv, by name: cosines and sines, and a mask or documents."""
    call, spec = given.call, given.plan.spec.attention
    named: dict[str, Tensor | None] = dict(zip(("cos", "sin"), read_angles(call.kwargs) or (), strict=False))
    if spec.mask is not None:
        named[spec.mask] = call.find_mask(spec)
    if call.documents is not None:
        named[BOUNDS] = call.documents.bounds
    return {name: value for name, value in named.items() if isinstance(value, Tensor)}


def _list_inputs(given: BlockInput) -> list[Tensor]:
    return [*given.list_stream(), *name_arguments(given).values()]


def _replace_inputs(given: BlockInput, inputs: list[Tensor]) -> BlockInput:
    """Return the same call with other tensors, and without a cache of keys and values."""
    x, *rest = inputs
    branch = rest.pop(0) if given.branch is not None else None
    kwargs = dict(zip(name_arguments(given), rest, strict=True))
    bounds, documents = kwargs.pop(BOUNDS, None), given.call.documents
    if documents is not None:
        documents = documents.with_bounds(bounds)
    return given._replace(x=x, branch=branch, call=replace(given.call, kwargs=kwargs, documents=documents))


def _copy_inputs(sources: list[Tensor], places: list[Tensor]) -> None:
    for source, place in zip(sources, places, strict=True):
        if source.data_ptr() != place.data_ptr():
            place.copy_(source)


def _hand_out(tensor: Tensor) -> Tensor:
    """Return the same memory as a tensor with its own storage, so that one can see when the last reader has gone."""
    made: Tensor = torch._C._from_dlpack(torch._C._to_dlpack(tensor))
    return made
