"""Reads weights, activations, gradients and updates off an engine while it trains: every N updates, without waiting.

In the first microbatch of an update that is due, forward hooks stand on the modules that compute (and taps in the parts
that conversion has fused); each tensor is read by one launch into a row of a table (``kernels.stats``). After the
update the table is sent to the host and arrives a step or two later. In all other updates nothing is hooked, and only
what costs nothing is taken along: FP8 scales and counts.

Updates are seen on a sample of each parameter, as keeping all old weights for a comparison would double their memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from narrowgauge.device_readback import Parcels
from narrowgauge.engine import Engine
from narrowgauge.errors import UsageError
from narrowgauge.gauges.watch.readings import Reading, read_counts
from narrowgauge.kernels.tensor_stats import StatsTable, add_statistics
from narrowgauge.nn import events
from narrowgauge.nn.compile_forward import run_uncompiled
from narrowgauge.optim.masters import Sample, sample_masters
from narrowgauge.optim.sharded import to_local
from narrowgauge.step_report import StepReport

EVERY = 100
"""Updates between two readings by default."""
SAMPLE = 65536
"""Values of a parameter on which its updates are judged."""
_ROWS = 512
NAMES = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float8_e4m3fn: "e4m3",
    torch.float8_e5m2: "e5m2",
    torch.float64: "fp64",
}


@dataclass
class Look:
    """What one update showed, once it has arrived."""

    update: int
    readings: list[Reading]
    applied: bool


@dataclass
class Pulse:
    """What every update shows: the scale and the counts so far of each FP8 site, by its name."""

    update: int
    scales: dict[str, float] = field(default_factory=dict)
    saturated: dict[str, int] = field(default_factory=dict)
    flushed: dict[str, int] = field(default_factory=dict)


class Watch:
    """Watches one engine; ``ng.watch(engine)`` makes one. ``looks`` and ``pulses`` hand over what has arrived."""

    def __init__(self, engine: Engine, every: int = EVERY) -> None:
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise UsageError(f"watch: every={every!r} must be a whole number of at least 1")
        self.engine, self.every = engine, every
        self._page: _Page | None = None
        self._first_microbatch = True
        self._looks, self._pulses = Parcels(), Parcels()
        self._modules = list(_watched_modules(engine))
        engine.watchers.append(self)

    def stop(self) -> None:
        """Watch no longer."""
        self.engine.watchers.remove(self)

    @contextlib.contextmanager
    def around(self, phase: str) -> Iterator[None]:
        if phase == "forward":
            if torch.is_grad_enabled() and self.engine.model.training:
                self._page = self._page or self._begin()
                if self._page is not None and self._first_microbatch:
                    with self._hooked(self._page):
                        yield
                    return
            yield
        elif phase == "backward":
            page = self._page if self._first_microbatch else None
            with events.listening(page.add) if page is not None else contextlib.nullcontext():
                yield
            self._first_microbatch = False
        else:
            if self._page is not None:
                self._page.before_update()
            yield
            if self._page is not None:
                self._page.after_update()

    def after(self, report: StepReport) -> None:
        scales = self.engine.conversion.scales
        if scales is not None:
            self._pulses.push((report.index, list(scales.sites)), {"scale": scales.scale, "counts": scales.counts})
        if self._page is not None:
            self._page.send(self._looks, report)
        self._page, self._first_microbatch = None, True

    def looks(self, wait: bool = False) -> list[Look]:
        """The readings that have arrived; ``wait`` for those still on their way."""
        return [_opened(tag, tensors) for tag, tensors in (self._looks.drain() if wait else self._looks.ready())]

    def pulses(self, wait: bool = False) -> list[Pulse]:
        """Scales and counts of FP8 sites that have arrived."""
        found = []
        for (update, names), tensors in self._pulses.drain() if wait else self._pulses.ready():
            scales, (saturated, flushed) = tensors["scale"].tolist(), tensors["counts"].t().tolist()
            columns = (dict(zip(names, column, strict=True)) for column in (scales, saturated, flushed))
            found.append(Pulse(update, *columns))
        return found

    def _begin(self) -> _Page | None:
        """A page for the coming update, where it is due: the first, and then every so many."""
        return _Page(self.engine) if self.engine.guard.updates % self.every == 0 else None

    @contextlib.contextmanager
    def _hooked(self, page: _Page) -> Iterator[None]:
        """Hooks on modules and taps in fused parts, for one forward.

        A compiled model would not notice the hooks, so it runs as it was written, once in ``every`` updates.
        """
        with contextlib.ExitStack() as stack:
            stack.enter_context(events.listening(page.add))
            stack.enter_context(run_uncompiled(self.engine.model))
            for path, module in self._modules:
                handle = module.register_forward_hook(page.hook(path))
                stack.callback(handle.remove)
            yield


def watch(engine: Engine, every: int = EVERY) -> Watch:
    """Watch an engine from now on: every ``every`` updates its tensors, every update what is known anyway."""
    return Watch(engine, every)


@dataclass
class _Row:
    """Where in the tables a tensor's statistics are, and of how many values."""

    index: int
    dtype: str
    count: int = 0


class _Page:
    """The readings of one update, on the device."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.tables: list[StatsTable] = []
        self.rows: dict[tuple[str, str], _Row] = {}
        self._before: list[Sample] = []
        self._judged: dict[str, Tensor] = {}

    def add(self, kind: str, path: str, tensor: Tensor, inverse_scale: Tensor | None = None) -> None:
        """Read a tensor. Several under one name (chunks, a module that is called twice) are read as one.

        Of a sharded one this rank's part is read.
        """
        tensor = to_local(tensor)
        if not tensor.is_floating_point() or tensor.numel() == 0:
            return
        row = self.rows.setdefault((kind, path), _Row(len(self.rows), NAMES.get(tensor.dtype, "fp32")))
        row.count += tensor.numel()
        if row.index >= _ROWS * len(self.tables):
            self.tables.append(StatsTable.make(_ROWS, self.engine.device))
        add_statistics(self.tables[row.index // _ROWS], row.index % _ROWS, tensor.to(self.engine.device), inverse_scale)

    def hook(self, path: str) -> Any:
        def seen(_: nn.Module, __: Any, output: Any) -> None:
            for tensor in _tensors(output):
                self.add("activation", path, tensor)
                if tensor.requires_grad:
                    tensor.register_hook(lambda grad: self.add("gradient", path, grad))

        return seen

    def before_update(self) -> None:
        for name, parameter in self.engine.named.items():
            self.add("weight", name, parameter)
            if parameter.grad is not None and not parameter.grad.is_sparse:
                self.add("weight_gradient", name, parameter.grad)
        self._before = sample_masters(self.engine.named, SAMPLE)

    def after_update(self) -> None:
        for before, after in zip(self._before, sample_masters(self.engine.named, SAMPLE), strict=True):
            changes = after.values - before.values
            self._judged |= zip(before.names, _judged(before.values, changes), strict=True)
            for name, change in zip(before.names, changes, strict=True):
                self.add("update", name, change)

    def send(self, parcels: Parcels, report: StepReport) -> None:
        tensors = {f"counts{i}": table.counts for i, table in enumerate(self.tables)}
        tensors |= {f"sizes{i}": table.sizes for i, table in enumerate(self.tables)}
        tensors |= {name: report.tensors[name] for name in ("applied", "loss_scale")}
        if self._judged:
            tensors["judged"] = torch.stack(list(self._judged.values()))
        parcels.push((report.index, self.rows, list(self._judged)), tensors)


def _judged(weights: Tensor, changes: Tensor) -> Tensor:
    """Of each row the share of changes that BF16 weights would not notice, and their size relative to the weights'."""
    spacing = torch.exp2(torch.floor(torch.log2(weights.abs().clamp(min=2.0**-126))) - 7)
    moved = changes != 0
    lost = (moved & (changes.abs() < spacing / 2)).sum(1) / moved.sum(1).clamp(min=1)
    ratio = changes.square().mean(1).sqrt() / weights.square().mean(1).sqrt().clamp(min=1e-30)
    return torch.stack([lost, ratio], 1)


def _opened(tag: tuple[int, dict[tuple[str, str], _Row], list[str]], tensors: dict[str, Tensor]) -> Look:
    update, rows, parameters = tag
    tables = len([name for name in tensors if name.startswith("counts")])
    counts = torch.cat([tensors[f"counts{i}"] for i in range(tables)]).tolist() if tables else []
    sizes = torch.cat([tensors[f"sizes{i}"] for i in range(tables)]).tolist() if tables else []
    scale = float(tensors["loss_scale"])
    judged = dict(zip(parameters, tensors["judged"].tolist(), strict=True)) if "judged" in tensors else {}
    readings = []
    for (kind, path), row in rows.items():
        amax, squares = sizes[row.index]
        fields = read_counts(counts[row.index], row.count, amax)
        finite = max(row.count - fields["inf"] - fields["nan"], 1)
        lost, ratio = judged[path] if kind == "update" else (None, None)
        own_scale = scale if kind in ("gradient", "weight_gradient") else 1.0
        common: dict[str, Any] = {
            "kind": kind,
            "module": path,
            "dtype": row.dtype,
            "amax": amax,
            "mean_square": squares / finite,
        }
        readings.append(Reading(**common, scale=own_scale, lost=lost, ratio=ratio, **fields))
    return Look(update, readings, bool(tensors["applied"]))


def _watched_modules(engine: Engine) -> Iterator[tuple[str, nn.Module]]:
    """Modules that compute and are called: leaves, but for those that fused parts compute in their place."""
    converted = engine.conversion
    inside = {f"{block}." for block in converted.blocks}
    chained = {"norm", "lm_head"} if any(layer.part_of == "head" for layer in converted.layers) else set()
    for path, module in engine.inner.named_modules():
        leaf = path and not any(True for _ in module.children())
        if leaf and path not in chained and not any(path.startswith(block) for block in inside):
            yield path, module


def _tensors(output: Any) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, tuple | list):
        for part in output:
            yield from _tensors(part)
    elif isinstance(output, dict):
        for part in output.values():
            yield from _tensors(part)
