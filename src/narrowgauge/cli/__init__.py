"""The command line: ``narrowgauge VERB [TASK] [options]``. One file a verb; this one finds it, and speaks for errors.

A verb's module has ``ABOUT`` (a line of help), ``add_arguments(parser)`` and ``run(args) -> Outcome``. Importing it
must be cheap: torch and everything heavy is imported inside ``run``.
"""

from __future__ import annotations

import argparse
import errno
import importlib
import json
import keyword
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, TextIO

from narrowgauge.cli import output
from narrowgauge.errors import NarrowgaugeError

CRASHED = 3
"""Exit code where code raised that nobody expected to: a task's own, most of the time. Its traceback is shown."""

VERBS = (
    "formats", "doctor", "train", "validate", "replay", "break", "bench", "memory", "roofline", "report", "lint",
    "export",
)  # fmt: skip


@dataclass
class Outcome:
    """What a verb found: the JSON object it promises, and the exit code (0 good, 1 done with a finding)."""

    data: dict[str, Any] | None = field(default_factory=dict)
    """None: another process speaks for this one."""
    exit_code: int = 0


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are one line and exit code 2."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"narrowgauge: {message} (see {self.prog} --help)\n")


def make_parser() -> Parser:
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
        verb.add_argument("--seed", type=int, default=0, help="seed of everything random (default 0)")
        verb.add_argument("--device", help="cpu, cuda or cuda:N (default: the GPU if there is one)")
        verb.add_argument("--out", metavar="DIR", help="folder to write to")
        module.add_arguments(verb)
        verb.set_defaults(run=module.run)
    return parser


def prose(args: argparse.Namespace) -> TextIO:
    """Where text for people goes: stdout, or stderr when stdout belongs to the JSON object."""
    return sys.stderr if args.json else sys.stdout


def main(argv: Sequence[str] | None = None) -> int:
    args = make_parser().parse_args(argv)
    with output.lasting() as out:
        return _run(args, out)


def _run(args: argparse.Namespace, out: output.Lasting) -> int:
    try:
        outcome: Outcome = args.run(args)
        if args.json and outcome.data is not None:
            print(json.dumps(outcome.data, allow_nan=False), flush=True)
            if out.failure is not None and out.failure.errno != errno.EPIPE:
                return outcome.exit_code or 2  # whoever reads the file finds no object in it
        return outcome.exit_code
    except NarrowgaugeError as error:
        if not error.said:
            print(f"narrowgauge: {' '.join(str(error).split())}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("narrowgauge: interrupted", file=sys.stderr)
        return 130
    except (Exception, SystemExit) as error:  # a task that calls sys.exit() has not finished either
        traceback.print_exc()
        reason = str(error).strip().partition("\n")[0]
        print(f"narrowgauge: {args.verb} ended by {type(error).__name__}: {reason}", file=sys.stderr)
        return CRASHED
