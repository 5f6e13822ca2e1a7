"""The command line: ``narrowgauge VERB [TASK] [options]``. Each verb has its own file; this one parses and runs it.

A verb's module has ``ABOUT`` (one line of help), ``add_arguments(parser)`` and ``run(args) -> Outcome``. Importing it
must be cheap: torch and other slow imports belong inside ``run``.
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

from narrowgauge.cli import failure, output, task_options
from narrowgauge.cli.numbers import long
from narrowgauge.errors import UsageError, one_line

VERBS = (
    "formats", "doctor", "train", "validate", "replay", "break", "bench", "memory", "roofline", "report", "lint",
    "export",
)  # fmt: skip

MAY_BE_EMPTY = ("peers", "profile", "recipes", "candidates")
"""Options for which an empty value has a meaning, or an error message of its own."""


@dataclass
class Outcome:
    """The result of a verb: its JSON object and its exit code (0: success, 1: completed with a finding)."""

    data: dict[str, Any] | None = field(default_factory=dict)
    """None: another process prints the result."""
    exit_code: int = 0


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are one line, with exit code 2."""

    def error(self, message: str) -> NoReturn:
        """Print the message as one line and exit with code 2."""
        self.exit(2, f"narrowgauge: {one_line(message, 600)} (see {self.prog} --help)\n")


def make_parser(user_task: tuple[str, str] | None = None, verb_names: Sequence[str] = VERBS) -> Parser:
    """Return the parser of the verbs.

    Args:
        user_task: A verb and a user's task, whose options the verb takes as well.
        verb_names: The verbs that it can parse.
    """
    from narrowgauge.version import __version__

    parser = Parser(
        prog="narrowgauge", description="Mixed-precision training that is fast, stays on the rails, and proves it."
    )
    parser.add_argument("--version", action="version", version=f"narrowgauge {__version__}")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True, parser_class=Parser)
    for name in verb_names:
        module = importlib.import_module(f"narrowgauge.cli.{name}{'_' * keyword.iskeyword(name)}")
        verb = verbs.add_parser(name, help=module.ABOUT, description=module.ABOUT)
        verb.add_argument("--json", action="store_true", help="print one JSON object, and nothing else, on stdout")
        verb.add_argument("--seed", type=long, default=0, help="random seed (default 0)")
        verb.add_argument("--device", help="cpu, cuda or cuda:N (default: the GPU, if any)")
        verb.add_argument("--out", metavar="DIR", help="folder to write to")
        module.add_arguments(verb)
        if user_task is not None and name == user_task[0]:
            task_options.add_options(verb, user_task[1])
        verb.set_defaults(run=module.run)
    return parser


def prose(args: argparse.Namespace) -> TextIO:
    """Return the stream for human-readable text: stdout, or stderr if stdout has the JSON object."""
    return sys.stderr if args.json else sys.stdout


def _refuse_empty_names(args: argparse.Namespace) -> None:
    """Raise UsageError for an empty value, such as an unset shell variable: the default would be a surprise."""
    for name, value in vars(args).items():
        if name not in MAY_BE_EMPTY and (value == "" or (isinstance(value, list) and "" in value)):
            raise UsageError(f"{name.replace('_', '-')}: the value is empty; give one, or leave the option out")


def _escape_unencodable() -> None:
    """Escape characters that the terminal's encoding lacks, instead of raising UnicodeEncodeError."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: The arguments. Default: those of the process.

    Returns:
        The exit code: 0 success, 1 a finding, 2 wrong input, 3 an unexpected error, 130 interrupted.
    """
    _escape_unencodable()
    try:
        args = _parse(sys.argv[1:] if argv is None else argv)
    except KeyboardInterrupt:  # a user's task is run to find its options, and takes seconds to import torch
        return _report_interrupt()
    except Exception as error:
        return failure.report(error)
    with output.protect_streams() as out:
        return _run(args, out)


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    if any("\0" in text for text in argv):
        raise UsageError("an argument contains a zero byte, which no file name can have")
    spec = task_options.find_task(argv)
    wanted = argv[:1] if argv and argv[0] in VERBS else VERBS  # the parsers of all verbs take ten times as long
    args = make_parser(None if spec is None else (argv[0], spec), wanted).parse_args(argv)
    args.own = task_options.take_options(args)
    _refuse_empty_names(args)
    return args


def _report_interrupt() -> int:
    print("narrowgauge: interrupted", file=sys.stderr)
    return 130


def _run(args: argparse.Namespace, out: output.ProtectedStream) -> int:
    try:
        outcome: Outcome = args.run(args)
        if args.json and outcome.data is not None:
            print(json.dumps(outcome.data, allow_nan=False), flush=True)
            if out.failure is not None and out.failure.errno != errno.EPIPE:
                return outcome.exit_code or 2  # the JSON object was not written
        return outcome.exit_code
    except KeyboardInterrupt:
        return _report_interrupt()
    except (Exception, SystemExit) as error:  # also a task that calls sys.exit()
        return failure.report(error)
