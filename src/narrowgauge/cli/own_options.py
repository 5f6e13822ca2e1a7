"""The options that a user's task brings along: the parameters of its function, beside those that the verb has itself.

The task is looked for among the arguments before they are parsed, so that its options are parsed, checked and listed by
``--help`` like all others: ``narrowgauge train mine.py:make --width 128 --no-bias``.
"""

from __future__ import annotations

import argparse
import contextlib
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
"""Options that name a folder or file in which the task stands."""
_SPEC = re.compile(r"[^-].*\.py:\w+", re.DOTALL)
_PREFIX = "option of the task: "
"""Of the names under which argparse keeps them: no option of a verb has such a name."""


def spec_in(argv: Sequence[str]) -> str | None:
    """The user's task that a command line names, or that what it takes up was made with."""
    if not argv or argv[0] not in VERBS:
        return None
    for text in argv[1:]:
        if _SPEC.fullmatch(text) and not re.match(r"hf:", text):
            return text
    for text, after in zip(argv[1:], [*argv[2:], ""], strict=False):  # a verb alone has nothing behind it
        option, _, value = text.partition("=")
        if option in RECORDED:
            return _recorded(Path(value or after, RECORDED[option]))
    return None


def _recorded(path: Path) -> str | None:
    with contextlib.suppress(ValueError):  # what is wrong with it, the verb says
        saved = files.parse_json(files.read(path))
        if isinstance(saved, dict) and isinstance(saved.get("task"), str) and _SPEC.fullmatch(saved["task"]):
            return str(saved["task"])
    return None


def add(parser: argparse.ArgumentParser, spec: str) -> None:
    """Add the options of a user's task to a verb that has none of these names."""
    from narrowgauge.task import look_ahead

    group = parser.add_argument_group(f"options of {spec}")
    for parameter in look_ahead(spec).values():
        names = list(dict.fromkeys((parameter.option, f"--{parameter.name}")))
        taken = parser._option_string_actions
        if not parameter.kinds or parameter.name == "seed" or any(name in taken for name in names):
            continue
        default = "needed" if parameter.required else f"default {parameter.default}".replace("%", "%%")
        about: dict[str, Any] = {"dest": _PREFIX + parameter.name, "default": argparse.SUPPRESS, "help": default}
        if parameter.is_switch:
            group.add_argument(*names, action=argparse.BooleanOptionalAction, **about)
        else:
            group.add_argument(*names, type=_parser(parameter.parse), metavar=parameter.name.upper(), **about)


def take(args: argparse.Namespace) -> dict[str, Any]:
    """The task's own options that were given, taken out of the arguments."""
    found = {name: value for name, value in vars(args).items() if name.startswith(_PREFIX)}
    for name in found:
        delattr(args, name)
    return {name.removeprefix(_PREFIX): value for name, value in found.items()}


def _parser(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    def parsed(text: str) -> Any:
        try:
            return parse(text)
        except UsageError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parsed
