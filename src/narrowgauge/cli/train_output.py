"""What ``narrowgauge train`` prints: a line at the start, and a summary at the end."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from narrowgauge.cli.terminal import say
from narrowgauge.errors import UsageError
from narrowgauge.recipe import find_emulation, parse

if TYPE_CHECKING:
    from narrowgauge.runs.result import Result
    from narrowgauge.runs.settings import Settings
    from narrowgauge.task import Task

_MOST_CONSEQUENCES = 4


def introduce(task: Task, settings: Settings, folder: Path, why: str | None, out: TextIO) -> None:
    from narrowgauge.recipe import is_auto

    items = task.items_per_batch * settings.accumulate
    say(f"{task.name}: {settings.steps:,} steps of {items:,} {task.unit}s on {settings.device}, in {folder}", out)
    if not is_auto(settings.recipe):  # the trainer tells what auto has chosen, and why
        say(f"recipe {settings.recipe}" + (f": {why}" if why else ""), out)


def describe(result: Result, facts: dict[str, Any]) -> dict[str, Any]:
    from narrowgauge.runs.json_lines import replace_nonfinite

    data = result.describe()
    data["steps"], data["steps_planned"] = data.pop("step"), data["steps"]
    if "unigram_entropy" in facts:
        data["unigram_entropy"] = facts["unigram_entropy"]
    data["emulated"] = find_emulation(result.recipe)
    described: dict[str, Any] = replace_nonfinite(data)
    return described


def _describe_block_format(prediction: dict[str, Any]) -> list[str]:
    """What a block format would do to the operands of linear layers, and how to know whether that is good enough."""
    from narrowgauge.gauges.rules.predict_block_formats import describe_measured

    lines = describe_measured(prediction["measured"], prediction["survives"])
    lines += [f"{one['module']} ({one['kind']}): {one['detail']}" for one in prediction["breaks"][:3]]
    return [*lines, f'-> to test it: narrowgauge validate TASK --candidates "{prediction["recipe"]}" (emulated)']


def _describe_prediction(prediction: dict[str, Any]) -> str:
    """One line: whether a format would work, with which loss scale, what would fail, and the recommended recipe."""
    if prediction.get("unused"):
        return f"nothing of the model would run in {prediction['format'].upper()}: {prediction['unused']} -> bf16"
    survives, scale, breaks = (prediction[name] for name in ("survives", "loss_scale", "breaks"))
    reach = f" up to update {prediction['updates']:,}" if prediction.get("updates") else ""
    verdict = f"would work{reach}" if survives else "would fail"
    scale = f" with a loss scale up to {scale:g}" if scale and survives else ""
    worst = "; ".join(f"{one['module']} ({one['kind']}): {one['detail']}" for one in breaks[:3])
    more = f" and {len(breaks) - 3} more" if len(breaks) > 3 else ""
    return f"{verdict}{scale}" + (f". {worst}{more}" if worst else "") + f" -> {prediction['recipe']}"


def _explain_missing_predictions(result: Result) -> Iterator[tuple[str, str]]:
    """Why ``--predict`` says nothing about a format: its name, and the reason."""
    from narrowgauge.block_formats import BLOCK_FORMATS
    from narrowgauge.gauges.rules.predict_block_formats import RECIPES

    if not result.predictions:
        if result.step and parse(result.recipe).compute in ("fp32", "tf32", "bf16"):
            yield (
                "predicted",
                "nothing: no update that was read was applied, and other formats are predicted from those",
            )
        elif result.step:
            yield "predicted", "nothing: other formats are predicted from a run in fp32, tf32 or bf16"
        return
    known = {prediction["format"] for prediction in result.predictions}
    for name, recipe in RECIPES.items():
        short = recipe.removeprefix("emulated-")
        if short not in known:
            block = BLOCK_FORMATS[name].block
            yield short, f"not measured: no linear layer that it would round (dimensions must be multiples of {block})"


def summarise(result: Result, facts: dict[str, Any], folder: Path, out: TextIO, predict: bool) -> None:
    def line(name: str, text: str) -> None:
        say(f"  {name:<12}{text}", out)

    state = "interrupted" if result.interrupted else "finished" if result.step >= result.steps else "ended"
    say(f"\n{state} after {result.step:,} of {result.steps:,} steps, {result.seconds:.1f} s of training", out)
    if result.sample:
        say("\n" + "\n".join(f"  | {text}" for text in result.sample.splitlines()) + "\n", out)
    line("model", f"{result.parameters:,} parameters, recipe {result.recipe}")
    if result.loss_first is not None:
        line("loss", f"{result.loss_first:.4f} -> {result.loss_last:.4f}")
    if result.loss_eval is not None:
        metrics = "".join(f", {name} {value:.4g}" for name, value in result.metrics.items())
        line("evaluation", f"{result.loss_eval:.4f}{metrics}")
    if "unigram_entropy" in facts:
        line("", f"{facts['unigram_entropy']:.4f} unigram baseline")
    emulated = find_emulation(result.recipe)
    if emulated is not None:
        line("emulated", f"{emulated}: its numbers on any machine, nothing about the speed of hardware that has it")
    if result.tokens_per_s is not None:
        what = "" if emulated is None else " of the emulation"
        line("speed", f"{result.tokens_per_s:,.0f} {result.unit}s/s{what}")
    if result.memory_plan is not None:
        from narrowgauge.nn.memory_plan import MemoryPlan

        line("memory", str(MemoryPlan.read(result.memory_plan)))
    if result.gradient_formats is not None:
        found = list(result.gradient_formats.values())
        line("gradients", f"{found.count('e4m3')} of {len(found)} in E4M3, the others in E5M2")
    line("skipped", f"{result.skipped} of {result.step} updates")
    for captured in result.captures:
        line("captured", f"to replay it: narrowgauge replay {shlex.quote(captured)}")
    for finding in result.findings:
        line(finding.severity, f"{finding.where}: {finding.detail}")
        if finding.why:
            line("", finding.why)
        line("", f"-> {finding.fix}")
        for one in finding.consequences[:_MOST_CONSEQUENCES]:
            line("", f"follows from it: {one.where}: {one.detail}")
        if len(finding.consequences) > _MOST_CONSEQUENCES:
            line("", f"and {len(finding.consequences) - _MOST_CONSEQUENCES} more findings")
    if not result.watched:
        line("health", "not watched (--watch 0): no tensor was read; losses and gradient norms were checked")
    elif not result.findings:
        line("health", "healthy: nothing to report")
    for prediction in result.predictions if predict else ():
        is_measured = prediction.get("measured") is not None  # not in older records
        lines = _describe_block_format(prediction) if is_measured else [_describe_prediction(prediction)]
        for index, text in enumerate(lines):
            line("" if index else prediction["format"], text)
    if predict and result.watched:
        for name, text in _explain_missing_predictions(result):
            line(name, text)
    try:
        from narrowgauge.report import write

        line("report", str(write([folder], folder)))
    except UsageError as error:  # training succeeded even if the report cannot be written
        line("report", f"not written: {error}")
    line("record", f"{folder}/events.jsonl" + (", tensorboard/" if (folder / "tensorboard").is_dir() else ""))
    if result.step < result.steps:
        line("resume with", f"narrowgauge train --resume {shlex.quote(str(folder))}")
