"""``ng.forecast(task, ...)``: memory and time of a task under several recipes, before anything is run.

>>> found = narrowgauge.forecast("gpt2-124m", ["bf16", "fp8"], gpu="h200")
>>> found["fp8"].memory.total, found["fp8"].roofline.step_ms
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from narrowgauge import hardware, tasks
from narrowgauge.errors import UsageError
from narrowgauge.forecast.ceilings import Ceilings
from narrowgauge.forecast.machine import device_of
from narrowgauge.forecast.memory import Memory, fits, leaner, predict_memory, usable_bytes
from narrowgauge.forecast.roofline import Roofline, predict
from narrowgauge.forecast.steps import Traced, trace_steps
from narrowgauge.hardware import Gpu
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

    def __post_init__(self) -> None:
        for name in ("batch", "accumulate", "shards"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise UsageError(f"forecast: {name}={value!r} must be a whole number of at least 1")

    def trace(self, recipe: Recipe, batch: int | None = None, fused: bool | None = None) -> Traced:
        """Trace a recipe; refuses what the GPU cannot run."""
        reason = refusal(recipe, device_of(self.gpu))
        if reason is not None:
            raise UsageError(reason)
        return trace_steps(
            self.task, recipe, self.gpu, batch=batch or self.batch, accumulate=self.accumulate,
            compile=self.compile and fused is not False, fused=fused,
        )  # fmt: skip

    def memory(self, recipe: Recipe, batch: int | None = None) -> Memory:
        return predict_memory(self.trace(recipe, batch), self.shards)


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
    search: bool = False,
    tell: Callable[[str], None] = lambda line: None,
) -> Forecast:
    """Forecast a task (or a built-in one's name) under recipes on a GPU of the table.

    ``search`` looks for the largest batch that fits, and for what to switch on where a recipe does not; ``tell`` hears
    what is going on. Recipes that the GPU cannot run are refused.
    """
    made = tasks.find(task) if isinstance(task, str) else task
    plan = Plan(
        task=made, gpu=hardware.find_gpu(gpu), batch=batch, accumulate=accumulate, compile=compile, shards=shards
    )
    device = device_of(plan.gpu)
    several = [recipes] if isinstance(recipes, str | Recipe) else recipes
    outlooks: dict[str, Outlook] = {}
    parameters = 0
    for recipe in dict.fromkeys(parse(one, device) for one in several):
        tell(f"{recipe}: tracing two steps on paper")
        traced = plan.trace(recipe)
        outlooks[str(recipe)] = look(plan, recipe, traced, search, tell)
        parameters = traced.parameters
    return Forecast(task=made.name, gpu=plan.gpu, unit=made.unit, parameters=parameters, recipes=outlooks)


def look(
    plan: Plan, recipe: Recipe, traced: Traced, search: bool, tell: Callable[[str], None] = lambda line: None
) -> Outlook:
    """One recipe's forecast from its trace."""
    memory = predict_memory(traced, plan.shards)
    good = fits(memory, plan.gpu)
    largest = largest_batch(plan, recipe, memory, tell) if search else None
    return Outlook(
        memory=memory,
        roofline=predict(traced, Ceilings(plan.gpu)),
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
        if refusal(candidate, device_of(plan.gpu)) is not None:
            continue
        tell(f"{recipe} does not fit: trying {candidate}")
        try:
            memory = plan.memory(candidate)
        except UsageError:
            continue  # a model without blocks cannot recompute them
        if memory.peak <= limit:
            return f"take {candidate}: {memory.peak / 1e9:.1f} GB"
        least = memory if least is None or memory.peak < least.peak else least
    for ranks in (2, 4, 8, 16, 32, 64):
        if least is not None and ranks > plan.shards:
            spread = replace(plan, shards=ranks).memory(parse(least.recipe), least.batch)
            if spread.peak <= limit:
                return f"take {least.recipe} on {ranks} GPUs: {spread.peak / 1e9:.1f} GB on each"
    return "take a smaller batch, a shorter context or more memory"
