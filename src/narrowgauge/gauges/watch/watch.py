"""Watch: reads weights, activations, gradients and updates of an engine every N updates, without blocking.

In the first microbatch of an update that is due, forward hooks are registered on the modules that compute, and fused
parts report their tensors as events (``events``). Each tensor is reduced by one kernel launch into a row of a table
(``kernels.tensor_stats``). After the update the table is copied to the host, where it arrives a step or two later. In
all other updates no hook is registered, and only FP8 scales and counts are copied, which exist anyway.

Updates are measured on a sample of each parameter: keeping all old weights for comparison would double their memory.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from narrowgauge import events
from narrowgauge.device_readback import TensorReadback
from narrowgauge.engine import Engine
from narrowgauge.errors import UsageError
from narrowgauge.gauges.transforms import unwrap_transforms
from narrowgauge.gauges.watch import expert_reader
from narrowgauge.gauges.watch.expert_reader import ExpertLayer, ExpertReader
from narrowgauge.gauges.watch.function_reader import FunctionReader, has_compiled_parts
from narrowgauge.gauges.watch.model_facts import ModelFacts
from narrowgauge.gauges.watch.prediction_inputs import LayerInputs, separate_extra
from narrowgauge.gauges.watch.readings import Reading, read_counts
from narrowgauge.gauges.watch.rounding_reader import PredictedFormats, RoundingReader
from narrowgauge.gauges.watch.rounding_readings import merge_readings
from narrowgauge.gauges.watch.snapshots import Fp8Reading, Snapshot
from narrowgauge.kernels.tensor_stats import StatsTable, add_statistics
from narrowgauge.nn.compile_forward import run_uncompiled
from narrowgauge.optim.masters import Sample, sample_masters
from narrowgauge.optim.sharded import to_local
from narrowgauge.step_report import StepReport

EVERY = 100
"""Default number of updates between two snapshots."""
SAMPLE = 65536
"""Values of each parameter on which its updates are measured."""
_ROWS = 512
NAMES = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float8_e4m3fn: "e4m3",
    torch.float8_e5m2: "e5m2",
    torch.float64: "fp64",
}


class Watch:
    """Reads the tensors of one engine while it trains. Create it with ``ng.watch(engine)``.

    ``snapshots`` and ``fp8_readings`` return what has arrived on the host since the last call.
    """

    def __init__(self, engine: Engine, every: int = EVERY, block_formats: bool = False) -> None:
        """Register with the engine.

        Args:
            engine: The engine to watch.
            every: Updates between two snapshots. The first update is always read.
            block_formats: Also measure what MXFP8, MXFP4 and NVFP4 would do to the operands of linear layers.

        Raises:
            UsageError: ``every`` is not an integer of at least 1.
        """
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise UsageError(f"watch: every={every!r} must be an integer of at least 1")
        self._engine, self.every = weakref.ref(engine), every  # weak: the engine holds its watches
        self._table: _UpdateTable | None = None
        self._first_microbatch = True
        self._snapshots, self._fp8_readings = TensorReadback(), TensorReadback()
        self._called = list(_called_modules(engine))
        self._modules = [(path, module) for path, module in self._called if path and _is_leaf(module)]
        self._reads_functions = not has_compiled_parts(engine.inner)
        self._predicted = PredictedFormats.of(engine.inner, engine.recipe) if block_formats else None
        self._experts = expert_reader.find_expert_layers(engine.inner)
        engine.watchers.append(self)

    @property
    def engine(self) -> Engine:
        """The engine that is watched."""
        engine = self._engine()
        if engine is None:
            raise UsageError("watch: its engine was deleted")
        return engine

    def stop(self) -> None:
        """Stop watching."""
        self.engine.watchers.remove(self)

    @contextlib.contextmanager
    def around(self, phase: str) -> Iterator[None]:
        """Entered by the engine around each forward, backward and update."""
        if phase == "forward":
            if torch.is_grad_enabled() and self.engine.model.training:
                self._table = self._table or self._begin()
                if self._table is not None and self._first_microbatch:
                    with self._hooked(self._table):
                        yield
                    return
            yield
        elif phase == "backward":
            table = self._table if self._first_microbatch else None
            if table is not None and self.engine.release is not None:
                table.sample_weights()  # backward updates them
            with table.listening() if table is not None else contextlib.nullcontext():
                yield
            self._first_microbatch = False
        else:
            if self._table is not None:
                self._table.before_update()
            yield
            if self._table is not None:
                self._table.after_update()

    def is_idle(self) -> bool:
        """Return whether nothing is read in the next update."""
        return self._table is None and self.engine.guard.updates % self.every != 0

    def after(self, report: StepReport) -> None:
        """Called by the engine after each update: start copying its numbers to the host."""
        scales = self.engine.conversion.scales
        if scales is not None:
            tensors = {"scale": scales.scale, "counts": scales.counts}
            self._fp8_readings.push((report.index, list(scales.sites)), tensors)
        if self._table is not None:
            self._table.send(self._snapshots, report)
        self._table, self._first_microbatch = None, True

    def snapshots(self, wait: bool = False) -> list[Snapshot]:
        """Return the snapshots that have arrived since the last call.

        Args:
            wait: Also wait for those still being copied from the device.

        Returns:
            One snapshot per update that was read, oldest first.
        """
        arrived = self._snapshots.drain() if wait else self._snapshots.ready()
        return [_make_snapshot(tag, tensors) for tag, tensors in arrived]

    looks = snapshots  # the former name, for existing scripts

    def fp8_readings(self, wait: bool = False) -> list[Fp8Reading]:
        """Return the scales and counts of FP8 sites that have arrived since the last call.

        Args:
            wait: Also wait for those still being copied from the device.

        Returns:
            One reading per update, oldest first. Empty if the recipe has no FP8 sites.
        """
        found = []
        for (update, names), tensors in self._fp8_readings.drain() if wait else self._fp8_readings.ready():
            scales, (saturated, flushed) = tensors["scale"].tolist(), tensors["counts"].t().tolist()
            columns = (dict(zip(names, column, strict=True)) for column in (scales, saturated, flushed))
            found.append(Fp8Reading(update, *columns))
        return found

    def _begin(self) -> _UpdateTable | None:
        """A table for the next update if it is due: the first, and then one in ``every``."""
        return None if self.is_idle() else _UpdateTable(self.engine, self._experts, self._predicted)

    @contextlib.contextmanager
    def _hooked(self, table: _UpdateTable) -> Iterator[None]:
        """Register hooks on modules, and listen to fused parts, for one forward.

        Hooks have no effect inside a compiled model, so it runs eagerly in the updates that are read.
        """
        with contextlib.ExitStack() as stack:
            stack.enter_context(table.listening())
            stack.enter_context(run_uncompiled(self.engine.model))
            stack.enter_context(table.experts.hooked())
            reader = table.functions
            for path, module in self._called if self._reads_functions else ():
                stack.callback(module.register_forward_pre_hook(reader.enter(path)).remove)
                stack.callback(module.register_forward_hook(reader.leave, always_call=True).remove)
            for path, module in self._modules:
                handle = module.register_forward_hook(table.make_hook(path))
                stack.callback(handle.remove)
            if self._reads_functions:
                stack.enter_context(reader)
            yield


def watch(engine: Engine, every: int = EVERY, block_formats: bool = False) -> Watch:
    """Read the tensors of an engine while it trains. Watching changes no result and does not block.

    Args:
        engine: The engine to watch.
        every: Updates between two snapshots of weights, activations, gradients and updates. FP8 scales and counts are
            read in every update.
        block_formats: Also measure what MXFP8, MXFP4 and NVFP4 would do to the operands of linear layers, in a run in
            FP32 or BF16 (``Snapshot.rounding``). A run that emulates one of them has these readings of its own.

    Returns:
        A ``Watch``. Its ``snapshots()`` and ``fp8_readings()`` return what has arrived; ``stop()`` ends it.

    Raises:
        UsageError: ``every`` is not an integer of at least 1.
    """
    return Watch(engine, every, block_formats)


@dataclass
class _Row:
    """Index of a tensor's statistics in the tables, and the number of its values."""

    index: int
    dtype: str
    count: int = 0


class _UpdateTable(events.Listener):
    """The statistics of one update's tensors, on the device."""

    def __init__(self, engine: Engine, experts: list[ExpertLayer], predicted: PredictedFormats | None = None) -> None:
        self.engine, self.experts = engine, ExpertReader(experts)
        self.rounding = RoundingReader(engine.recipe, predicted)
        self.tables: list[StatsTable] = []
        self.rows: dict[tuple[str, str], _Row] = {}
        self._before: list[Sample] = []
        self._measured: dict[str, Tensor] = {}
        self._facts = ModelFacts(engine)
        self.functions = FunctionReader(self._facts.values, engine.step_context.dtype is not None)
        self.inputs = LayerInputs()

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Listen to fused code and to roundings."""
        with events.listening(self), events.listening(self.rounding):
            yield

    def add(self, kind: str, path: str, tensor: Tensor, inverse_scale: Tensor | None = None) -> None:
        """Add a tensor. Several with one name (chunks, a module that is called twice) share a row.

        Of a sharded tensor, this rank's shard is read.
        """
        tensor = to_local(unwrap_transforms(tensor))
        if not tensor.is_floating_point() or tensor.numel() == 0:
            return
        row = self.rows.setdefault((kind, path), _Row(len(self.rows), NAMES.get(tensor.dtype, "fp32")))
        row.count += tensor.numel()
        if row.index >= _ROWS * len(self.tables):
            self.tables.append(StatsTable.make(_ROWS, self.engine.device))
        add_statistics(self.tables[row.index // _ROWS], row.index % _ROWS, tensor.to(self.engine.device), inverse_scale)

    def report_tensor(self, kind: str, path: str, tensor: Tensor, inv_scale: Tensor | None) -> None:
        self.add(kind, path, tensor, inv_scale)

    def make_hook(self, path: str) -> Any:
        def read_output(module: nn.Module, inputs: Any, output: Any) -> None:
            if torch.is_grad_enabled():
                self._facts.read_batch_norm(path, module, inputs)
                if self.inputs.needs_reading(path, module, inputs):
                    self.add("input", path, inputs[0])
                self.inputs.add_output(path, output, self.functions.flow)
                self.rounding.read_layer(path, inputs, output)
            for tensor in map(unwrap_transforms, _tensors(output)):
                self.add("activation", path, tensor)
                if tensor.requires_grad:
                    tensor.register_hook(lambda grad: self.add("gradient", path, grad))

        return read_output

    def before_update(self) -> None:
        for name, parameter in self.engine.named.items():
            self.add("weight", name, parameter)
            if parameter.grad is not None and not parameter.grad.is_sparse:
                self.add("weight_gradient", name, parameter.grad)
        self.rounding.read_weights(self.engine.inner)
        self.experts.read_gradients(self.engine.named)
        self._facts.before_update()
        if self.engine.release is None:
            self.sample_weights()

    def sample_weights(self) -> None:
        self._before = sample_masters(self.engine.named, SAMPLE)

    def after_update(self) -> None:
        for before, after in zip(self._before, sample_masters(self.engine.named, SAMPLE), strict=True):
            changes = after.values - before.values
            self._measured |= zip(before.names, _measure_updates(before.values, changes), strict=True)
            for name, change in zip(before.names, changes, strict=True):
                self.add("update", name, change)
        self._facts.after_update()

    def send(self, readback: TensorReadback, report: StepReport) -> None:
        tensors = {f"counts{i}": table.counts for i, table in enumerate(self.tables)}
        tensors |= {f"sizes{i}": table.sizes for i, table in enumerate(self.tables)}
        tensors |= {name: report.tensors[name] for name in ("applied", "loss_scale")}
        if self._measured:
            tensors["measured"] = torch.stack(list(self._measured.values()))
        if self._facts.values:
            tensors["facts"] = self._facts.stack()
        keys, rounding = self.rounding.collect()
        if rounding is not None:
            tensors["rounding"] = rounding
        routed, experts = self.experts.collect()
        if experts is not None:
            tensors["experts"] = experts
        tag = report.index, self.rows, list(self._measured), list(self._facts.values), self.inputs, keys, routed
        readback.push(tag, tensors)


def _measure_updates(weights: Tensor, changes: Tensor) -> Tensor:
    """Per row: the share of changes too small for BF16 weights, and their size relative to the weights."""
    spacing = torch.exp2(torch.floor(torch.log2(weights.abs().clamp(min=2.0**-126))) - 7)
    moved = changes != 0
    lost = (moved & (changes.abs() < spacing / 2)).sum(1) / moved.sum(1).clamp(min=1)
    ratio = changes.square().mean(1).sqrt() / weights.square().mean(1).sqrt().clamp(min=1e-30)
    return torch.stack([lost, ratio], 1)


def _make_snapshot(tag: tuple[Any, ...], tensors: dict[str, Tensor]) -> Snapshot:
    rows: dict[tuple[str, str], _Row]
    update, rows, parameters, names, inputs, keys, routed = tag
    tables = len([name for name in tensors if name.startswith("counts")])
    counts = torch.cat([tensors[f"counts{i}"] for i in range(tables)]).tolist() if tables else []
    sizes = torch.cat([tensors[f"sizes{i}"] for i in range(tables)]).tolist() if tables else []
    scale = float(tensors["loss_scale"])
    measured = dict(zip(parameters, tensors["measured"].tolist(), strict=True)) if "measured" in tensors else {}
    readings = []
    for (kind, path), row in rows.items():
        amax, squares = sizes[row.index]
        fields = read_counts(counts[row.index], row.count, amax)
        finite = max(row.count - fields["inf"] - fields["nan"], 1)
        lost, ratio = measured[path] if kind == "update" else (None, None)
        own_scale = scale if kind in ("gradient", "weight_gradient") else 1.0
        common: dict[str, Any] = {"kind": kind, "module": path, "dtype": row.dtype, "amax": amax}
        common["mean_square"] = squares / finite
        readings.append(Reading(**common, scale=own_scale, lost=lost, ratio=ratio, **fields))
    facts = dict(zip(names, tensors["facts"].tolist(), strict=True)) if "facts" in tensors else {}
    own, extra, facts = separate_extra(readings, facts, inputs)
    rounding = merge_readings(keys, tensors["rounding"].tolist() if "rounding" in tensors else [])
    experts = expert_reader.make_expert_readings(routed, tensors["experts"].tolist() if "experts" in tensors else [])
    applied, stays_fp32 = bool(tensors["applied"]), frozenset(inputs.stays_fp32)
    return Snapshot(update, own, applied, facts, extra, stays_fp32, rounding, experts)


def _called_modules(engine: Engine) -> Iterator[tuple[str, nn.Module]]:
    """All modules except fused blocks, which hooks would change, and what a fused part replaces and never calls."""
    converted = engine.conversion
    inside = {f"{block}." for block in converted.blocks}
    chained = {"norm", "lm_head"} if any(layer.part_of == "head" for layer in converted.layers) else set()
    for path, module in engine.inner.named_modules():
        if path not in chained and not any(f"{path}.".startswith(block) for block in inside):
            yield path, module


def _is_leaf(module: nn.Module) -> bool:
    return not any(True for _ in module.children())


def _tensors(output: Any) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, tuple | list):
        for part in output:
            yield from _tensors(part)
    elif isinstance(output, dict):
        for part in output.values():
            yield from _tensors(part)
