"""``narrowgauge replay CAPTURE``: replays a captured step op by op and names the op that produced inf or NaN."""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from narrowgauge.cli import Outcome, prose
from narrowgauge.cli.terminal import has_rich, say, show_table
from narrowgauge.errors import UsageError, printable

if TYPE_CHECKING:
    from torch import nn

    from narrowgauge.gauges.replay.capture_files import Capture
    from narrowgauge.gauges.replay.result import Replay
    from narrowgauge.task import Task

ABOUT = "replay a captured step op by op and name the op that produced the first inf or NaN"
EVERY_S = 10.0
"""Seconds between two lines of progress if stderr is not a terminal."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("capture", metavar="CAPTURE", help="a captured step (RUN/captures/step-...), or a run, for its first capture")
    add("--task", help="the task, for captures of your own loop: file.py:function")


def run(args: argparse.Namespace) -> Outcome:
    from narrowgauge.gauges.replay import capture_files
    from narrowgauge.gauges.replay.replay import replay

    held = capture_files.read(Path(args.capture))
    device, task = _choose_device(args, held), _find_task(args, held)
    out = prose(args)
    facts = held.facts
    say(f"{held.path}: step {held.step} under {facts['recipe']}, captured because {facts['why']}", out)
    if str(facts["device"]).split(":")[0] != device.split(":")[0]:
        say(f"captured on {facts['device']}, replayed on {device}: results may differ in the last bits", out)
    with _progress() as progress:
        result = replay(held, _make_model(task, device), task.loss, progress=progress)
    _show(result, out)
    return Outcome(result.describe(), exit_code=1 if result.found else 0)


def _choose_device(args: argparse.Namespace, held: Capture) -> str:
    """The device given with --device, the one it was captured on, or the CPU."""
    import torch

    from narrowgauge import hardware

    there = str(held.facts.get("device", "cpu"))
    if args.device is None and there.startswith("cuda") and torch.cuda.is_available():
        return hardware.detect("cuda").torch_device
    return hardware.detect(args.device or "cpu").torch_device


def _find_task(args: argparse.Namespace, held: Capture) -> Task:
    from narrowgauge import tasks

    run_facts = held.facts.get("run") or {}
    if args.task is not None:
        return tasks.find(args.task, **{**run_facts.get("options", {}), **args.own})
    if not run_facts.get("task"):
        raise UsageError(
            f"capture {held.path} does not name its task; pass --task file.py:function, or call "
            "narrowgauge.replay(capture, model, loss)"
        )
    return tasks.find(run_facts["task"], **run_facts.get("options", {}))


def _make_model(task: Task, device: str) -> Callable[[], nn.Module]:
    import torch

    def make() -> nn.Module:
        with torch.device(device):
            return task.model()

    return make


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """Show progress: a status that updates in place on a terminal, a line every ten seconds elsewhere."""
    err = sys.stderr
    if err.isatty() and has_rich():
        from rich.console import Console

        with Console(file=err, markup=False).status("replaying") as status:
            yield lambda line: status.update(printable(f"replaying: {line}"))
        return
    last = time.monotonic()

    def tell(line: str) -> None:
        nonlocal last
        if time.monotonic() - last >= EVERY_S:
            last = time.monotonic()
            say(f"replaying: {line}", err)

    yield tell


def _show(result: Replay, out: TextIO) -> None:
    def line(name: str, text: str) -> None:
        say(f"  {name:<14}{text}", out)

    say(f"\n{result.message}", out)
    if not result.found:
        return
    line("module", str(result.module))
    line("op", f"{result.op}, {result.phase}" + (f" ({result.kernel})" if result.kernel != result.op else ""))
    line("produced", f"{'NaN' if result.kind == 'nan' else 'inf'}" + (f" at {result.source}" if result.source else ""))
    rows = [_row(entry) for entry in [*result.inputs, *([result.output] if result.output else [])]]
    if rows:
        say("", out)
        show_table("inputs and output", ["tensor", "format", "shape", "min", "max", "not finite"], rows, out)
    answers = {True: "yes", False: "no", None: "unknown"}
    line(
        "FP32 survives",
        f"{answers[result.survives_fp32]} (this op on these inputs: {answers[result.op_survives_fp32]}; the whole step "
        f"in FP32: {answers[result.step_survives_fp32]}; this op in FP64: {answers[result.op_survives_fp64]})",
    )
    if result.step_fp32_unknown is not None:
        line("", f"unknown because {result.step_fp32_unknown}")
    line("what to do", str(result.advice))
    if not result.exact:
        line("note", "weights or batches are not exactly those of the step, because its numbers arrived late")


def _row(entry: dict[str, Any]) -> list[str]:
    if "value" in entry:
        return [entry["name"], "number", "", f"{entry['value']}", f"{entry['value']}", ""]
    numbers = ["" if entry[end] is None else f"{entry[end]:.4g}" for end in ("min", "max")]
    broken = ", ".join(f"{entry[kind]:,} {kind}" for kind in ("nan", "inf") if kind in entry)
    shape = " x ".join(map(str, entry["shape"])) or "scalar"
    return [entry["name"], entry["dtype"], shape, *numbers, broken or "none"]
