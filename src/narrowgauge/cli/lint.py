"""``narrowgauge lint``: pitfalls of mixed precision in scripts, notebooks, models and recipes."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
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
    from narrowgauge.lint.importers import Importers
    from narrowgauge.lint.settings import Settings
    from narrowgauge.recipe import Recipe
    from narrowgauge.task import Task

ABOUT = "find pitfalls of mixed precision in scripts, notebooks, folders, or a task's model, optimizer and recipe"
STDIN = "-"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "targets",
        nargs="*",
        metavar="TASK",
        help="scripts, notebooks and folders, which are not run, tasks as in train, or - for stdin (default: the "
        "current folder, or if it has no scripts, the default task)",
    )
    add("--recipe", help="recipe of the training (default auto; bf16 without a GPU)")
    add(
        "--select", action="append", metavar="RULES", help="check these rules only; patterns such as engine-* are valid"
    )
    add("--ignore", action="append", metavar="RULES", help="do not check these rules")
    add("--exclude", action="append", metavar="PATTERN", help="leave out files and folders that match")
    add(
        "--fail-on",
        choices=("serious", "warning", "note"),
        help="mildest severity with exit code 1 (default: serious findings and likely bugs, but not advice)",
    )
    add("--baseline", metavar="FILE", help="report only findings that this file does not contain")
    add("--write-baseline", metavar="FILE", help="write the findings to a file for --baseline, and exit with 0")
    add("--stdin", action="store_true", help="read a script from stdin")
    add("--stdin-filename", metavar="NAME", help="name of the script on stdin; with .ipynb it is a notebook")
    add("--sarif", metavar="FILE", help="also write the findings as SARIF 2.1.0, for code hosts")
    add("--rules", action="store_true", help="list the rules and exit")


def run(args: argparse.Namespace) -> Outcome:
    out = prose(args)
    if args.rules:
        return _print_rules(out)
    from narrowgauge.lint import baseline
    from narrowgauge.lint.rule import in_order

    settings = _settings(args)
    for option in ("sarif", "write_baseline"):
        if getattr(args, option) is not None:
            files.refuse_unwritable(Path(getattr(args, option)), f"--{option.replace('_', '-')}")
    found, checked = _check_all(_targets(args), args, settings)
    found = [finding for finding in in_order(found) if settings.shows(finding)]
    if args.write_baseline is not None:
        count = baseline.save(found, Path(args.write_baseline))
        say(f"baseline with {count} finding{'s' * (count != 1)}: {args.write_baseline}", out)
        return Outcome(_data(found, checked, args))
    if settings.baseline is not None:
        found = baseline.remove_known(found, Path(settings.baseline))
    _show(found, checked, out)
    if args.sarif is not None:
        _write_sarif(found, Path(args.sarif))
        say(f"SARIF: {args.sarif}", out)
    return Outcome(_data(found, checked, args), exit_code=1 if any(map(settings.fails, found)) else 0)


def _data(found: list[Finding], checked: dict[str, str], args: argparse.Namespace) -> dict[str, Any]:
    return {"findings": [finding.describe() for finding in found], "checked": checked, "sarif": args.sarif}


def _settings(args: argparse.Namespace) -> Settings:
    from narrowgauge.lint.settings import read_settings, split_names

    lists = {name: split_names(getattr(args, name)) for name in ("select", "ignore", "exclude")}
    return read_settings(Path.cwd()).override({**lists, "fail_on": args.fail_on, "baseline": args.baseline})


def _targets(args: argparse.Namespace) -> list[str]:
    """Return what to check; without arguments the current folder, or the default task if it has no scripts."""
    from narrowgauge.lint.discovery import find_scripts

    if args.stdin or args.stdin_filename is not None:
        if set(args.targets) - {STDIN}:
            raise UsageError(f"lint: --stdin and {args.targets[0]!r} cannot be combined; give one of them")
        return [STDIN]
    if args.targets:
        return list(dict.fromkeys(args.targets))
    if find_scripts(Path()):
        return ["."]
    if not _has_torch():
        raise UsageError("lint: the current folder has no scripts or notebooks; give files, folders, or - for stdin")
    from narrowgauge import hardware, tasks

    return [tasks.default(hardware.detect(args.device).kind)]


def _has_torch() -> bool:
    try:
        return importlib.util.find_spec("torch") is not None
    except ValueError:  # something replaced the module
        return False


def _check_all(
    targets: list[str], args: argparse.Namespace, settings: Settings
) -> tuple[list[Finding], dict[str, str]]:
    """Return the findings in all targets, and what each target is. A file that cannot be read is a finding.

    Raises:
        UsageError: Nothing could be read.
    """
    from narrowgauge.lint import script
    from narrowgauge.lint.discovery import find_scripts, is_excluded
    from narrowgauge.lint.importers import Importers

    recipe = _given_recipe(args)
    found: list[Finding] = []
    checked: dict[str, str] = {}
    errors: list[UsageError] = []
    was_read = False
    for target in targets:
        path = Path(target)
        parts: list[str | Path]
        if target != STDIN and files.is_folder(path):
            parts, checked[target] = list(find_scripts(path, settings.exclude)), "folder"
            was_read = was_read or not parts
        elif target != STDIN and is_excluded(path, settings.exclude):
            checked[target], parts, was_read = "excluded", [], True
        else:
            parts = [target]
        importers = Importers(Path(part) for part in parts) if len(parts) > 1 else Importers()
        for part in parts:
            try:
                new, what = _check(str(part), args, recipe, importers)
            except UsageError as error:
                errors.append(error)
                found.append(script.unreadable(Path(part), error))
                checked.setdefault(target, "unreadable")
            else:
                found += new
                checked.setdefault(target, what)
                was_read = True
    if errors and not was_read:
        more = f" (and {len(errors) - 1} more that cannot be read)" if len(errors) > 1 else ""
        raise UsageError(f"{errors[0]}{more}")
    return found, checked


def _given_recipe(args: argparse.Namespace) -> Recipe | None:
    """Return the recipe of --recipe; scripts do not need one."""
    from narrowgauge.recipe import parse

    if args.recipe is None:
        return None
    if args.recipe.split("[")[0] != "auto":
        return parse(args.recipe)
    from narrowgauge import hardware

    return parse(args.recipe, hardware.detect(args.device))


def _check(
    target: str, args: argparse.Namespace, recipe: Recipe | None, importers: Importers
) -> tuple[list[Finding], str]:
    """Return the findings in one file or task, and which of them it is."""
    from narrowgauge.findings import Span
    from narrowgauge.lint import script, source

    path = Path(target)
    formats = [recipe.compute] if recipe is not None else []
    if target == STDIN:
        data = sys.stdin.buffer.read(files.LARGEST)
        return script.check_source(source.decode(data, args.stdin_filename or "<stdin>"), formats), "stdin"
    if files.is_file(path):
        return script.check(path, formats, importers), "notebook" if path.suffix in (".ipynb", ".json") else "script"
    is_task = ".py:" in target
    if not is_task and (path.suffix in (".py", ".ipynb", ".json") or "/" in target):
        raise UsageError(f"lint: there is no file or folder {target!r}")
    if not _has_torch():
        raise UsageError(f"lint: {target!r} is no file or folder; to check a task, install torch")
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
    from narrowgauge.runs.optimizers import make_optimizers

    task = tasks.find(spec, **options)
    model = _build(task, spec)
    try:
        optimizers = make_optimizers(task, model, task.learning_rate)
    except UsageError:
        raise
    except Exception as error:  # the user's code
        raise UsageError(f"task {spec!r}: its optimizer cannot be created: {type(error).__name__}: {error}") from error
    found = [finding for optimizer in optimizers for finding in check(model, optimizer, recipe)]
    return list(dict.fromkeys(found))  # what is about the model is found with each


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
