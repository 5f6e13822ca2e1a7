"""``narrowgauge bench``: recipes and peers side by side on this machine."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

from narrowgauge.cli import Outcome, prose
from narrowgauge.cli.terminal import show_table
from narrowgauge.errors import UsageError

ABOUT = "measure recipes and peers side by side: tokens/s, step time, memory, MFU"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("task", nargs="?", metavar="TASK", help="built-in name or file.py:function")
    parser.add_argument("--recipes", help="comma-separated (default: fp32 and what auto takes)")
    parser.add_argument("--peers", default="", help="comma-separated: torch (the same step by hand), torchao (its FP8)")
    parser.add_argument("--batch", type=int, help="items a batch")
    parser.add_argument("--context", type=int, help="tokens a sequence, for language tasks")
    parser.add_argument("--steps", type=int, default=5, help="steps in a round (default 5)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds; contestants take turns (default 5)")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, help="torch.compile (default: on a GPU)")
    parser.add_argument("--save", metavar="FILE", help="write the result as JSON")


def run(args: argparse.Namespace) -> Outcome:
    for name in ("steps", "rounds"):
        if getattr(args, name) < 1:
            raise UsageError(f"--{name} {getattr(args, name)} must be at least 1")
    from narrowgauge import bench, hardware, tasks
    from narrowgauge.recipe import parse

    device = hardware.detect(args.device)
    recipes = [parse(text, device) for text in split_recipes(args.recipes or "fp32,auto")]
    recipes = list(dict.fromkeys(recipes))
    spec = args.task or tasks.default(device.kind)
    task = tasks.find(spec, batch=args.batch, context=args.context)
    compile_ = args.compile if args.compile is not None else device.kind == "cuda"
    settings = bench.Settings(steps=args.steps, rounds=args.rounds, compile=compile_, seed=args.seed)
    peers = [peer for peer in args.peers.split(",") if peer]
    rows = bench.measure(task, recipes, peers, device, settings, lambda line: print(line, file=sys.stderr, flush=True))
    data: dict[str, Any] = {
        "task": spec,
        "device": device.name,
        "compile": compile_,
        "unit": task.unit,
        "items_per_step": task.items_per_batch,
        "rows": [dataclasses.asdict(row) for row in rows],
    }
    show_table(
        f"{spec} on {device.name}: {task.items_per_batch:,} {task.unit}s a step{', compiled' if compile_ else ''}",
        ["", f"{task.unit}s/s", "step ms", "fastest-slowest", "peak GiB", "MFU", "x first", "x peer", "loss"],
        [
            [
                row.name,
                f"{row.tokens_per_s:,.0f}",
                f"{row.step_ms:.2f}",
                f"{row.step_ms_low:.2f}-{row.step_ms_high:.2f}",
                "" if row.peak_bytes is None else f"{row.peak_bytes / 2**30:.1f}",
                "" if row.mfu is None else f"{row.mfu:.1%}",
                f"{row.ratio:.2f}",
                "" if row.twin_ratio is None else f"{row.twin_ratio:.3f}",
                f"{row.loss:.3f}",
            ]
            for row in rows
        ],
        prose(args),
    )
    if args.save:
        save(Path(args.save), data)
    return Outcome(data)


def split_recipes(text: str) -> list[str]:
    """Split at the commas that stand outside of brackets: ``fp32,bf16[checkpoint=full,keep=head]`` is two recipes."""
    parts, depth = [""], 0
    for character in text:
        depth += (character == "[") - (character == "]")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts if part.strip()]


def save(path: Path, data: dict[str, Any]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(data, indent=1, allow_nan=False) + "\n")
    except OSError as error:
        raise UsageError(f"--save {path}: {error.strerror}") from None
