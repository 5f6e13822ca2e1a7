"""Plans the memory of a run before it starts, and reports the plan once steps have run with it.

On one GPU of the table the plan is predicted, and is the one that ``narrowgauge memory --fit`` predicts. The engine
checks it by the peak of the second step. Otherwise (several ranks, another GPU, a task that needs data) the engine
plans from its first steps.
"""

from __future__ import annotations

from collections.abc import Callable

from narrowgauge import hardware
from narrowgauge.byte_sizes import format_size, parse_budget
from narrowgauge.engine.fit_memory import Budget
from narrowgauge.errors import UsageError
from narrowgauge.forecast.memory.estimate import predict_memory
from narrowgauge.forecast.run import Scenario, complete_plan
from narrowgauge.ranks.world import World
from narrowgauge.runs.settings import Settings
from narrowgauge.task import Task


def plan_memory(task: Task, settings: Settings, world: World, notify: Callable[[str], None]) -> Budget | None:
    """Return the memory plan of a run, or its budget in bytes if the plan cannot be predicted; None without budget.

    Raises:
        UsageError: The run does not fit, the budget is not a size, or the device is a CPU.
    """
    if not settings.fit:
        return None
    device = hardware.detect(settings.device)
    if device.kind != "cuda":
        raise UsageError(f"--fit {settings.fit}: torch does not count what a CPU allocates; train on a GPU")
    budget = parse_budget(settings.fit, device.memory_bytes, "--fit")
    if not world.is_single or device.gpu is None:
        return budget
    scenario = Scenario(task=task, gpu=device.gpu, accumulate=settings.accumulate, compile=settings.compile, fit=budget)
    notify(f"planning memory for {format_size(budget)}: tracing simulated steps")
    try:
        (recipe,) = scenario.choose_recipes([settings.recipe], lambda line: None)
        traced = scenario.trace(recipe)
    except UsageError as error:
        notify(f"the memory plan cannot be predicted, so the first steps are measured: {error}")
        return budget
    plan = complete_plan(traced, predict_memory(traced))
    assert plan is not None
    if not plan.fits:
        raise UsageError(f"--fit {settings.fit}: {plan}; use a smaller batch, a shorter context or a lean recipe")
    notify(str(plan))
    return plan
