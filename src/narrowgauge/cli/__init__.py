"""The command line: ``narrowgauge VERB [TASK] [options]``. One file a verb; this one finds it, and speaks for errors.

A verb's module has ``ABOUT`` (a line of help), ``add_arguments(parser)`` and ``run(args) -> Outcome``. Importing it
must be cheap: torch and everything heavy is imported inside ``run``.
"""

from __future__ import annotations

import argparse
import errno
import importlib
import io
import json
import keyword
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, TextIO

from narrowgauge.cli import failure, output, own_options
from narrowgauge.cli.numbers import long
from narrowgauge.errors import UsageError, one_line

VERBS = (
    "formats", "doctor", "train", "validate", "replay", "break", "bench", "memory", "roofline", "report", "lint",
    "export",
)  # fmt: skip

MAY_BE_EMPTY = ("peers", "profile", "recipes", "candidates")
"""Options that mean something, or have a line of their own, where they are empty."""


@dataclass
class Outcome:
    """What a verb found: the JSON object it promises, and the exit code (0 good, 1 done with a finding)."""

    data: dict[str, Any] | None = field(default_factory=dict)
    """None: another process speaks for this one."""
    exit_code: int = 0


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are one line and exit code 2."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"narrowgauge: {one_line(message, 600)} (see {self.prog} --help)\n")


def make_parser(own: tuple[str, str] | None = None) -> Parser:
    """The parser of all verbs; ``own``: a verb, and the user's task whose options it takes, too."""
    from narrowgauge import __version__

    parser = Parser(
        prog="narrowgauge", description="Mixed-precision training that is fast, stays on the rails, and proves it."
    )
    parser.add_argument("--version", action="version", version=f"narrowgauge {__version__}")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True, parser_class=Parser)
    for name in VERBS:
        module = importlib.import_module(f"narrowgauge.cli.{name}{'_' * keyword.iskeyword(name)}")
        verb = verbs.add_parser(name, help=module.ABOUT, description=module.ABOUT)
        verb.add_argument("--json", action="store_true", help="print one JSON object on stdout and nothing else there")
        verb.add_argument("--seed", type=long, default=0, help="seed of everything random (default 0)")
        verb.add_argument("--device", help="cpu, cuda or cuda:N (default: the GPU if there is one)")
        verb.add_argument("--out", metavar="DIR", help="folder to write to")
        module.add_arguments(verb)
        if own is not None and name == own[0]:
            own_options.add(verb, own[1])
        verb.set_defaults(run=module.run)
    return parser


def prose(args: argparse.Namespace) -> TextIO:
    """Where text for people goes: stdout, or stderr when stdout belongs to the JSON object."""
    return sys.stderr if args.json else sys.stdout


def _refuse_empty_names(args: argparse.Namespace) -> None:
    """An empty name (an unset variable of a shell) is not the same as none: the default would surprise."""
    for name, value in vars(args).items():
        if name not in MAY_BE_EMPTY and (value == "" or (isinstance(value, list) and "" in value)):
            raise UsageError(f"{name.replace('_', '-')}: the name that was given is empty; give one, or leave it out")


def _show_anything() -> None:
    """Let a terminal of any encoding take any text: what it cannot show is escaped, and ends no verb."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def main(argv: Sequence[str] | None = None) -> int:
    _show_anything()
    try:
        args = _parse(sys.argv[1:] if argv is None else argv)
    except Exception as error:
        return failure.tell(error)
    with output.lasting() as out:
        return _run(args, out)


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    if any("\0" in text for text in argv):
        raise UsageError("an argument holds a zero byte, which no name of a file has")
    spec = own_options.spec_in(argv)
    args = make_parser(None if spec is None else (argv[0], spec)).parse_args(argv)
    args.own = own_options.take(args)
    _refuse_empty_names(args)
    return args


def _run(args: argparse.Namespace, out: output.Lasting) -> int:
    try:
        outcome: Outcome = args.run(args)
        if args.json and outcome.data is not None:
            print(json.dumps(outcome.data, allow_nan=False), flush=True)
            if out.failure is not None and out.failure.errno != errno.EPIPE:
                return outcome.exit_code or 2  # whoever reads the file finds no object in it
        return outcome.exit_code
    except KeyboardInterrupt:
        print("narrowgauge: interrupted", file=sys.stderr)
        return 130
    except (Exception, SystemExit) as error:  # a task that calls sys.exit() has not finished either
        return failure.tell(error)
