"""Predicts what a training run allocates: by component, at which moment most, and what of it fits into a GPU.

The peak is that of ``torch.cuda.max_memory_allocated``, the largest sum of allocated blocks over a step: blocks by the
trace's lifetimes, sizes by the caching allocator's rules, and what libraries take beside tensors by ``workspaces``. The
components are what the blocks alive at that moment are for; ``workspace`` is everything that is none of the others.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from narrowgauge.forecast.memory.layout import Layout, Top, lay_out
from narrowgauge.forecast.memory.layout import Moment as Moment
from narrowgauge.forecast.trace.trace import ROLES
from narrowgauge.forecast.trace.trace_step import STEPS, Traced
from narrowgauge.hardware import Gpu
from narrowgauge.recipe import Recipe

CONTEXT_BYTES = 600 << 20
"""What CUDA itself takes of a GPU for a process with loaded kernels, about; it is not in torch's figures."""
USABLE = 0.985
"""Share of the memory as sold that a process can have, about: an H200 of 141 GiB shows 139.8."""
USABLE_ECC = 0.92
"""The same on cards with GDDR6, whose error correction takes a sixteenth."""
_GDDR = ("T4", "A10", "L4", "L40S")


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
    gathered: dict[str, int] = field(default_factory=dict)
    """With shards, the part of ``workspace`` that is gathered or on its way to be summed, by what for."""
    timeline: list[tuple[str, dict[str, int]]] = field(default_factory=list)
    """The components over a step, from module to module, each at its highest moment there."""

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
    return describe(traced, lay_out(traced, shards), shards)


def describe(traced: Traced, layout: Layout, shards: int = 1, parameters: int | None = None) -> Memory:
    """What a layout comes to; ``parameters`` where it stands for a larger model than was traced."""
    top = layout.peak(STEPS - 1)
    parts = _parts(top)
    largest = layout.largest(STEPS - 1)
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
        exact=not traced.compiled or not _matters(traced),
        notes=_notes(traced, shards, parameters or traced.parameters),
        gathered=dict(top.gathered),
        timeline=[(label, _parts(one)) for label, one in layout.course],
    )


def _parts(top: Top) -> dict[str, int]:
    """What a moment's memory is for, in bytes."""
    parts = {role: top.held[role] for role in ROLES if role != "workspace"}
    return parts | {"workspace": top.total - sum(parts.values())}


def _matters(traced: Traced) -> bool:
    """Whether what would be compiled is more than attention's rotations inside of our own blocks."""
    return not any(layer.part_of == "block" for layer in traced.layers)


def _notes(traced: Traced, shards: int, parameters: int) -> list[str]:
    notes = []
    if traced.compiled and _matters(traced):
        notes.append(
            "compiled: torch.compile plans memory itself, so this is an estimate; it was within 1.2% of "
            "measured GPTs, but 11% below a BERT (mended since) and 6% above a Llama: 5% is not promised"
        )
    if shards > 1:
        notes.append(
            f"sharded over {shards}: shards, gathered weights and gradients under way by rule; not traced, and never "
            "measured: see docs/scale.md"
        )
        whole = 4 * parameters
        if whole > usable_bytes(traced.gpu):
            notes.append(
                f"before it is sharded, the model is drawn whole in the host's memory, one rank after the other: "
                f"{whole / 1e9:.0f} GB there"
            )
    if traced.values_read > 2 * STEPS:
        notes.append(f"the model asks {traced.values_read // STEPS} values of the GPU in a step; each was taken as 0")
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
