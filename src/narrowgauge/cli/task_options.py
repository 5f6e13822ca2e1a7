"""Options of a user's task: the parameters of its function become options of the verb.

The task is found among the arguments before they are parsed, so its options are parsed, checked and listed by
``--help`` like all others: ``narrowgauge train mine.py:make --width 128 --no-bias``.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from narrowgauge import files
from narrowgauge.errors import UsageError

VERBS = frozenset({"train", "validate", "bench", "memory", "roofline", "lint", "replay"})
"""Verbs that take a task."""
RECORDED = {
    "--resume": "run.json",
    "--against": "",
}
"""Options whose value is a folder or file that names the task, and the file in that folder."""
NOT_TASKS = ("--model", "--candidates")
"""Options whose value may look like a task, but is a model's class in a file, or a recipe with another task."""
_SPEC = re.compile(r"[^-].*\.py:\w+", re.DOTALL)
_PREFIX = "option of the task: "
"""Prefix of the names in argparse's namespace. No option of a verb has it."""


def find_task(argv: Sequence[str]) -> str | None:
    """Return the user's task that a command line names, or that the run or file it resumes was made with."""
    if not argv or argv[0] not in VERBS:
        return None
    for before, text in itertools.pairwise(argv):
        if _SPEC.fullmatch(text) and before not in NOT_TASKS and not re.match(r"hf:", text):
            return text
    for text, after in zip(argv[1:], [*argv[2:], ""], strict=False):  # a verb alone has no argument
        option, _, value = text.partition("=")
        if option in RECORDED:
            return _read_recorded_task(Path(value or after, RECORDED[option]))
    return None


def _read_recorded_task(path: Path) -> str | None:
    with contextlib.suppress(ValueError):  # the verb reports what is wrong
        saved = files.parse_json(files.read(path))
        named = saved.get("task") if isinstance(saved, dict) and saved.get("model") is None else None
        if isinstance(named, str) and _SPEC.fullmatch(named):
            return named
    return None


def add_options(parser: argparse.ArgumentParser, spec: str) -> None:
    """Add the options of a user's task to a verb. The verb's own options take precedence."""
    from narrowgauge.task import read_parameters

    group = parser.add_argument_group(f"options of {spec}")
    for parameter in read_parameters(spec).values():
        names = list(dict.fromkeys((parameter.option, f"--{parameter.name}")))
        taken = parser._option_string_actions
        if not parameter.types or parameter.name == "seed" or any(name in taken for name in names):
            continue
        default = "required" if parameter.required else f"default {parameter.default}".replace("%", "%%")
        about: dict[str, Any] = {"dest": _PREFIX + parameter.name, "default": argparse.SUPPRESS, "help": default}
        if parameter.is_switch:
            group.add_argument(*names, action=argparse.BooleanOptionalAction, **about)
        else:
            group.add_argument(*names, type=_make_type(parameter.parse), metavar=parameter.name.upper(), **about)


def take_options(args: argparse.Namespace) -> dict[str, Any]:
    """Remove the task's options from the arguments and return those that were given."""
    found = {name: value for name, value in vars(args).items() if name.startswith(_PREFIX)}
    for name in found:
        delattr(args, name)
    return {name.removeprefix(_PREFIX): value for name, value in found.items()}


def _make_type(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    def parse_argument(text: str) -> Any:
        try:
            return parse(text)
        except UsageError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parse_argument
