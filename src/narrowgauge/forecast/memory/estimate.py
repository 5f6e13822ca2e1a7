"""Predicts what a training run allocates: by component, when the peak occurs, and whether it fits into a GPU.

The peak is that of ``torch.cuda.max_memory_allocated``: the largest sum of allocated blocks over a step. Blocks come
from the trace's lifetimes, sizes from the caching allocator's rules, and what libraries allocate in addition to tensors
from ``workspaces``. The components are the purposes of the blocks alive at the peak; ``workspace`` is the rest.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from narrowgauge.forecast.memory.layout import Layout, Peak, compute_layout
from narrowgauge.forecast.memory.layout import Moment as Moment
from narrowgauge.forecast.trace.trace import ROLES
from narrowgauge.forecast.trace.trace_step import Traced
from narrowgauge.hardware import Gpu
from narrowgauge.recipe import Recipe

CONTEXT_BYTES = 600 << 20
"""About what CUDA itself takes per process with its kernels loaded; torch's figures do not include it."""
USABLE = 0.985
"""About the share of the nominal memory that a process can use: an H200 of 141 GiB reports 139.8."""
USABLE_ECC = 0.92
"""The same for cards with GDDR6, where error correction takes a sixteenth."""
_GDDR = ("T4", "A10", "L4", "L40S")


@dataclass(frozen=True, kw_only=True)
class Memory:
    """A recipe's predicted memory, in bytes."""

    recipe: str
    batch: int
    accumulate: int
    shards: int
    weights: int
    """What matrix products read: parameters, or their copies in the compute format."""
    master: int
    """What exists only for exact updates: FP32 parameters that have narrow copies, and remainders."""
    gradients: int
    moments: int
    activations: int
    """Everything else that forward and backward allocate."""
    workspace: int
    """cuBLAS, temporaries of kernels, FP8 scales, the allocator's rounding; with shards, gathered weights."""
    total: int
    """The peak of every step but the first: what max_memory_allocated will report."""
    when: Moment
    """When the peak occurs."""
    largest: dict[str, int]
    """The maximum of each component over that step; they need not coincide."""
    first_step: int
    """The peak of the first step, which may be higher under FP8, as scales are not known yet."""
    building: int
    """The peak before the first step."""
    between: int
    """What stays between steps."""
    reserved: int
    """What the allocator holds of the GPU at the end, free pieces included."""
    host: int = 0
    """What one step copies to host memory until backward; not part of the peak."""
    exact: bool
    """False where torch.compile plans the memory: then it is an estimate."""
    notes: list[str] = field(default_factory=list)
    gathered: dict[str, int] = field(default_factory=dict)
    """With shards, the part of ``workspace`` that is gathered or being reduced, by purpose."""
    timeline: list[tuple[str, dict[str, int]]] = field(default_factory=list)
    """The components over a step, module by module, each at its maximum there."""

    @property
    def peak(self) -> int:
        """The maximum of building the model and of all steps."""
        return max(self.total, self.first_step, self.building)

    def components(self) -> dict[str, int]:
        """Bytes at the peak, by component."""
        return {role: getattr(self, role) for role in ROLES}


def get_usable_bytes(gpu: Gpu) -> int:
    """About what torch can allocate on an empty GPU."""
    return int(gpu.memory_bytes * (USABLE_ECC if gpu.name in _GDDR else USABLE)) - CONTEXT_BYTES


def predict_memory(traced: Traced, shards: int = 1) -> Memory:
    """Predict memory from a trace; with ``shards``, that of one of so many FSDP ranks."""
    return summarize(traced, compute_layout(traced, shards), shards)


def summarize(traced: Traced, layout: Layout, shards: int = 1, parameters: int | None = None) -> Memory:
    """Summarize a layout; ``parameters`` where it represents a larger model than was traced."""
    top = layout.peak(traced.steps - 1)
    parts = _parts(top)
    largest = layout.largest(traced.steps - 1)
    return Memory(
        recipe=str(traced.recipe),
        batch=traced.batch,
        accumulate=traced.accumulate,
        shards=shards,
        **parts,
        total=top.total,
        when=layout.when,
        largest={role: largest[role] for role in ROLES},
        first_step=layout.peak(0).total,
        building=layout.peak(-1).total,
        between=layout.between,
        reserved=layout.reserved,
        host=traced.offloaded,
        exact=not traced.compiled or not _compiles_blocks(traced),
        notes=_notes(traced, shards, parameters or traced.parameters),
        gathered=dict(top.gathered),
        timeline=[(label, _parts(one)) for label, one in layout.timeline],
    )


def _parts(top: Peak) -> dict[str, int]:
    """Bytes by component."""
    parts = {role: top.held[role] for role in ROLES if role != "workspace"}
    return parts | {"workspace": top.total - sum(parts.values())}


def _compiles_blocks(traced: Traced) -> bool:
    """Whether torch.compile compiles more than the rotary embedding inside of fused blocks."""
    return not any(layer.part_of == "block" for layer in traced.layers)


def _notes(traced: Traced, shards: int, parameters: int) -> list[str]:
    notes = []
    if traced.compiled and _compiles_blocks(traced):
        notes.append(
            "compiled: torch.compile plans memory itself, so this is an estimate. It was within 1.2% of measured "
            "GPTs, 11% below a BERT (fixed since) and 6% above a Llama, so 5% is not guaranteed"
        )
    if shards > 1:
        notes.append(
            f"sharded over {shards}: shards, gathered weights and gradients in flight follow from rules. They are not "
            "traced and were never measured: see docs/scale.md"
        )
        whole = 4 * parameters
        if whole > get_usable_bytes(traced.gpu):
            notes.append(
                "before it is sharded, the whole model is initialized in host memory, one rank after the other: "
                f"{whole / 1e9:.0f} GB"
            )
    if traced.balances_experts:
        notes.append("how many tokens an expert gets depends on the data: every expert was given the same number")
    if traced.values_read > 2 * traced.steps:
        notes.append(
            f"the model reads {traced.values_read // traced.steps} values from the GPU per step; each was assumed 0"
        )
    return notes


def fits(memory: Memory, gpu: Gpu) -> bool:
    """Whether a run fits into an otherwise empty GPU."""
    return memory.peak <= get_usable_bytes(gpu)


def list_leaner_recipes(recipe: Recipe) -> list[Recipe]:
    """Recipes that need less memory, the cheapest in time first."""
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
