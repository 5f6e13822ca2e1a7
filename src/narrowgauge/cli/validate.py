"""``narrowgauge validate [TASK]``: tests whether a recipe trains as good a model as FP32, with paired runs.

With ``--model FOLDER --data FILE`` the runs fine-tune that model, and their losses are those on held-out documents.
"""

from __future__ import annotations

import argparse
import math
import re
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from narrowgauge import files
from narrowgauge.cli import Outcome, finetuning, prose
from narrowgauge.cli.numbers import long, number, whole
from narrowgauge.cli.terminal import say, show_table
from narrowgauge.errors import UsageError

if TYPE_CHECKING:
    from narrowgauge.validate.run import Validation

ABOUT = "test whether a recipe trains as good a model as the reference, with paired runs"
FOR_TASK = (
    "batch", "context", "model", "data", "tokenizer", "field", "max_tokens", "vocab", "epochs", "eval_data",
    "eval_share", "accumulate", "lora",
)  # fmt: skip
"""Options that are passed to the task if given."""
MARGIN = 0.005
BUDGET = 10.0
"""Minutes that ``--seeds auto`` may take."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("task", nargs="?", metavar="TASK", help="a built-in task or file.py:function (default: one for this machine)")
    add("--candidates", help="recipes, or RECIPE@TASK, separated by commas (default bf16)")
    add("--reference", help="the recipe to compare with (default fp32)")
    add(
        "--seeds",
        type=_parse_seeds,
        default="auto",
        help="number of pairs of runs, or auto: as many as needed within the budget (default auto)",
    )
    add("--margin", type=number, help=f"largest equivalent relative gap of the loss (default {MARGIN})")
    add(
        "--budget",
        type=number,
        default=BUDGET,
        metavar="MINUTES",
        help=f"time limit of --seeds auto (default {BUDGET:g})",
    )
    layers = "compare one step module by module first (default: yes)"
    add("--layers", action=argparse.BooleanOptionalAction, default=True, help=layers)
    add("--time", action="store_true", help="also measure how much faster each candidate reaches the reference's loss")
    add("--steps", type=whole, metavar="N", help="updates per run (default: the task's, or fewer to fit the budget)")
    add("--batch", type=whole, metavar="N", help="items per batch")
    add("--context", type=whole, metavar="N", help="tokens per sequence, for language tasks")
    add("--lr", type=number, metavar="RATE", help="peak learning rate (default: the task's)")
    add(
        "--optimizer",
        metavar="NAME",
        help="of all runs: adamw (default), or muon: Muon for the blocks' matrices, AdamW for the rest",
    )
    finetuning.add_arguments(parser)
    add(
        "--data", metavar="PATH", help="texts or tokens, as for train; with --model conversations, completions or texts"
    )
    add("--tokenizer", metavar="PATH", help="with --data: a tokenizer.json or its folder (default: as for train)")
    add("--field", metavar="NAME", help="with --data: the field or column with the text")
    add("--max-tokens", type=long, metavar="N", help="with --data: read at most N tokens")
    add("--vocab", type=whole, metavar="N", help="vocabulary size (default: the tokenizer's, or the task's)")
    add("--accumulate", type=whole, metavar="N", help="with --model: batches per update (default 1)")
    add("--save", metavar="FILE", help="write the result as JSON, for --against")
    add("--against", metavar="FILE", help="train again and compare with a saved validation; exit 1 if worse")
    add("--curves", nargs=2, metavar=("REFERENCE", "CANDIDATE"), help="compare the logs of finished runs instead")
    add("--tag", help="with --curves: the name of the loss in the logs")


def _parse_seeds(text: str) -> int | str:
    """A number, or the text itself: ``validate`` accepts only auto."""
    return whole(text) if text.lstrip("-").isdecimal() else text


def run(args: argparse.Namespace) -> Outcome:
    if args.curves:
        if args.task or args.model or args.candidates or args.save or args.against:
            raise UsageError(
                "--curves compares finished runs: omit the task, --model, --candidates, --save and --against"
            )
        return _compare_logs(args)
    from narrowgauge.recipe import parse, refuse_emulation, split
    from narrowgauge.runs.settings import OPTIMIZERS
    from narrowgauge.validate import gate
    from narrowgauge.validate.run import validate

    out = prose(args)
    if args.save:
        files.refuse_unwritable(Path(args.save), "--save")
    saved = gate.read_validation(Path(args.against)) if args.against else None
    if saved is not None:
        _apply_saved(args, saved)
    args.margin = MARGIN if args.margin is None else args.margin
    spec, options = _choose_task(args)
    reference, candidates = args.reference or "fp32", split("bf16" if args.candidates is None else args.candidates)
    if not candidates:
        raise UsageError("--candidates: give at least one recipe, such as bf16,fp8")
    reference, *candidates = [_name_emulation(text) for text in (reference, *candidates)]
    if args.time:
        refuse_emulation("--time", *(parse(text.partition("@")[0]) for text in (reference, *candidates)))
    if args.lora is not None:
        from narrowgauge import hardware

        device = hardware.detect(args.device)
        reference = finetuning.complete_recipe(reference, args.lora, device)
        candidates = [finetuning.complete_recipe(text, args.lora, device) for text in candidates]
    optimizer = args.optimizer or OPTIMIZERS[0]
    if saved is not None:
        gate.refuse_unknown_candidates(candidates, saved, args.against)
        given = {"task": spec, "reference": reference, "steps": args.steps, "optimizer": optimizer}
        gate.refuse_other_training(given, options | {"lr": args.lr}, saved, args.against)
    what = spec if args.model is None else f"fine-tuning {args.model} on {args.data}"
    say(f"{what}: comparing {', '.join(candidates)} with {reference}, margin {args.margin:.2%}", out)
    if args.model is not None:
        _check_finetuning(options, candidates, out)
    with tempfile.TemporaryDirectory() as temporary:  # --against needs new runs, not cached ones of older code
        validation = validate(
            spec,
            candidates,
            reference,
            seeds=args.seeds,
            margin=args.margin,
            steps=args.steps,
            learning_rate=args.lr,
            optimizer=optimizer,
            accumulate=options.get("accumulate"),
            options=options,
            budget_s=args.budget * 60,
            device=args.device,
            out=temporary if saved is not None else args.out,
            layers=args.layers,
            time_steps=args.time,
            tell=lambda line: say(line, out),
        )
    show(validation, out)
    used = {"lr": validation.experiment.settings["learning_rate"]}  # shorter runs may have a lower one
    described = validation.describe() | {"options": options | used, "data_bytes": gate.measure_data(options)}
    if args.save:
        gate.save_validation(Path(args.save), described)
    if saved is None:
        return Outcome(described, exit_code=0 if validation.good else 1)
    compared = gate.compare_with_saved(saved, described)
    _show_gate(compared, args.against, out)
    return Outcome(described | {"gate": compared}, exit_code=0 if compared["ok"] else 1)


def _choose_task(args: argparse.Namespace) -> tuple[str, dict[str, Any]]:
    """The task's name, and its options with absolute paths."""
    from narrowgauge import hardware, tasks
    from narrowgauge.data.sources import resolve_name

    given = {name: getattr(args, name) for name in FOR_TASK if getattr(args, name) is not None}
    if finetuning.is_chosen(args, "validate"):
        given["data"] = str(files.resolve_path(files.expand_path(args.data)))
        return tasks.FINETUNE, finetuning.resolve_paths(given)
    if "accumulate" in given:
        raise UsageError("--accumulate is for --model: give the model to fine-tune, or omit it")
    if "data" in given:
        given["data"] = resolve_name(given["data"])
    if "tokenizer" in given:
        given["tokenizer"] = str(files.resolve_path(files.expand_path(given["tokenizer"])))
    return args.task or tasks.default(hardware.detect(args.device).kind), given | args.own


def _name_emulation(text: str) -> str:
    """Return a recipe's text, with the full name of an emulation, which says that it is one."""
    from narrowgauge.recipe import SHORT

    name = re.split(r"[\[@]", text, maxsplit=1)[0].strip()
    return text.replace(name, SHORT[name], 1) if name in SHORT else text


def _check_finetuning(options: dict[str, Any], candidates: list[str], out: TextIO) -> None:
    """Reads the data once, so that the user sees what is in it, and mistakes are known before anything is trained."""
    from narrowgauge import tasks

    other = next((name for name in candidates if "@" in name), None)
    if other is not None:
        raise UsageError(
            f"--candidates {other}: all recipes fine-tune the same --model; omit @{other.partition('@')[2]}"
        )
    task = tasks.find(tasks.FINETUNE, **options, notify=lambda line: say(line, out))
    if not task.facts["eval_documents"]:
        raise UsageError("validate compares losses on held-out documents, and there are none: give --eval-data FILE")


def _apply_saved(args: argparse.Namespace, saved: dict[str, Any]) -> None:
    """Fills arguments that were not given with those of the saved validation."""
    if args.task is not None and "model" in saved["options"]:
        model = saved["options"]["model"]
        raise UsageError(f"validate {args.task}: {args.against} fine-tunes {model}; omit the task, or save another one")
    if args.task is None and args.model is None and "model" not in saved["options"]:
        args.task = saved["task"]
    args.reference = args.reference or saved["reference"]
    args.candidates = args.candidates or ",".join(saved["candidates"])
    args.steps = args.steps or saved["steps"]
    args.optimizer = args.optimizer or saved.get("optimizer")  # not in files of earlier versions
    args.margin = saved["margin"] if args.margin is None else args.margin
    for name in (*FOR_TASK, "lr"):
        if getattr(args, name) is None:
            setattr(args, name, saved["options"].get(name))
    args.own = {name: saved["options"][name] for name in saved["options"] if not hasattr(args, name)} | args.own
    if args.seeds == "auto":
        args.seeds = min(one["seeds"] for one in saved["candidates"].values())


def _compare_logs(args: argparse.Namespace) -> Outcome:
    from narrowgauge.validate.curves.external_logs import read_runs
    from narrowgauge.validate.curves.external_runs import compare_runs

    out = prose(args)
    reference, candidate = (read_runs(Path(path), args.tag) for path in args.curves)
    found = compare_runs(reference, candidate, MARGIN if args.margin is None else args.margin)
    show_table(f"{args.curves[1]} compared with {args.curves[0]}: {found.what}", *found.to_table(), out)
    for side, source in zip(("reference", "candidate"), found.sources, strict=False):  # of the first pair
        say(f"{side}: {source}", out)
    for note in found.notes:
        say(note, out)
    if args.tag and not re.search("loss|error|perplexity|ppl", args.tag, re.IGNORECASE):
        say(f"lower values of {args.tag!r} count as better, as those of a loss", out)
    say(f"{found.verdict.verdict}: {found.verdict.reason}", out)
    described = {"reference": args.curves[0], "candidates": {args.curves[1]: found.to_dict()}}
    return Outcome(described, exit_code=0 if found.verdict.is_good else 1)


def show(validation: Validation, out: TextIO) -> None:
    """Prints the verdicts."""
    from narrowgauge.validate.layers.sqnr import format_decibels

    for name, layers in validation.layers.items():
        columns, lines = layers.to_table()
        total = f"{layers.total:.1f} dB" if math.isfinite(layers.total) else format_decibels(layers.total)
        total = f"all weight gradients {total}"
        title = f"one step of {name} compared with {validation.reference}, SQNR in dB (own, end to end): {total}"
        show_table(title, columns, lines, out)
        for worst in layers.worst[:3]:
            say(f"  {worst.module} ({worst.quantity}, {worst.decibels:.1f} dB): {worst.advice}", out)
    described = validation.describe()
    rows = []
    for name, verdict in validation.items():
        known = described["candidates"][name]
        interval = "" if verdict.interval is None else f"{verdict.interval[0]:+.3%} to {verdict.interval[1]:+.3%}"
        gap = "" if verdict.gap is None else f"{verdict.gap:+.3%}"
        largest, ratio = known["curve_gap_largest"], known["grad_norm_ratio"]  # text if they are not finite
        curve = f"{largest:+.2%} at {known['curve_gap_step']}" if isinstance(largest, float) else ""
        norms = f"{ratio:.3f}" if isinstance(ratio, float) else ""
        bad = f"{known['skipped']}, {verdict.diverged[1]}"
        rows.append([name, verdict.verdict, gap, interval, str(verdict.seeds), curve, norms, bad])
    columns = ["candidate", "verdict", "gap", "interval", "pairs", "largest gap", "grad norms", "skipped, diverged"]
    title = f"{described['task'] or 'task'}, {described['steps']} steps, compared with {validation.reference}"
    show_table(title, columns, rows, out)
    for name, verdict in validation.items():
        say(f"{name}: {verdict.verdict}: {verdict.reason}", out)
        if known_formats := described["candidates"][name]["conversion"]:
            say(f"  {known_formats}", out)
        needed, minutes = validation.tests[name].pairs_needed, validation.minutes_needed(name)
        if needed is not None and minutes is not None and verdict.deviation is None:
            say(f"  at least {needed} pairs are needed: about {minutes:.0f} more minutes", out)
        elif needed is not None and minutes is not None:
            say(f"  at this noise level {needed} pairs would decide: about {minutes:.0f} more minutes", out)
            say("  (shorter runs, --steps, have less noise: two runs diverge more with every step)", out)
        elif verdict.verdict == "inconclusive" and verdict.decidable:
            say("  the noise is too large for any number of pairs: use longer runs or a wider margin", out)
        elif verdict.detectable is not None:
            say(f"  smallest detectable gap (80% power): {verdict.detectable:.3%}", out)
    for name, speed in validation.speeds.items():
        say(f"{name} against {validation.reference}: {speed.reason}", out)
    if described["noise_band"] is not None:
        say(f"{validation.reference} has a standard deviation of {described['noise_band']:.2%} over seeds", out)
    say("this result only covers runs of this length: a later divergence is possible", out)
    for known in described["candidates"].values():
        if known["answer"] is not None:
            say(known["answer"], out)


def _show_gate(compared: dict[str, Any], path: str, out: TextIO) -> None:
    rows = []
    for row in compared["rows"]:
        gap = "" if row["gap"] is None else f"{row['gap']:+.3%}"
        decibels = [row["decibels_before"], row["decibels_now"]]
        layers = "" if None in decibels else f"{decibels[0]:.1f} to {decibels[1]:.1f}"
        rows.append([row["name"], gap, row["verdict"], layers, "failed" if row["failures"] else "passed"])
    columns = ["candidate", "gap to saved", "verdict", "gradients, dB", "gate"]
    show_table(f"compared with {path}", columns, rows, out)
    for failure in compared["failures"]:
        say(failure, out)
