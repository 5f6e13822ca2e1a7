"""``ng.forecast(task, ...)``: predicts memory and time of a task under several recipes, without running it.

>>> found = narrowgauge.forecast("gpt2-124m", ["bf16", "fp8"], gpu="h200")
>>> found["fp8"].memory.total, found["fp8"].roofline.step_ms
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from narrowgauge import hardware, tasks
from narrowgauge.byte_sizes import parse_budget
from narrowgauge.engine.choose_recipe import choose_for_task
from narrowgauge.errors import UsageError
from narrowgauge.forecast.cluster.collectives import Cluster, make_cluster
from narrowgauge.forecast.cluster.predict_cluster import PARALLEL, choose_parallel
from narrowgauge.forecast.extrapolate import TracedModel, inspect_blocks, trace_model
from narrowgauge.forecast.memory.estimate import Memory, fits, get_usable_bytes, list_leaner_recipes, predict_memory
from narrowgauge.forecast.time.reachable_rates import ReachableRates
from narrowgauge.forecast.time.roofline import Roofline, predict_time, sum_costs
from narrowgauge.forecast.trace.fake_gpu import describe_device
from narrowgauge.forecast.trace.trace_step import Traced, trace_steps
from narrowgauge.hardware import Gpu
from narrowgauge.kernels.norm import MAX_COLUMNS
from narrowgauge.nn.memory_plan import MemoryPlan
from narrowgauge.recipe import Recipe, parse, refusal
from narrowgauge.task import Task

DEFAULT_GPU = "H200"
MOST_TRACES = 24
"""The most batch sizes that a search tries; a model whose memory is linear in the batch needs three or four."""
MOST_GROWTH = 8
"""How many times larger than all before the next batch of a search may be."""
LARGEST_BATCH = 1 << 20
"""Where a search ends if memory does not grow with the batch."""


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """How a task is run: the settings that all recipes of a forecast share."""

    task: Task
    gpu: Gpu
    batch: int | None = None
    accumulate: int = 1
    compile: bool = True
    shards: int = 1
    """Number of FSDP ranks on unspecified nodes; ``cluster`` specifies the nodes as well."""
    cluster: Cluster | None = None
    parallel: str = "auto"
    """How the GPUs of a cluster share the model: fsdp, ddp, or auto (by its size)."""
    fit: str | int | None = None
    """The memory budget that steps are fitted into, as ``memory_budget`` of ``Engine``."""

    def __post_init__(self) -> None:
        if self.fit is not None:
            parse_budget(self.fit, self.gpu.memory_bytes, "--fit")
            if self.gpus > 1:
                raise UsageError(f"--fit {self.fit} plans the memory of one GPU; leave out the number of GPUs")
        for name in ("batch", "accumulate", "shards"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise UsageError(f"forecast: {name}={value!r} must be a whole number of at least 1")
        if self.parallel not in PARALLEL:
            raise UsageError(f"--parallel {self.parallel}: expected {', '.join(PARALLEL)}")

    @property
    def gpus(self) -> int:
        """Number of GPUs."""
        return self.cluster.gpus if self.cluster is not None else self.shards

    def choose_recipes(self, recipes: Iterable[str | Recipe], tell: Callable[[str], None]) -> list[Recipe]:
        """Return the recipes, each once. ``auto`` becomes what trains the task fastest on the GPU."""
        device, found = describe_device(self.gpu), []
        for one in recipes:
            with hardware.assume(device):
                recipe, reason = choose_for_task(one, self.task, device, compile=self.compile)
            if reason is not None:
                tell(f"auto is {recipe}: {reason}")
            found.append(recipe)
        return list(dict.fromkeys(found))

    def trace(self, recipe: Recipe, batch: int | None = None, fused: bool | None = None) -> Traced:
        """Trace two steps under a recipe. Raises UsageError where the GPU cannot run it."""
        reason = refusal(recipe, describe_device(self.gpu))
        if reason is not None:
            raise UsageError(reason)
        return trace_steps(
            self.task, recipe, self.gpu, batch=batch or self.batch, accumulate=self.accumulate,
            compile=self.compile and fused is not False, fused=fused, memory_budget=self.fit,
        )  # fmt: skip

    def trace_model(self, recipe: Recipe, batch: int | None = None) -> TracedModel:
        """Trace what one of several ranks runs; of models with many blocks, only a few blocks."""
        if recipe.gradients == "released" or (recipe.gradients == "fp32" and recipe.master != "fp32"):
            raise UsageError(f"recipe {recipe}: gradients={recipe.gradients} works on one GPU only; remove it")
        traced_model = self._trace_blocks(recipe, batch, None)
        whole = traced_model.traced.compiled and not any(
            layer.part_of == "block" for layer in traced_model.traced.layers
        )
        if whole and self.shards_of(traced_model) > 1:  # nothing is compiled around FSDP's hooks
            traced_model = replace(self, compile=False)._trace_blocks(recipe, batch, None)
        return replace(traced_model, too_wide=inspect_blocks(self.task)[2] > MAX_COLUMNS)

    def _trace_blocks(self, recipe: Recipe, batch: int | None, fused: bool | None) -> TracedModel:
        return trace_model(self.task, lambda task: replace(self, task=task).trace(recipe, batch, fused))

    def shards_of(self, traced_model: TracedModel) -> int:
        """The number of ranks that the weights are sharded over; 1 where every rank has a copy."""
        if self.cluster is None:
            return self.shards
        return self.cluster.gpus if choose_parallel(self.parallel, traced_model.parameters) == "fsdp" else 1

    def predict_memory(self, recipe: Recipe, batch: int | None = None) -> Memory:
        """Predict the memory of one GPU."""
        if self.gpus == 1:
            return predict_memory(self.trace(recipe, batch))
        traced_model = self.trace_model(recipe, batch)
        return traced_model.memory(self.shards_of(traced_model))


@dataclass(frozen=True, kw_only=True)
class RecipeForecast:
    """The forecast of one recipe."""

    memory: Memory
    roofline: Roofline
    fits: bool
    largest_batch: int | None = None
    """The largest batch that fits; 0 where none does, None without ``search``."""
    advice: str = ""
    """What to change so that it fits; empty where it does, and without ``search``."""
    plan: MemoryPlan | None = None
    """What each block keeps for backward; None without ``fit``."""


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """A task's predicted memory and time on a GPU, by recipe.

    ``forecast["fp8"]`` is the forecast of one recipe; iterating gives the recipes' names.
    """

    task: str
    """The task's name."""
    gpu: Gpu
    """The GPU that it was predicted for."""
    unit: str
    """What the task counts: token or image."""
    parameters: int
    """Parameters of the model."""
    recipes: dict[str, RecipeForecast] = field(default_factory=dict)

    def __getitem__(self, recipe: str | Recipe) -> RecipeForecast:
        """The forecast of a recipe, whatever the order of the fields in its text."""
        if recipe not in self.recipes:
            with contextlib.suppress(UsageError):
                recipe = str(parse(recipe))
        return self.recipes[str(recipe)]

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
    fit: str | int | None = None,
    tell: Callable[[str], None] = lambda line: None,
) -> Forecast:
    """Predict memory and time of a task under several recipes. No GPU is needed.

    Args:
        task: A task, or the name of a built-in one.
        recipes: The recipes to predict.
        gpu: A GPU of the table (``ng.hardware.gpus()``), by its name or an alias.
        batch: Replaces the task's own batch size.
        accumulate: Microbatches per update.
        compile: Predict the model as torch.compile runs it.
        shards: FSDP ranks that share the weights, on unspecified nodes.
        gpus: Number of GPUs, each with its own batch; the forecast is for one of them.
        nodes: Number of nodes the GPUs are on; by default as few as hold them.
        parallel: How several GPUs share the model: ``fsdp`` (shards), ``ddp`` (copies) or ``auto`` (by its size).
        search: Also search for the largest batch that fits, and for what to change where a recipe does not fit.
        fit: Fit the steps of one GPU into this much memory (``"80GB"``, ``"0.9"`` of the GPU's), as ``memory_budget``
            of ``Engine`` does: ``found["fp8"].plan`` says what each block keeps for backward.
        tell: Is called with a line of text for each step of the work.

    Returns:
        The forecasts by recipe: ``found["fp8"].memory.total`` in bytes, ``found["fp8"].roofline.step_ms``.

    Raises:
        UsageError: The task, a recipe, the GPU or a size is invalid, or the GPU cannot run a recipe.
    """
    made = tasks.find(task) if isinstance(task, str) else task
    found = hardware.find_gpu(gpu)
    cluster = None if gpus is None else make_cluster(found, gpus, nodes)
    scenario = Scenario(
        task=made, gpu=found, batch=batch, accumulate=accumulate, compile=compile, shards=shards, cluster=cluster,
        parallel=parallel, fit=fit,
    )  # fmt: skip
    several = [recipes] if isinstance(recipes, str | Recipe) else recipes
    outlooks: dict[str, RecipeForecast] = {}
    parameters = 0
    for recipe in scenario.choose_recipes(several, tell):
        tell(f"{recipe}: tracing simulated steps")
        traced = scenario.trace(recipe) if scenario.gpus == 1 else scenario.trace_model(recipe)
        outlooks[str(recipe)] = predict_recipe(scenario, recipe, traced, search, tell)
        parameters = traced.parameters
    return Forecast(task=made.name, gpu=scenario.gpu, unit=made.unit, parameters=parameters, recipes=outlooks)


def predict_recipe(
    scenario: Scenario,
    recipe: Recipe,
    traced: Traced | TracedModel,
    search: bool,
    tell: Callable[[str], None] = lambda line: None,
) -> RecipeForecast:
    """Predict one recipe from its trace."""
    if isinstance(traced, TracedModel):
        memory = traced.memory(scenario.shards_of(traced))
        roofline = sum_costs(traced.traced, traced.costs(ReachableRates(scenario.gpu)))
    else:
        memory = predict_memory(traced)
        roofline = predict_time(traced, ReachableRates(scenario.gpu))
    plan = complete_plan(traced, memory) if isinstance(traced, Traced) else None
    good = fits(memory, scenario.gpu) and (plan is None or plan.fits)
    largest = find_largest_batch(scenario, recipe, memory, tell) if search else None
    return RecipeForecast(
        memory=memory,
        roofline=roofline,
        fits=good,
        largest_batch=largest,
        advice="" if good or not search else advise(scenario, recipe, tell),
        plan=plan,
    )


def complete_plan(traced: Traced, memory: Memory) -> MemoryPlan | None:
    """Return the plan of a trace with the peak that is predicted for it."""
    if traced.plan is None:
        return None
    least = max(min(traced.plan.smallest, memory.total), memory.first_step, memory.building)
    return replace(traced.plan, peak=memory.peak, smallest=least, fits=memory.peak <= traced.plan.budget)


def find_largest_batch(
    scenario: Scenario, recipe: Recipe, memory: Memory, tell: Callable[[str], None] = lambda line: None
) -> int:
    """Find the largest batch that fits, to within half a percent.

    Memory per item follows from the two batches nearest to the limit. It does not have to be linear: small batches may
    take no more than the optimizer's step, the head works in chunks, and a contrastive loss grows with the square. So a
    batch is at most ``MOST_GROWTH`` times the largest one tried, and where the line through a batch that fits and one
    that does not has closed less than half of the interval between them, the interval is halved instead.
    """
    limit = get_usable_bytes(scenario.gpu)
    known = {memory.batch: memory.peak}
    low = memory.batch if memory.peak <= limit else 0  # the largest that is known to fit
    high = 0 if low else memory.batch  # the smallest that is known not to
    guess = max(1, memory.batch // 2) if memory.batch > 1 else 2
    halve = False
    for _ in range(MOST_TRACES):
        if guess not in known:
            tell(f"{recipe}: trying a batch of {guess}")
            known[guess] = scenario.predict_memory(recipe, guess).peak
        before = high - low
        low = max((batch for batch, peak in known.items() if peak <= limit), default=0)
        high = min((batch for batch, peak in known.items() if peak > limit and batch > low), default=0)
        if (high and high - low <= max(1, low // 200)) or low >= LARGEST_BATCH:
            break
        if high and low:
            first, second = low, high
        else:
            first, second = sorted(known)[:2] if high else sorted(known)[-2:]
        slope = (known[second] - known[first]) / (second - first)
        if low and high and limit - known[low] < slope and high - low <= 2:
            break
        halve = bool(high and before and before > 0 and not halve and high - low > before // 2)
        if halve or slope <= 0:
            guess = round((max(low, 1) * high) ** 0.5) if high else low * MOST_GROWTH
        else:
            guess = first + int((limit - known[first]) / slope)
        most = high - 1 if high else min(MOST_GROWTH * max(known), LARGEST_BATCH)
        guess = max(low + 1, min(guess, most))
        if high == 1:
            break
    return low


def advise(scenario: Scenario, recipe: Recipe, tell: Callable[[str], None] = lambda line: None) -> str:
    """The first change that lets the task fit, in a sentence."""
    limit = get_usable_bytes(scenario.gpu)
    least: Memory | None = None
    for candidate in list_leaner_recipes(recipe):
        if refusal(candidate, describe_device(scenario.gpu)) is not None:
            continue
        tell(f"{recipe} does not fit: trying {candidate}")
        try:
            memory = scenario.predict_memory(candidate)
        except UsageError:
            continue  # models without blocks cannot recompute them, and sharded gradients cannot be released
        if memory.peak <= limit:
            return f"use {candidate}: {memory.peak / 1e9:.1f} GB"
        if candidate.gradients != "released" and (least is None or memory.peak < least.peak):
            least = memory
    for more in _larger(scenario):
        if least is not None:
            sharded = more.predict_memory(parse(least.recipe), least.batch)
            if sharded.peak <= limit:
                return f"use {least.recipe} on {more.gpus} GPUs: {sharded.peak / 1e9:.1f} GB on each"
    return "use a smaller batch, a shorter context or a GPU with more memory"


def _larger(scenario: Scenario) -> Iterator[Scenario]:
    """The same scenario, sharded over more GPUs."""
    if scenario.cluster is None:
        yield from (replace(scenario, shards=ranks) for ranks in (2, 4, 8, 16, 32, 64) if ranks > scenario.shards)
        return
    if scenario.parallel != "fsdp":
        yield replace(scenario, parallel="fsdp")
    for ranks in (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024):
        if ranks > scenario.cluster.gpus:
            yield replace(scenario, cluster=make_cluster(scenario.gpu, ranks), parallel="fsdp")
