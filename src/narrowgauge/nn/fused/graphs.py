"""CUDA graphs of fused blocks, for models whose kernels a GPU finishes faster than the host launches them.

A block launches dozens of kernels, and each costs the host several microseconds. Where the GPU waits for the host, the
launches of a block's forward, and of its backward, are recorded once as CUDA graphs, and then started with one call.

    wait          Whether the GPU waits is measured: when a block's launches are done, the block before it should still
                  be running. If it has finished in most cases, the host is too slow.
    memory        All graphs of a model share one memory pool. What forward saves stays allocated between steps; the
                  memory of intermediate results serves all blocks in turn.
    inputs        A graph reads fixed addresses. The output of one block's graph is the input of the next one's without
                  a copy; other inputs are copied to where the graph reads them.
    outputs       Outputs and gradients of inputs are handed out in the graph's own memory. Before a graph runs again,
                  everything handed out must have been freed, and the backward of its forward must have run. Otherwise
                  the block runs without graph this time. Gradients of parameters are handed out as copies.
    conditions    Shapes, addresses of parameters, dropout, settings of attention: all that a recording depends on is in
                  its key. A call with another key is another recording, after it has come several times.
"""

from __future__ import annotations

import threading
import warnings
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from narrowgauge import events
from narrowgauge.nn.fused.casts import WantedGradient
from narrowgauge.nn.fused.passes import BlockInput, get_future_gradients, is_repeated_at_random
from narrowgauge.nn.fused.recorded import BlockGraph, Recorder, name_arguments

WARM_UP = 2
"""Calls of a block before it is measured: the first ones compile kernels and choose algorithms."""
MEASURED = 2
"""Calls of a block that are measured."""
WAITING_SHARE = 0.25
"""Share of measurements that must have found the GPU waiting. At the start of a step it always waits."""
MOST_CALLS = 8
"""Different calls of one block that are counted, for batches of different shapes; the oldest is forgotten."""
LARGEST_RECOMPUTED = 64_000_000
"""Bytes of gradients of a recomputed block up to which it is recorded without being asked: it keeps nothing then."""
MOST_RECORDINGS = 8
"""How often one call is recorded again because its input comes from elsewhere, or graphs run in another order."""


@dataclass
class _Calls:
    """What is known of calls with one key."""

    count: int = 0
    recorded: int = 0
    graphs: dict[tuple[int, ...], BlockGraph] = field(default_factory=dict)
    """By the addresses of inputs that other graphs wrote."""


class BlockGraphs:
    """The CUDA graphs of a model's blocks. A copy of the model has its own."""

    def __init__(self, wanted: bool | None = None) -> None:
        self.wanted = wanted
        """Whether to record graphs; None: if the GPU waits for the host."""
        self._idle = self._measured = 0
        self._last: torch.cuda.Event | None = None
        self._recorder: Recorder | None = None
        self._of_block: WeakKeyDictionary[nn.Module, dict[Any, _Calls]] = WeakKeyDictionary()

    def __reduce__(self) -> Any:
        return BlockGraphs, (self.wanted,)

    @property
    def recorded(self) -> int:
        """Number of recorded forwards."""
        return sum(len(calls.graphs) for table in self._of_block.values() for calls in table.values())

    def find(self, given: BlockInput, wanted: WantedGradient) -> BlockGraph | None:
        """Return a graph for a call of a block, ready to run; None if the block should run without one.

        Args:
            given: What the block's forward is given.
            wanted: How the block before wants the gradient of the block's input.
        """
        if self.wanted is False or not can_record(given) or (self.wanted is None and needs_room(given)):
            return None
        calls = self._find_calls(given, wanted)
        calls.count += 1
        if calls.count <= WARM_UP + MEASURED or not self._is_worth_it():
            return None
        if self._recorder is None:
            self._recorder = Recorder(given.x.device, self._stop)
        recorder = self._recorder
        addresses = recorder.list_owned(given.list_stream())
        found = calls.graphs.get(addresses)
        if found is not None and not found.is_free():
            return None
        if found is not None and recorder.can_run(found):
            return found
        if calls.recorded >= MOST_RECORDINGS or threading.current_thread() is not threading.main_thread():
            return None
        calls.recorded += 1
        calls.graphs.pop(addresses, None)
        graph = recorder.try_to(lambda recorder: BlockGraph(recorder, given, wanted))
        if graph is not None:
            calls.graphs[addresses] = graph
        return graph

    def is_measuring(self, given: BlockInput, wanted: WantedGradient) -> bool:
        """Whether this call, which runs without graph, should be followed by ``measure_wait``."""
        if self.wanted is not None or not can_record(given) or needs_room(given):
            return False
        return WARM_UP < self._find_calls(given, wanted).count <= WARM_UP + MEASURED

    def measure_wait(self) -> None:
        """Note whether the GPU has finished the block before the one that was launched last."""
        if self._last is not None:
            self._measured += 1
            self._idle += self._last.query()
        self._last = torch.cuda.Event()
        self._last.record()

    def _is_worth_it(self) -> bool:
        if self.wanted is None:
            self.wanted = self._idle > WAITING_SHARE * self._measured
            self._last = None
        return self.wanted

    def _find_calls(self, given: BlockInput, wanted: WantedGradient) -> _Calls:
        plan, scales, documents = given.plan, given.plan.scales, given.call.documents
        key = (
            given.x.shape, given.x.dtype, given.x.requires_grad, given.branch is None, given.dropout, given.summed,
            plan.spec, plan.checkpoint, plan.activations, id(wanted.reader), wanted.dtype,
            tuple(None if t is None else (t.data_ptr(), t.requires_grad) for group in given.tensors for t in group),
            tuple((name, t.shape, t.dtype) for name, t in name_arguments(given).items()),
            None if documents is None else documents.longest,
            None if scales is None else (scales.mode, scales.delayed, scales.format_changes),
            get_settings(),
        )  # fmt: skip
        table = self._of_block.setdefault(given.call.module, {})
        if key not in table:
            if len(table) >= MOST_CALLS:
                del table[next(iter(table))]
            table[key] = _Calls()
        return table[key]

    def _stop(self, error: Exception) -> None:
        """Free all graphs, and record no more."""
        self.wanted = False
        self._of_block.clear()
        self._recorder = None
        reason = str(error).strip().partition("\n")[0]
        warnings.warn(f"blocks run without CUDA graphs: recording one failed ({reason})", stacklevel=2)


def can_record(given: BlockInput) -> bool:
    """Whether a call depends on nothing that a recording cannot follow, such as the model's own code or listeners."""
    plan, x = given.plan, given.x
    return (
        given.needed
        and x.is_cuda
        and type(x) is Tensor
        and x.is_contiguous()
        and plan.spec.attention.kind != "own"
        and plan.spec.cross is None
        and not plan.offload
        and not events.is_listening()
        and not given.call.differentiable
        and given.dropout.depth1 is None
        and given.dropout.depth2 is None
        and not is_repeated_at_random(plan, given.dropout)
        and not (plan.checkpoint == "full" and given.call.has_cache())
        and all(part.weight.gradient_dtype is not None for part in (plan.qkv, plan.out, plan.up, plan.down))
        and x.device.index == torch.cuda.current_device()
        and not torch.cuda.is_current_stream_capturing()
    )


def needs_room(given: BlockInput) -> bool:
    """Whether a recomputed block is large, and keeps tensors in the room of its gradients: recorded, it could not."""
    return given.plan.checkpoint == "full" and get_future_gradients(given) > LARGEST_RECOMPUTED


def get_settings() -> tuple[bool, ...]:
    """Return the settings of torch that decide which kernels run."""
    cuda = torch.backends.cuda
    return (
        cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled(), cuda.cudnn_sdp_enabled(),
        torch.are_deterministic_algorithms_enabled(),
    )  # fmt: skip
