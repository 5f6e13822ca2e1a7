"""``narrowgauge lint``: pitfalls of mixed precision in scripts, models and recipes, with location and fix."""

from __future__ import annotations

import argparse
import json
import warnings
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from narrowgauge import files
from narrowgauge.cli import Outcome, prose
from narrowgauge.cli.terminal import say
from narrowgauge.errors import UsageError

if TYPE_CHECKING:
    from torch import nn

    from narrowgauge.findings import Finding
    from narrowgauge.recipe import Recipe
    from narrowgauge.task import Task

ABOUT = "find pitfalls of mixed precision in a script, a folder, or a task's model, optimizer and recipe"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("targets", nargs="*", metavar="TASK", help="scripts and folders, which are not run, or tasks as in train")
    add("--recipe", help="recipe of the training (default auto; bf16 without a GPU)")
    add("--sarif", metavar="FILE", help="also write the findings as SARIF 2.1.0, for code hosts")
    add("--rules", action="store_true", help="list the rules and exit")


def run(args: argparse.Namespace) -> Outcome:
    out = prose(args)
    if args.rules:
        return _print_rules(out)
    from narrowgauge.findings import NOTE
    from narrowgauge.lint.rule import in_order

    if args.sarif is not None:
        files.refuse_unwritable(Path(args.sarif), "--sarif")
    checked: dict[str, str] = {}
    recipe = _given_recipe(args)
    found: list[Finding] = []
    for target in args.targets or [_default(args)]:
        new, what = _check(target, args, recipe)
        found += new
        checked[target] = what
    found = in_order(found)
    _show(found, checked, out)
    if args.sarif is not None:
        _write_sarif(found, Path(args.sarif))
        say(f"SARIF: {args.sarif}", out)
    failed = any(finding.severity != NOTE for finding in found)
    data = {"findings": [finding.describe() for finding in found], "checked": checked, "sarif": args.sarif}
    return Outcome(data, exit_code=1 if failed else 0)


def _default(args: argparse.Namespace) -> str:
    from narrowgauge import hardware, tasks

    return tasks.default(hardware.detect(args.device).kind)


def _given_recipe(args: argparse.Namespace) -> Recipe | None:
    """Return the recipe of --recipe; scripts do not need one."""
    from narrowgauge.recipe import parse

    if args.recipe is None:
        return None
    if args.recipe.split("[")[0] != "auto":
        return parse(args.recipe)
    from narrowgauge import hardware

    return parse(args.recipe, hardware.detect(args.device))


def _check(target: str, args: argparse.Namespace, recipe: Recipe | None) -> tuple[list[Finding], str]:
    """Return the findings in one target, and whether it is a script, a folder or a task."""
    from narrowgauge.findings import Span
    from narrowgauge.lint import script

    path = Path(target)
    formats = [recipe.compute] if recipe is not None else []
    if files.is_folder(path):
        return script.check_folder(path, formats), "folder"
    if files.is_file(path):
        return script.check(path, formats), "script"
    is_task = ".py:" in target
    if not is_task and (target.endswith(".py") or "/" in target):
        raise UsageError(f"lint: there is no file or folder {target!r}")
    recipe = recipe or _machine_recipe(args)
    found = _check_task(target, {**args.own, **({} if is_task else {"seed": args.seed})}, recipe)
    if is_task:
        file, _, function = target.rpartition(":")
        span = Span(file, script.line_of(Path(file), function))
        found = [replace(finding, span=span) for finding in found]
        found += script.check(Path(file), [recipe.compute])
    return found, f"task under {recipe}"


def _machine_recipe(args: argparse.Namespace) -> Recipe:
    """Return the recipe that auto selects here, but BF16 instead of FP32: the training probably runs on a GPU."""
    from narrowgauge import hardware
    from narrowgauge.recipe import NAMED, choose

    recipe = choose(hardware.detect(args.device))[0]
    return NAMED["bf16"] if recipe.compute == "fp32" else recipe


def _check_task(spec: str, options: dict[str, Any], recipe: Recipe) -> list[Finding]:
    from narrowgauge import tasks
    from narrowgauge.lint.model import check
    from narrowgauge.runs.schedule import make_adamw

    task = tasks.find(spec, **options)
    model = _build(task, spec)
    try:
        if task.optimizer is not None:
            optimizer = task.optimizer(model, task.learning_rate)
        else:
            optimizer = make_adamw(model, task.learning_rate, task.weight_decay)
    except Exception as error:  # the user's code
        raise UsageError(f"task {spec!r}: its optimizer cannot be created: {type(error).__name__}: {error}") from error
    return check(model, optimizer, recipe)


def _build(task: Task, spec: str) -> nn.Module:
    """Build the model on the meta device, without memory for its weights, or else on the CPU."""
    import torch

    failure: Exception | None = None
    for device in ("meta", "cpu"):
        try:
            with torch.random.fork_rng(devices=[]), torch.device(device), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return task.model()
        except Exception as error:  # the user's code; many models read values of weights, which meta tensors lack
            failure = error
    raise UsageError(f"task {spec!r}: its model cannot be created: {type(failure).__name__}: {failure}") from failure


def _show(found: list[Finding], checked: dict[str, str], out: TextIO) -> None:
    for finding in found:
        say(f"{finding.where}  {finding.severity}  {finding.rule}", out)
        say(f"    {finding.detail}", out)
        say(f"    why   {finding.why}", out)
        say(f"    fix   {finding.fix}", out)
    counts = Counter(finding.severity for finding in found)
    parts = [f"{counts[kind]} {kind}" for kind in ("serious", "warning", "note") if counts[kind]]
    names = ", ".join(f"{target} ({what})" for target, what in list(checked.items())[:4])
    names += f" and {len(checked) - 4} more" if len(checked) > 4 else ""
    say(f"{', '.join(parts) or 'nothing found'}: {names}", out)


def _write_sarif(found: list[Finding], path: Path) -> None:
    from narrowgauge.lint import sarif

    files.save_text(path, json.dumps(sarif.report(found, Path.cwd()), indent=2), "--sarif")


def _print_rules(out: TextIO) -> Outcome:
    from narrowgauge.lint.rules import RULES

    width = max(map(len, RULES))
    for rule in RULES.values():
        say(f"{rule.name:<{width}}  {rule.severity:<7}  {rule.about}", out)
    rows: list[dict[str, Any]] = [vars(rule) for rule in RULES.values()]
    return Outcome({"rules": rows})
