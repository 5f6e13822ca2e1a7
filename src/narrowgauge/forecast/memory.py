"""Predicts what a training run allocates: by component, at which moment most, and what of it fits into a GPU.

The peak is that of ``torch.cuda.max_memory_allocated``, the largest sum of allocated blocks over a step: blocks by the
trace's lifetimes, sizes by the caching allocator's rules, and what libraries take beside tensors by ``workspaces``. The
components are what the blocks alive at that moment are for; ``workspace`` is everything that is none of the others.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace

from narrowgauge.forecast.allocator import CachingAllocator
from narrowgauge.forecast.lifetimes import follow
from narrowgauge.forecast.steps import STEPS, Traced
from narrowgauge.forecast.trace import ROLES
from narrowgauge.forecast.workspaces import cublas_bytes
from narrowgauge.hardware import Gpu
from narrowgauge.recipe import Recipe

SHARDED = ("weights", "master", "gradients", "moments")
"""Components that FSDP spreads over the ranks."""
CONTEXT_BYTES = 600 << 20
"""What CUDA itself takes of a GPU for a process with loaded kernels, about; it is not in torch's figures."""
USABLE = 0.985
"""Share of the memory as sold that a process can have, about: an H200 of 141 GiB shows 139.8."""
USABLE_ECC = 0.92
"""The same on cards with GDDR6, whose error correction takes a sixteenth."""
_GDDR = ("T4", "A10", "L4", "L40S")


@dataclass(frozen=True, kw_only=True)
class Moment:
    """When the peak comes."""

    phase: str
    """forward, backward or step."""
    module: str
    op: str
    share: float
    """How far into the step, in operations: 0 to 1."""

    def __str__(self) -> str:
        return f"{self.phase}, {self.module or 'outside of modules'} ({self.op})"


@dataclass(frozen=True, kw_only=True)
class Memory:
    """A recipe's predicted memory, in bytes."""

    recipe: str
    batch: int
    accumulate: int
    shards: int
    weights: int
    """What products read: parameters, or their copies in the compute format."""
    master: int
    """What exists only to be updated exactly: FP32 parameters beside narrow copies, remainders."""
    gradients: int
    moments: int
    activations: int
    """Everything that forward and backward make on their way."""
    workspace: int
    """cuBLAS, temporaries inside of kernels, FP8 scales, the allocator's rounding; with shards, what is gathered."""
    total: int
    """The peak of every step but the first: what max_memory_allocated will say."""
    when: Moment
    largest: dict[str, int]
    """The most of each component at any moment of that step: they need not meet."""
    first_step: int
    """The peak of the first step, which may be higher under FP8: scales are not known yet."""
    building: int
    """The peak before the first step."""
    between: int
    """What stays between steps."""
    reserved: int
    """What the allocator holds of the GPU after it all, free pieces included."""
    exact: bool
    """False where torch.compile plans the memory: then it is an estimate."""
    notes: list[str] = field(default_factory=list)

    @property
    def peak(self) -> int:
        """The most at any moment."""
        return max(self.total, self.first_step, self.building)

    def components(self) -> dict[str, int]:
        return {role: getattr(self, role) for role in ROLES}


def usable_bytes(gpu: Gpu) -> int:
    """What torch can allocate on an empty GPU, about."""
    return int(gpu.memory_bytes * (USABLE_ECC if gpu.name in _GDDR else USABLE)) - CONTEXT_BYTES


def predict_memory(traced: Traced, shards: int = 1) -> Memory:
    """Lay the trace's blocks out in time; with ``shards``, as one of so many FSDP ranks would hold them."""
    trace, lifetimes = traced.trace, follow(traced.trace)
    allocator, held, largest = CachingAllocator(), Counter[str](), Counter[str]()
    addresses: dict[int, int] = {}
    threads: set[str] = set()
    peaks: dict[int, int] = {}
    heights: dict[int, int] = {}
    at_peak = held
    gathered = _gathered(traced) if shards > 1 else 0
    if traced.recipe.products == "fastest" and any(layer.decision is not None for layer in traced.layers):
        allocator.allocate(cublas_bytes(traced.gpu))  # products are timed on a stream of their own, the first time
    for index, come, go in lifetimes.events():
        op = trace.ops[index]
        for block in come:
            size = _own_bytes(trace.blocks[block].bytes, trace.blocks[block].role, shards)
            addresses[block] = allocator.allocate(size)
            held[trace.blocks[block].role] += size
        if op.kind == "product" and op.phase not in threads:
            threads.add(op.phase)
            allocator.allocate(cublas_bytes(traced.gpu))
        extra = [allocator.allocate(size) for size in (op.workspace, gathered if op.step >= 0 else 0) if size]
        if op.step == STEPS - 1:
            heights[index] = allocator.allocated
            largest |= held
        if allocator.allocated > peaks.get(op.step, 0):
            peaks[op.step] = allocator.allocated
            at_peak = held.copy()
        for address in extra:
            allocator.release(address)
        for block in go:
            allocator.release(addresses.pop(block))
            held[trace.blocks[block].role] -= _own_bytes(trace.blocks[block].bytes, trace.blocks[block].role, shards)
    total = peaks[STEPS - 1]
    parts = {role: at_peak[role] for role in ROLES if role != "workspace"}
    there = next(index for index, height in heights.items() if height >= 0.999 * total)
    return Memory(
        recipe=str(traced.recipe),
        batch=traced.batch,
        accumulate=traced.accumulate,
        shards=shards,
        **parts,
        workspace=total - sum(parts.values()),
        total=total,
        when=Moment(
            phase=trace.ops[there].phase,
            module=trace.ops[there].where,
            op=trace.ops[there].name,
            share=(there - min(heights)) / len(heights),
        ),
        largest={role: largest[role] for role in ROLES},
        first_step=peaks.get(0, 0),
        building=peaks.get(-1, 0),
        between=allocator.allocated,
        reserved=allocator.reserved,
        exact=not traced.compiled or not _matters(traced),
        notes=_notes(traced, shards),
    )


def _own_bytes(size: int, role: str, shards: int) -> int:
    return -(-size // shards) if role in SHARDED else size


def _gathered(traced: Traced) -> int:
    """What a rank has beside its shards: two blocks' weights (the next is fetched ahead), what belongs to no block, and
    one block's gradients on their way to be summed, in the gradients' format."""
    width = 4 if traced.recipe.compute in ("fp32", "tf32") else 2
    reduced = 2 if traced.recipe.gradients == "bf16" else 4
    return (2 * traced.block_parameters + traced.other_parameters) * width + traced.block_parameters * reduced


def _matters(traced: Traced) -> bool:
    """Whether what would be compiled is more than attention's rotations inside of our own blocks."""
    return not any(layer.part_of == "block" for layer in traced.layers)


def _notes(traced: Traced, shards: int) -> list[str]:
    notes = []
    if traced.compiled and _matters(traced):
        notes.append(
            "compiled: torch.compile plans memory itself, so this is an estimate; it was within 1% of five measured "
            "GPTs, but for other models 5% is not promised"
        )
    if shards > 1:
        notes.append(
            f"sharded over {shards}: weights, masters, gradients and moments divided, gathered blocks added by rule; "
            "not traced"
        )
    if traced.asked > 2 * STEPS:
        notes.append(f"the model asks {traced.asked // STEPS} values of the GPU in a step; each was taken as 0")
    return notes


def fits(memory: Memory, gpu: Gpu) -> bool:
    """Whether a run fits into an otherwise empty GPU."""
    return memory.peak <= usable_bytes(gpu)


def leaner(recipe: Recipe) -> list[Recipe]:
    """What to switch on, one after the other, where a recipe does not fit: the cheapest in time first."""
    found = []
    if recipe.compute in ("fp32", "tf32", "fp16"):
        found.append(Recipe(compute="bf16"))
    if recipe.checkpoint == "none":
        found.append(replace(recipe, checkpoint="selective"))
    if recipe.checkpoint != "full":
        found.append(replace(recipe, checkpoint="full"))
    compute = recipe.compute if recipe.compute in ("bf16", "fp8") else "bf16"
    scaling = "delayed" if compute == "fp8" else "none"
    lean = Recipe(compute=compute, scaling=scaling, master="split", gradients="bf16", moments="8bit", checkpoint="full")
    found += [lean, replace(lean, gradients="released")]
    return [one for one in dict.fromkeys(found) if one != recipe]
