"""``narrowgauge bench --to-loss``: how much faster each recipe reaches the final loss of the first one.

A ratio of step times says nothing about a recipe that needs more steps. So the recipes are trained in paired runs, as
by ``narrowgauge validate --time``, of which this is the short form for a benchmark.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TextIO

from narrowgauge.cli.numbers import number, whole
from narrowgauge.cli.terminal import say, show_table
from narrowgauge.cli.validate import BUDGET, MARGIN
from narrowgauge.errors import UsageError

if TYPE_CHECKING:
    from narrowgauge.validate.run import Validation

NEEDS_TO_LOSS = ("updates", "seeds", "margin", "budget", "lr")
"""Options that have no meaning without ``--to-loss``."""
EXCLUDES = ("model", "against", "fit")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the verb ``bench`` that belong to this."""
    add = parser.add_argument
    add(
        "--to-loss",
        action="store_true",
        help="also train paired runs, and measure how much faster each recipe reaches the first one's final loss",
    )
    add("--updates", type=whole, metavar="N", help="with --to-loss: updates per run (default: the task's, or fewer)")
    add(
        "--seeds", type=whole, metavar="N", help="with --to-loss: pairs of runs (default: as many as the budget allows)"
    )
    add("--lr", type=number, metavar="RATE", help="with --to-loss: peak learning rate (default: the task's)")
    add("--margin", type=number, help=f"with --to-loss: largest equivalent relative gap of the loss (default {MARGIN})")
    add(
        "--budget",
        type=number,
        metavar="MINUTES",
        help=f"with --to-loss: time limit if --seeds is omitted (default {BUDGET:g})",
    )


def check_arguments(args: argparse.Namespace) -> None:
    """Raise UsageError for options that do not go together, before anything is measured."""
    if not args.to_loss:
        lost = next((name for name in NEEDS_TO_LOSS if getattr(args, name) is not None), None)
        if lost is not None:
            raise UsageError(f"--{lost} is for runs that are trained: give --to-loss too, or omit it")
        return
    other = next((name for name in EXCLUDES if getattr(args, name) is not None), None)
    if other == "model":
        raise UsageError(
            "--to-loss trains a task, and --model has no data: use validate --model FOLDER --data FILE --time"
        )
    if other is not None:
        raise UsageError(f"--to-loss does not go with --{other}: omit one of them")
    if args.updates is not None and args.updates < 1:
        raise UsageError(f"--updates {args.updates}: expected a whole number of at least 1")
    from narrowgauge.runs.settings import check_learning_rate
    from narrowgauge.validate.run import check_arguments

    seeds, margin, budget = _read_settings(args)
    check_arguments(seeds, margin, budget * 60)
    if args.lr is not None:
        check_learning_rate(args.lr)


def check_recipes(recipes: Sequence[str]) -> None:
    """Raise UsageError unless there is something to compare."""
    if len(recipes) < 2:
        raise UsageError(
            f"--to-loss compares recipes with the first one, and {', '.join(recipes)} is alone: give --recipes bf16,fp8"
        )


def train_to_loss(
    args: argparse.Namespace, spec: str, options: dict[str, Any], optimizer: str, recipes: Sequence[str], out: TextIO
) -> Validation:
    """Train the recipes in paired runs, and measure their steps in turns."""
    from narrowgauge.validate.run import validate

    reference, *candidates = recipes
    seeds, margin, budget = _read_settings(args)
    say(f"{spec}: training {', '.join(candidates)} and {reference}, the reference, to their final losses", out)
    return validate(
        spec,
        candidates,
        reference,
        seeds=seeds,
        margin=margin,
        steps=args.updates,
        learning_rate=args.lr,
        optimizer=optimizer,
        options=options,
        budget_s=budget * 60,
        device=args.device,
        out=args.out,
        time_steps=True,
        tell=lambda line: say(line, out),
    )


def describe(validation: Validation) -> dict[str, Any]:
    """Return the result as JSON data."""
    found = validation.describe()
    kept = ("verdict", "gap", "interval", "seeds", "losses", "diverged")
    candidates = {
        name: {"speed": one["speed"], **{key: one[key] for key in kept}} for name, one in found["candidates"].items()
    }
    same = ("reference", "margin", "steps", "losses", "seconds")
    return {**{key: found[key] for key in same}, "candidates": candidates}


def show(validation: Validation, out: TextIO) -> None:
    """Print the table and a sentence for each recipe."""
    rows = []
    for name, speed in validation.speeds.items():
        verdict = validation[name]
        interval = "" if speed.interval is None else "{:.3f} to {:.3f}".format(*speed.interval)
        rows.append(
            [
                name,
                f"{speed.step_ratio:.3f}",
                "" if speed.steps_needed is None else f"{speed.steps_needed:.3f}",
                "" if speed.ratio is None else f"{speed.ratio:.3f}",
                interval,
                "" if speed.plain_ratio is None else f"{speed.plain_ratio:.3f}",
                "" if verdict.gap is None else f"{verdict.gap:+.3%}",
                verdict.verdict,
            ]
        )
    steps = validation.experiment.settings["steps"]
    title = f"time to the final loss of {validation.reference}, runs of {steps} updates"
    columns = ["", "x step", "steps needed", "x equal loss", "interval", "x PyTorch", "gap", "loss is"]
    show_table(title, columns, rows, out)
    for name, speed in validation.speeds.items():
        say(f"{name}: {speed.reason}", out)


def is_answered(validation: Validation) -> bool:
    """Whether every recipe has a speed at equal loss."""
    return all(speed.ratio is not None for speed in validation.speeds.values())


def _read_settings(args: argparse.Namespace) -> tuple[Any, float, float]:
    seeds = "auto" if args.seeds is None else args.seeds
    return seeds, MARGIN if args.margin is None else args.margin, BUDGET if args.budget is None else args.budget
