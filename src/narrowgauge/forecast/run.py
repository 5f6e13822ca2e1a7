"""``ng.forecast(task, ...)``: memory and time of a task under several recipes, before anything is run.

>>> found = narrowgauge.forecast("gpt2-124m", ["bf16", "fp8"], gpu="h200")
>>> found["fp8"].memory.total, found["fp8"].roofline.step_ms
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from narrowgauge import hardware, tasks
from narrowgauge.errors import UsageError
from narrowgauge.forecast.cluster.collectives import Cluster, cluster_of
from narrowgauge.forecast.cluster.scale import PARALLEL, decide
from narrowgauge.forecast.memory.estimate import Memory, fits, leaner, predict_memory, usable_bytes
from narrowgauge.forecast.time.ceilings import Ceilings
from narrowgauge.forecast.time.roofline import Roofline, add_up, predict
from narrowgauge.forecast.trace.extrapolate import Sample, survey, take
from narrowgauge.forecast.trace.fake_gpu import describe_device
from narrowgauge.forecast.trace.trace_step import Traced, trace_steps
from narrowgauge.hardware import Gpu
from narrowgauge.kernels.norm import MAX_COLUMNS
from narrowgauge.recipe import Recipe, parse, refusal
from narrowgauge.task import Task

DEFAULT_GPU = "H200"
MOST_TRACES = 6
"""How many batch sizes a search tries at most."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How a task is to be run: what every recipe's forecast has in common."""

    task: Task
    gpu: Gpu
    batch: int | None = None
    accumulate: int = 1
    compile: bool = True
    shards: int = 1
    """FSDP ranks, wherever they are; or ``cluster``, which says where."""
    cluster: Cluster | None = None
    parallel: str = "auto"
    """How a cluster shares the model: fsdp, ddp, or as its size suggests."""

    def __post_init__(self) -> None:
        for name in ("batch", "accumulate", "shards"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise UsageError(f"forecast: {name}={value!r} must be a whole number of at least 1")
        if self.parallel not in PARALLEL:
            raise UsageError(f"--parallel {self.parallel}: expected {', '.join(PARALLEL)}")

    @property
    def gpus(self) -> int:
        return self.cluster.gpus if self.cluster is not None else self.shards

    def trace(self, recipe: Recipe, batch: int | None = None, fused: bool | None = None) -> Traced:
        """Trace a recipe; refuses what the GPU cannot run."""
        reason = refusal(recipe, describe_device(self.gpu))
        if reason is not None:
            raise UsageError(reason)
        return trace_steps(
            self.task, recipe, self.gpu, batch=batch or self.batch, accumulate=self.accumulate,
            compile=self.compile and fused is not False, fused=fused,
        )  # fmt: skip

    def sample(self, recipe: Recipe, batch: int | None = None) -> Sample:
        """Trace what a rank of several would run, by a few blocks where there are many."""
        if recipe.gradients == "released" or (recipe.gradients == "fp32" and recipe.master != "fp32"):
            raise UsageError(f"recipe {recipe}: gradients={recipe.gradients} is not for several GPUs; leave it out")
        sample = self._take(recipe, batch, None)
        whole = sample.traced.compiled and not any(layer.part_of == "block" for layer in sample.traced.layers)
        if whole and self.shards_of(sample) > 1:  # nothing is compiled around FSDP's hooks
            sample = replace(self, compile=False)._take(recipe, batch, None)
        return replace(sample, too_wide=survey(self.task)[2] > MAX_COLUMNS)

    def _take(self, recipe: Recipe, batch: int | None, fused: bool | None) -> Sample:
        return take(self.task, lambda task: replace(self, task=task).trace(recipe, batch, fused))

    def shards_of(self, sample: Sample) -> int:
        """Over how many ranks the sample's weights are sharded: 1 where each has a copy."""
        if self.cluster is None:
            return self.shards
        return self.cluster.gpus if decide(self.parallel, sample.parameters) == "fsdp" else 1

    def memory(self, recipe: Recipe, batch: int | None = None) -> Memory:
        if self.gpus == 1:
            return predict_memory(self.trace(recipe, batch))
        sample = self.sample(recipe, batch)
        return sample.memory(self.shards_of(sample))


@dataclass(frozen=True, kw_only=True)
class Outlook:
    """One recipe's forecast."""

    memory: Memory
    roofline: Roofline
    fits: bool
    largest_batch: int | None = None
    """The largest batch that fits; 0 where none does, None where it was not looked for."""
    advice: str = ""
    """What to switch on, where it does not fit."""


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """What is predicted of a task on a GPU, by recipe."""

    task: str
    gpu: Gpu
    unit: str
    parameters: int
    recipes: dict[str, Outlook] = field(default_factory=dict)

    def __getitem__(self, recipe: str) -> Outlook:
        return self.recipes[recipe]

    def __iter__(self) -> Iterator[str]:
        return iter(self.recipes)


def forecast(
    task: Task | str,
    recipes: str | Recipe | Sequence[str | Recipe] = ("fp32", "bf16", "fp8", "bf16-lean", "fp8-lean"),
    gpu: str = DEFAULT_GPU,
    *,
    batch: int | None = None,
    accumulate: int = 1,
    compile: bool = True,
    shards: int = 1,
    gpus: int | None = None,
    nodes: int | None = None,
    parallel: str = "auto",
    search: bool = False,
    tell: Callable[[str], None] = lambda line: None,
) -> Forecast:
    """Forecast a task (or a built-in one's name) under recipes on a GPU of the table.

    ``gpus`` and ``nodes`` ask what one GPU of so many holds (``parallel``: shards, copies, or by size), ``shards`` the
    same of sharded weights, wherever they are. ``search`` looks for the largest batch that fits, and for what to switch
    on where a recipe does not; ``tell`` hears what is going on. Recipes that the GPU cannot run are refused.
    """
    made = tasks.find(task) if isinstance(task, str) else task
    found = hardware.find_gpu(gpu)
    cluster = None if gpus is None else cluster_of(found, gpus, nodes)
    plan = Plan(
        task=made, gpu=found, batch=batch, accumulate=accumulate, compile=compile, shards=shards, cluster=cluster,
        parallel=parallel,
    )  # fmt: skip
    device = describe_device(plan.gpu)
    several = [recipes] if isinstance(recipes, str | Recipe) else recipes
    outlooks: dict[str, Outlook] = {}
    parameters = 0
    for recipe in dict.fromkeys(parse(one, device) for one in several):
        tell(f"{recipe}: tracing two steps on paper")
        traced = plan.trace(recipe) if plan.gpus == 1 else plan.sample(recipe)
        outlooks[str(recipe)] = look(plan, recipe, traced, search, tell)
        parameters = traced.parameters
    return Forecast(task=made.name, gpu=plan.gpu, unit=made.unit, parameters=parameters, recipes=outlooks)


def look(
    plan: Plan, recipe: Recipe, traced: Traced | Sample, search: bool, tell: Callable[[str], None] = lambda line: None
) -> Outlook:
    """One recipe's forecast from its trace."""
    if isinstance(traced, Sample):
        memory = traced.memory(plan.shards_of(traced))
        roofline = add_up(traced.traced, traced.costs(Ceilings(plan.gpu)))
    else:
        memory = predict_memory(traced)
        roofline = predict(traced, Ceilings(plan.gpu))
    good = fits(memory, plan.gpu)
    largest = largest_batch(plan, recipe, memory, tell) if search else None
    return Outlook(
        memory=memory,
        roofline=roofline,
        fits=good,
        largest_batch=largest,
        advice="" if good or not search else advise(plan, recipe, tell),
    )


def largest_batch(plan: Plan, recipe: Recipe, memory: Memory, tell: Callable[[str], None] = lambda line: None) -> int:
    """The largest batch that fits: memory grows by so much an item, which two traces tell, and a third one checks.

    Where it does not grow evenly (the head works in chunks) the straight line is drawn anew, a few times.
    """
    limit = usable_bytes(plan.gpu)
    known = {memory.batch: memory.peak}
    low, high = 0, 0  # the largest known to fit, the smallest known not to
    guess = max(1, memory.batch // 2) if memory.batch > 1 else 2
    for _ in range(MOST_TRACES):
        if guess not in known:
            tell(f"{recipe}: trying a batch of {guess}")
            known[guess] = plan.memory(recipe, guess).peak
        low = max((batch for batch, peak in known.items() if peak <= limit), default=0)
        high = min((batch for batch, peak in known.items() if peak > limit), default=0)
        first, second = sorted(known)[:2] if high and not low else sorted(known)[-2:]
        if low and high:
            first, second = low, high
        slope = (known[second] - known[first]) / (second - first)
        if slope <= 0:
            break
        guess = first + int((limit - known[first]) / slope)
        guess = max(low + 1, min(guess, high - 1)) if high else max(guess, low + 1)
        if guess < 1 or (high and high - low <= 1):
            break
        if low and (limit - known[low]) < slope:  # not one more
            break
    return low


def advise(plan: Plan, recipe: Recipe, tell: Callable[[str], None] = lambda line: None) -> str:
    """The first of what could be switched on that lets the task fit, in a sentence."""
    limit = usable_bytes(plan.gpu)
    least: Memory | None = None
    for candidate in leaner(recipe):
        if refusal(candidate, describe_device(plan.gpu)) is not None:
            continue
        tell(f"{recipe} does not fit: trying {candidate}")
        try:
            memory = plan.memory(candidate)
        except UsageError:
            continue  # a model without blocks cannot recompute them, and gradients of shards cannot be released
        if memory.peak <= limit:
            return f"take {candidate}: {memory.peak / 1e9:.1f} GB"
        if candidate.gradients != "released" and (least is None or memory.peak < least.peak):
            least = memory
    for more in _larger(plan):
        if least is not None:
            spread = more.memory(parse(least.recipe), least.batch)
            if spread.peak <= limit:
                return f"take {least.recipe} on {more.gpus} GPUs: {spread.peak / 1e9:.1f} GB on each"
    return "take a smaller batch, a shorter context or more memory"


def _larger(plan: Plan) -> Iterator[Plan]:
    """The same plan sharded over more GPUs."""
    if plan.cluster is None:
        yield from (replace(plan, shards=ranks) for ranks in (2, 4, 8, 16, 32, 64) if ranks > plan.shards)
        return
    if plan.parallel != "fsdp":
        yield replace(plan, parallel="fsdp")
    for ranks in (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024):
        if ranks > plan.cluster.gpus:
            yield replace(plan, cluster=cluster_of(plan.gpu, ranks), parallel="fsdp")
