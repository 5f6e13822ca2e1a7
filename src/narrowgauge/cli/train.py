"""``narrowgauge train [TASK]``: trains a task under a recipe in a run folder, or resumes an interrupted run."""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import re
import shlex
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from narrowgauge import files
from narrowgauge.cli import Outcome, finetuning, prose
from narrowgauge.cli.numbers import long, number, whole
from narrowgauge.cli.terminal import say
from narrowgauge.cli.train_output import describe, introduce, summarise
from narrowgauge.errors import UsageError

if TYPE_CHECKING:
    from narrowgauge.ranks.world import World
    from narrowgauge.runs.settings import Settings
    from narrowgauge.task import Task

ABOUT = "train a task: progress, record, TensorBoard, checkpoints; resume an interrupted run with --resume"
RUNS = Path("runs")
"""Default parent folder of runs."""
FOR_TASK = (
    "batch", "context", "data", "vocab", "packages", "tokenizer", "field", "max_tokens", "model", "epochs", "eval_data",
    "eval_share", "lora",
)  # fmt: skip
"""Options that are passed to the task if given."""
FOR_SETTINGS = {
    "steps": "steps",
    "lr": "learning_rate",
    "optimizer": "optimizer",
    "accumulate": "accumulate",
    "clip": "clip_norm",
    "warmup": "warmup",
    "eval_every": "eval_every",
    "watch": "watch_every",
    "checkpoint_every": "checkpoint_every",
    "keep": "keep",
    "compile": "compile",
    "parallel": "parallel",
    "fit": "fit",
    "log": "log",
    "predict": "predict",
}
"""Options that are passed to the settings, and their names there."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from narrowgauge.runs.trackers.registry import DEFAULT, TRACKERS

    add = parser.add_argument
    add("task", nargs="?", metavar="TASK", help="a built-in task, gpt:8x1024, moe:8x1024x16, or file.py:function")
    add("--recipe", help="formats to train in: fp32, tf32, fp16, bf16, fp8, auto, ... (default auto)")
    add("--steps", type=whole, help="updates (default: the task's)")
    add("--batch", type=whole, help="items per batch")
    add("--context", type=whole, help="tokens per sequence")
    add("--lr", type=number, help="peak learning rate (default: the task's)")
    add(
        "--optimizer",
        metavar="NAME",
        help="adamw (default), or muon: Muon for the blocks' matrices, AdamW for the rest",
    )
    add("--data", metavar="PATH", help="text, .jsonl, .parquet, .bin, a folder of them, or hf:NAME[:CONFIG][@SPLIT]")
    finetuning.add_arguments(parser)
    add("--tokenizer", metavar="PATH", help="a tokenizer.json or its folder (default: bytes or a byte-pair encoding)")
    add("--field", metavar="NAME", help="name of the text field in documents (default: text, else content)")
    add("--max-tokens", type=long, metavar="N", help="read at most N tokens (default for hf:NAME: 200 million)")
    trackers = f"trackers: {','.join(TRACKERS)} or none (default {DEFAULT}); --tracker under torchrun"
    add("--log", "--tracker", metavar="NAMES", help=trackers)
    add("--vocab", type=whole, help="vocabulary size; 256: bytes; more: byte-pair encoding (default: the task's)")
    add("--packages", action="store_const", const=True, help="also train on the source code of installed packages")
    add("--resume", metavar="RUN", help="resume a run: its folder, or its name under --out (or runs/)")
    add("--accumulate", type=whole, metavar="N", help="batches per update (default 1)")
    add("--clip", type=number, metavar="NORM", help="maximum gradient norm; 0: no clipping (default 1.0)")
    add(
        "--warmup",
        type=whole,
        metavar="N",
        help="updates of learning rate warmup (default: a tenth, at most 100)",
    )
    add(
        "--eval-every",
        type=whole,
        metavar="N",
        help="updates between evaluations; 0: only at the end (default: a quarter)",
    )
    add(
        "--checkpoint-every",
        type=whole,
        metavar="N",
        help="updates between checkpoints; 0: only at the end (default: a quarter)",
    )
    add("--keep", type=whole, metavar="N", help="checkpoints to keep (default 3)")
    add("--capture", type=whole, metavar="STEP", help="capture this step for narrowgauge replay, even if it is finite")
    add(
        "--watch",
        type=whole,
        metavar="N",
        help="updates between snapshots of tensors; 0: none (default 100 or a quarter)",
    )
    what = "predict from this FP32 or BF16 run how FP16 and FP8 would do, and measure MXFP8, MXFP4 and NVFP4"
    add("--predict", action="store_true", default=None, help=what)
    add("--foretell", dest="predict", action="store_true", default=None, help=argparse.SUPPRESS)  # its former name
    add(
        "--parallel",
        choices=("auto", "ddp", "fsdp"),
        help="with several ranks: replicate (ddp) or shard (fsdp) the model (auto: by size)",
    )
    add("--compile", action=argparse.BooleanOptionalAction, help="use torch.compile (default: on a GPU)")
    add("--fit", metavar="SIZE", help="choose what each block keeps for backward, so that a step fits: 80GB, 0.9")


def run(args: argparse.Namespace) -> Outcome:
    from narrowgauge.hardware import detect
    from narrowgauge.ranks.world import choose_device, join_world

    args.device = choose_device(args.device)
    with join_world(detect(args.device).torch_device) as world:
        return _run(args, world)


def _run(args: argparse.Namespace, world: World) -> Outcome:
    from narrowgauge.cli.progress import make_progress
    from narrowgauge.ranks.world import read_restart_count
    from narrowgauge.runs import record
    from narrowgauge.runs.checkpoints import checkpoint
    from narrowgauge.runs.train import train

    out = prose(args) if world.is_first else io.StringIO()
    is_restart = read_restart_count() and args.resume is None and args.out is not None
    if is_restart and world.broadcast(record.holds_run(Path(args.out))):
        args.resume = args.out  # torchrun restarted the ranks after one failed
    if args.resume is None:
        with world.fail_together():
            folder, spec, options, settings, task, why = _begin(args, world)
    else:
        folder, spec, options, settings = _resume(args)
        task, why = _find_task(spec, options, args, world), None
    introduce(task, settings, folder, why, out)
    try:
        with _no_empty_folders(folder):
            result = train(
                task,
                settings,
                folder,
                resume=args.resume is not None,
                configuration={
                    "task": spec,
                    "options": options,
                    "began": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
                    **({"recipe_reason": why} if why else {}),
                },
                observer=make_progress(task.unit) if world.is_first else None,
                capture=args.capture,
                world=world,
            )
    except (Exception, SystemExit) as error:
        if record.holds_run(folder):  # shown below a traceback, but not below a one-line error
            command = f"narrowgauge train --resume {shlex.quote(str(folder))}"
            error.add_note(
                f"saved checkpoints are intact; resume with: {command}"
                if checkpoint.list_steps(folder)
                else f"there is no checkpoint yet; start again at step 1 with: {command}"
            )
        raise
    if not world.is_first:
        return Outcome(None)
    facts = record.read_configuration(folder).get("facts", {})
    summarise(result, facts, folder, out, settings.predict)
    return Outcome(describe(result, facts), exit_code=1 if result.serious else 0)


def _begin(args: argparse.Namespace, world: World) -> tuple[Path, str, dict[str, Any], Settings, Task, str | None]:
    """Resolve the options of a new run, and choose its folder."""
    from narrowgauge import hardware, tasks
    from narrowgauge.engine.choose_recipe import depends_on_model
    from narrowgauge.pretrained.hub import get_short_name
    from narrowgauge.recipe import choose, is_auto, parse
    from narrowgauge.runs import record
    from narrowgauge.runs.settings import make_settings

    device = hardware.detect(args.device)
    text = finetuning.complete_recipe(args.recipe or "auto", args.lora, device)
    waits = depends_on_model(text, device)  # then the engine chooses, when the model exists
    recipe = text.replace(" ", "") if waits else str(parse(text, device))
    why = choose(device)[1] if is_auto(text) and not waits else None
    spec = _resolve_task(_choose_task(args, device.kind))
    options = {name: getattr(args, name) for name in FOR_TASK if getattr(args, name) is not None}
    options = _resolve_options(options) | args.own
    if spec == tasks.FINETUNE:
        options["accumulate"] = args.accumulate or 1
    if ".py:" not in spec or args.seed:  # a user's task may have no seed option
        options["seed"] = args.seed
    if args.out is not None:
        folder = Path(args.out)
    elif not world.is_single:
        raise UsageError("several ranks need one folder that they find again after a restart: name it with --out RUN")
    else:
        what = get_short_name(options["model"]) if spec == tasks.FINETUNE else spec.rpartition(".py:")[2]
        name = re.sub(r"[^\w.]+", "-", f"{what}-{recipe}").strip("-")
        folder = _choose_unused(RUNS / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}")
    if folder.is_symlink() and not folder.exists():
        raise UsageError(f"--out {folder} is a dangling symbolic link; give a folder")
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"--out {folder} is a file; give a folder")
    if world.is_first and record.holds_run(folder):
        raise UsageError(f"{folder} already holds a run; resume it with --resume {folder}, or choose another --out")
    task = _find_task(spec, options, args, world)
    given = {field: getattr(args, name) for name, field in FOR_SETTINGS.items()}
    settings = make_settings(task, recipe=recipe, device=device.torch_device, seed=args.seed, **given)
    return folder, spec, options, settings, task, why


def _choose_task(args: argparse.Namespace, device_kind: str) -> str:
    """The task's name; with --model it is the task of fine-tuning."""
    from narrowgauge import tasks

    if finetuning.is_chosen(args, "train"):
        return tasks.FINETUNE
    return args.task or tasks.default(device_kind)


def _find_task(spec: str, options: dict[str, Any], args: argparse.Namespace, world: World) -> Task:
    """Make the task. Fine-tuning tells what it finds in its data."""
    from narrowgauge import tasks

    if spec == tasks.FINETUNE:
        out = prose(args) if world.is_first else io.StringIO()
        return tasks.find(spec, **options, notify=lambda line: say(line, out))
    return tasks.find(spec, **options)


@contextlib.contextmanager
def _no_empty_folders(folder: Path) -> Iterator[None]:
    """If a run is rejected, remove the empty parent folders that were created for it."""
    made = [one for one in folder.absolute().parents if not one.exists()]
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError):
            for one in made:  # innermost first; the first nonempty folder stops it
                one.rmdir()
        raise


def _choose_unused(folder: Path) -> Path:
    """The folder, or one with a number appended if another run started in the same second."""
    names = (folder.with_name(f"{folder.name}-{number}") if number > 1 else folder for number in itertools.count(1))
    return next(name for name in names if not name.exists())


def _resume(args: argparse.Namespace) -> tuple[Path, str, dict[str, Any], Settings]:
    """Read the options of a recorded run. Only --device, --parallel, --log, --keep, --predict can change on resume."""
    from narrowgauge import hardware
    from narrowgauge.recipe import is_auto
    from narrowgauge.runs import record
    from narrowgauge.runs.settings import restore_settings

    folder = Path(args.resume)
    if not record.holds_run(folder):
        folder = Path(args.out or RUNS) / args.resume
    if not record.holds_run(folder):
        raise UsageError(f"--resume {args.resume}: no run there or at {folder}; give the folder that contains run.json")
    configuration = record.read_configuration(folder)
    try:
        spec, options, saved = configuration["task"], dict(configuration["options"]), dict(configuration["settings"])
    except (KeyError, TypeError, ValueError):
        raise UsageError(f"{folder / record.CONFIGURATION} was not written by narrowgauge train; restore it") from None
    recorded = {name: saved.get(field) for name, field in FOR_SETTINGS.items()} | {"recipe": saved.get("recipe")}
    recorded |= {name: options.get(name) for name in FOR_TASK} | {"task": spec}
    changeable = ("keep", "parallel", "log", "predict")
    given = {name: getattr(args, name) for name in recorded if name not in changeable} | args.own
    recorded |= {name: options.get(name) for name in args.own}
    given["task"] = _resolve_task(args.task) if args.task else None
    device = hardware.detect(args.device or saved.get("device"))
    if args.recipe is not None:
        given["recipe"] = finetuning.complete_recipe(args.recipe, options.get("lora"), device)
        if is_auto(args.recipe):
            given["recipe"] = _keep_choice(given["recipe"], recorded["recipe"])
    given = _resolve_options(given)
    if args.seed != 0:
        given["seed"], recorded["seed"] = args.seed, saved.get("seed")
    for name, value in given.items():
        if value is not None and value != recorded[name]:
            option = name if name == "task" else f"--{name.replace('_', '-')}"
            raise UsageError(
                f"{option} {value} differs from the setting of run {folder} ({recorded[name]}); a resumed run keeps "
                "its settings, because the learning rate schedule depends on them: omit the option, or start a new run"
            )
    changes: dict[str, Any] = {name: getattr(args, name) for name in changeable if getattr(args, name) is not None}
    changes["device"] = device.torch_device
    return folder, spec, options, restore_settings(saved, **changes)


def _keep_choice(text: str, recorded: Any) -> str:
    """What ``auto`` means for a recorded run: what it chose then, not what it would choose now."""
    from narrowgauge.recipe import NAMED, parse

    return str(parse(text, auto=NAMED[parse(recorded).compute])) if isinstance(recorded, str) else text


def _resolve_options(options: dict[str, Any]) -> dict[str, Any]:
    """The options with absolute paths of data and tokenizer."""
    from narrowgauge.data.sources import resolve_name

    resolved = finetuning.resolve_paths(options)
    if resolved.get("data") is not None:
        resolved["data"] = resolve_name(resolved["data"])
    if resolved.get("tokenizer") is not None:
        resolved["tokenizer"] = str(files.resolve_path(files.expand_path(resolved["tokenizer"])))
    return resolved


def _resolve_task(spec: str) -> str:
    """The task's name; a user's file with its absolute path, so that the run can be resumed from any folder."""
    path, colon, function = spec.rpartition(":")
    return f"{files.resolve_path(Path(path))}{colon}{function}" if path.endswith(".py") else spec
