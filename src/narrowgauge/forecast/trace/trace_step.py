"""Runs two of an engine's training steps on a simulated GPU, and returns their trace.

The first step allocates what stays (moments, FP8 scales and copies), the second is like every later one. The engine,
the Python of its kernels, autograd, hooks and recomputation are the ones that train; ``fake_gpu`` simulates the GPU.
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as hooks
from torch.utils._pytree import tree_leaves, tree_map_only

from narrowgauge import events
from narrowgauge.engine import Engine
from narrowgauge.errors import NarrowgaugeError, UsageError
from narrowgauge.forecast.trace import fake_gpu
from narrowgauge.forecast.trace.recorder import Recorder
from narrowgauge.forecast.trace.trace import Owner, Trace
from narrowgauge.forecast.trace.workspaces import Workspaces, get_cublas_bytes, times_products
from narrowgauge.hardware import Gpu
from narrowgauge.nn.memory_plan import MemoryPlan
from narrowgauge.nn.recompute import find_blocks
from narrowgauge.nn.survey import Layer
from narrowgauge.ranks.distribute import find_copied
from narrowgauge.recipe import Recipe
from narrowgauge.task import ModelLoader, Task, make_plain_optimizers

CLIP_NORM = 1.0
STEPS = 2
MOST_STEPS = 16
"""The most steps that are traced until a memory plan is final."""
MASTERS = ("master", "remainder", "check")
"""Names in an optimizer's state that belong to master weights."""


@dataclass(frozen=True, kw_only=True)
class ShardSizes:
    """Numbers of parameters by how they are distributed over ranks (``ranks.distribute``)."""

    block: int
    """In matrices of the largest block."""
    in_blocks: int
    """In matrices of all blocks."""
    outside: int
    """In matrices outside of blocks."""
    copied: int
    """In vectors and modules kept in FP32, which every rank has."""
    narrow: bool
    """Whether parameters outside of blocks are BF16, as under a lean recipe."""


@dataclass(frozen=True, kw_only=True)
class Traced:
    """The trace of building a model and of two steps, and facts about the model."""

    task: Task
    recipe: Recipe
    gpu: Gpu
    trace: Trace
    batch: int
    """Size of the first dimension of a batch's tensors."""
    items: int
    """Tokens or images per update, over all microbatches."""
    accumulate: int
    parameters: int
    compiled: bool
    """Whether torch.compile compiles some of it."""
    layers: list[Layer] = field(default_factory=list)
    block_parameters: int = 0
    """Parameters of the largest block, which a sharded run gathers at once."""
    other_parameters: int = 0
    """Parameters outside of blocks: embeddings, the head."""
    values_read: int = 0
    """How often the program read a value from the GPU, and got 0."""
    balances_experts: bool = False
    """Whether every expert was assumed to get the same number of tokens, which depends on data."""
    block_paths: list[str] = field(default_factory=list)
    """The modules that a sharded run gathers one at a time, in order."""
    shard_sizes: ShardSizes | None = None
    steps: int = STEPS
    """The number of traced steps; the last one is like every later one."""
    plan: MemoryPlan | None = None
    """What blocks keep for backward, if the steps were fitted into a memory budget."""
    offloaded: int = 0
    """Bytes that one step copies to host memory until backward."""


def trace_steps(
    task: Task,
    recipe: Recipe,
    gpu: Gpu,
    *,
    batch: int | None = None,
    accumulate: int = 1,
    compile: bool = True,
    clip_norm: float | None = CLIP_NORM,
    fused: bool | None = None,
    memory_budget: str | int | None = None,
) -> Traced:
    """Trace two steps of a task under a recipe on a simulated GPU; with a memory budget, until its plan is final.

    Args:
        task: The task; its batch gives the shapes.
        recipe: The recipe.
        gpu: The GPU to simulate.
        batch: Replaces the task's own batch size.
        accumulate: Microbatches per update.
        compile: Mark what torch.compile would compile.
        clip_norm: As for ``Engine``; not used by recipes that release gradients, which cannot clip.
        fused: As for ``Engine``.
        memory_budget: As for ``Engine``.

    Raises:
        UsageError: The batch has no tensors, or the task needs the values of tensors.
    """
    given = task.synthetic(0) if task.synthetic is not None else task.batch(0, "train")
    sizes = [tensor.shape[0] for tensor in tree_leaves(given) if isinstance(tensor, Tensor) and tensor.dim()]
    if not sizes:
        raise UsageError(f"task {task.name}: a batch has no tensors, so nothing can be predicted")
    size = batch or sizes[0]
    recorder = Recorder(Workspaces(gpu), get_cublas_bytes(gpu))
    make = _prepare_model(task, recipe)  # here, since a model on the meta device would count as one on the GPU below
    if recipe.gradients == "released":
        clip_norm = None
    try:
        has_documents = isinstance(given, Mapping) and given.get("position_ids") is not None
        simulation = fake_gpu.simulate_gpu(gpu, recorder.compile, has_documents, recorder.meter)
        with simulation as simulated, recorder:
            model = make()
            owners = _find_owners(model, recipe)
            simulated.rules.on_cast = lambda parameter, copy: recorder.mark(
                copy, "weights", owners.get(id(parameter)), is_copy=True
            )
            optimizers = make_plain_optimizers(task, model)
            handles = [_mark_gradient(p, recorder, owners[id(p)]) for p in model.parameters() if p.requires_grad]
            engine = Engine(
                model, optimizers, recipe, clip_norm=clip_norm, accumulate=accumulate, compile=compile, fused=fused,
                memory_budget=memory_budget,
            )  # fmt: skip
            if times_products(recipe, engine.conversion.layers):
                recorder.meter.add_forever(get_cublas_bytes(gpu))
            _mark_weights(engine, recorder, owners)
            device_batch = tree_map_only(Tensor, lambda t: _resize(t, sizes[0], size).to("cuda"), given)
            for tensor in tree_leaves(device_batch):
                if isinstance(tensor, Tensor):
                    recorder.mark(tensor, "activations")
            listener = _StepListener(engine, recorder, owners)
            with _attribute(engine, recorder, listener):
                step, is_last = 0, False
                while not is_last:
                    recorder.step = step
                    _step(task, engine, device_batch, recorder)
                    _mark_states(engine, recorder, owners)
                    step += 1
                    is_last = step >= (STEPS if engine.memory_settled else MOST_STEPS)
            trace = recorder.close()
            layers, sizes_of = list(engine.conversion.layers), _count_block_parameters(engine)
            paths, parts = list(find_blocks(engine.inner)), _measure_shard_sizes(engine, owners)
            for handle in handles:
                handle.remove()
    except NarrowgaugeError:
        raise
    except Exception as error:
        if not _needs_data(error):  # an error of the task itself, which is raised as it is
            error.add_note(f"(while tracing task {task.name} under {recipe} without data)")
            raise
        lines = str(error).strip().splitlines() or [""]
        raise UsageError(
            f"task {task.name} under {recipe} cannot be predicted without data: {type(error).__name__}: "
            f"{lines[0][:200]}"
        ) from error
    return Traced(
        task=task,
        recipe=recipe,
        gpu=gpu,
        trace=trace,
        batch=size,
        items=round(task.items_per_batch * size / sizes[0]) * accumulate,
        accumulate=accumulate,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        compiled=any(op.compiled for op in trace.ops),
        layers=layers,
        block_parameters=sizes_of[0],
        other_parameters=sizes_of[1],
        values_read=simulated.values_read,
        balances_experts=recorder.balances_experts or simulated.balances_experts,
        block_paths=paths,
        shard_sizes=parts,
        steps=step,
        plan=engine.memory_plan,
        offloaded=listener.offloaded[step - 1],
    )


def _prepare_model(task: Task, recipe: Recipe) -> Callable[[], nn.Module]:
    """Return a function that makes the task's model on the simulated GPU, as training would."""
    if isinstance(task.model, ModelLoader):
        return functools.partial(task.model.prepare_dry_run(), recipe, torch.device("cuda"))

    def make() -> nn.Module:
        with torch.device("cuda"):
            return task.model()

    return make


def _resize(tensor: Tensor, before: int, size: int) -> Tensor:
    """A host tensor with another batch size; only its shape matters."""
    if not tensor.dim() or tensor.shape[0] != before or size == before:
        return tensor
    return torch.empty((size, *tensor.shape[1:]), dtype=tensor.dtype, device="meta")


def _step(task: Task, engine: Engine, batch: Any, recorder: Recorder) -> None:
    for _ in range(engine.accumulate):
        recorder.phase = "forward"
        with engine.forward():
            loss = task.loss(engine.model, batch)
        recorder.phase = "backward"
        engine.backward(loss)
        recorder.phase = "step"
        engine.step()


def _needs_data(error: Exception) -> bool:
    """Whether an error comes from tensors that have shapes but no values."""
    messages = (
        "tensor subclasses",
        "data pointer",
        "FakeTensor",
        "meta tensor",
        "fake tensor",
        "register_meta",
        "Meta",
    )
    return type(error).__module__.startswith(("torch._subclasses", "torch.fx")) or any(
        words in str(error) for words in messages
    )


def _find_owners(model: nn.Module, recipe: Recipe) -> dict[int, Owner]:
    """The owner of every parameter, by id: where it is on one of several ranks."""
    copied = find_copied(model, recipe)
    inside = {id(p) for block in find_blocks(model).values() for p in block.parameters()}
    found = {}
    for p in model.parameters():
        part = "copied" if p in copied else "block" if id(p) in inside else "outside"
        found[id(p)] = Owner(part, p.shape[0] if p.dim() else 1, p.numel())
    return found


def _measure_shard_sizes(engine: Engine, owners: dict[int, Owner]) -> ShardSizes:
    def count(module: nn.Module, part: str) -> int:
        return sum(p.numel() for p in module.parameters() if owners[id(p)].part == part)

    blocks_of = [count(block, "block") for block in find_blocks(engine.inner).values()]
    return ShardSizes(
        block=max(blocks_of, default=0),
        in_blocks=sum(blocks_of),
        outside=count(engine.inner, "outside"),
        copied=count(engine.inner, "copied"),
        narrow=engine.recipe.master != "fp32",
    )


def _mark_gradient(parameter: nn.Parameter, recorder: Recorder, owner: Owner) -> Any:
    """Mark gradients as soon as they exist, before a release frees them."""
    return parameter.register_post_accumulate_grad_hook(lambda p: recorder.mark(p.grad, "gradients", owner))


def _mark_weights(engine: Engine, recorder: Recorder, owners: dict[int, Owner]) -> None:
    narrow = engine.recipe.compute not in ("fp32", "tf32")
    for parameter in engine.model.parameters():
        is_master = narrow and parameter.dtype is torch.float32 and parameter.dim() > 1
        owner = owners.get(id(parameter))
        recorder.mark(parameter, "master" if is_master else "weights", owner)
        for name in ("other_half", "check_words"):
            recorder.mark(getattr(parameter, name, None), "master", owner)
    for buffer in engine.model.buffers():
        recorder.mark(buffer, "weights")


def _mark_states(engine: Engine, recorder: Recorder, owners: dict[int, Owner]) -> None:
    for optimizer in engine.optimizers:
        for parameter, state in optimizer.state.items():
            for name, value in state.items():
                if isinstance(value, Tensor):
                    kind = "master" if name in MASTERS else "workspace" if name == "step" else "moments"
                    recorder.mark(value, kind, owners.get(id(parameter)) if kind != "workspace" else None)


def _count_block_parameters(engine: Engine) -> tuple[int, int]:
    """Parameters of the largest block, and of everything outside of blocks."""
    blocks_of = find_blocks(engine.model)
    sizes = [sum(parameter.numel() for parameter in block.parameters()) for block in blocks_of.values()]
    every = sum(parameter.numel() for parameter in engine.model.parameters())
    return (max(sizes), every - sum(sizes)) if sizes else (every, 0)


class _StepListener(events.Listener):
    """Passes what fused code reports on to the recorder."""

    def __init__(self, engine: Engine, recorder: Recorder, owners: dict[int, Owner]) -> None:
        self.recorder, self.owners = recorder, owners
        self.offloaded: Counter[int] = Counter()
        """Bytes that are copied to the host, by step."""
        self.rescales = engine.scaler is not None or engine.accumulate > 1
        """Whether the loss's gradient is not 1: otherwise the kernel that rescales gradients touches none."""

    def enter_scope(self, path: str) -> None:
        self.recorder.enter(path)

    def leave_scope(self) -> None:
        self.recorder.leave()

    def begin_product(self, product: str, path: str) -> None:
        self.recorder.enter(path or self.recorder.path)

    def end_product(self) -> None:
        self.recorder.leave()

    def report_copy(self, weights: Sequence[Tensor], copies: Sequence[Tensor]) -> None:
        owner = next((self.owners[id(weight)] for weight in weights if id(weight) in self.owners), None)
        owner = owner and owner._replace(stacked=len(weights) > 1)
        for copy in copies:
            self.recorder.mark_copy(copy, owner)

    def report_offload(self, size: int) -> None:
        self.offloaded[self.recorder.step] += size

    def report_launch(self, kernel: str, reads: Sequence[Tensor], writes: Sequence[Tensor]) -> None:
        if kernel == "rescale" and not self.rescales:
            reads = writes = ()
        self.recorder.launch(kernel, reads, writes)


@contextlib.contextmanager
def _attribute(engine: Engine, recorder: Recorder, listener: _StepListener) -> Iterator[None]:
    """Tell the recorder which module runs, and what fused code reports."""
    paths = {id(module): path for path, module in engine.model.named_modules()}
    with contextlib.ExitStack() as stack:
        enter = hooks.register_module_forward_pre_hook(lambda module, _: recorder.enter(paths.get(id(module), "")))
        stack.callback(enter.remove)
        leave = hooks.register_module_forward_hook(lambda *_: recorder.leave(), always_call=True)
        stack.callback(leave.remove)
        stack.enter_context(events.listening(listener))
        yield
