"""Options of fine-tuning that several verbs have: ``--model`` and what belongs to it."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from narrowgauge import files
from narrowgauge.cli.numbers import number
from narrowgauge.errors import UsageError

if TYPE_CHECKING:
    from narrowgauge.hardware import Device

NEEDS_MODEL = ("epochs", "eval_data", "eval_share", "lora")
"""Options that have no meaning without ``--model``."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options to a verb. It has ``--data``, ``--batch``, ``--context`` and ``--accumulate`` of its own."""
    add = parser.add_argument
    add("--model", metavar="PATH", help="fine-tune this model on --data: a Hugging Face folder, or ORG/NAME on the Hub")
    add("--epochs", type=number, metavar="N", help="with --model: how often the data is seen (default 1)")
    add("--eval-data", metavar="PATH", help="with --model: a file for evaluation")
    add("--eval-share", type=number, metavar="X", help="with --model: share of the data for evaluation (default 0.05)")
    add("--lora", metavar="OPTIONS", help="with --model: train adapters, such as rank=16,alpha=32,targets=all-linear")


def is_chosen(args: argparse.Namespace, verb: str) -> bool:
    """Whether the arguments ask for fine-tuning.

    Args:
        args: The arguments of the verb.
        verb: Its name, for error messages.

    Raises:
        UsageError: Something is missing, or belongs to something else.
    """
    if args.model is None:
        lost = next((name for name in NEEDS_MODEL if getattr(args, name) is not None), None)
        if lost is not None:
            raise UsageError(f"--{lost.replace('_', '-')} is for --model: give the model to fine-tune")
        return False
    if args.task is not None:
        raise UsageError(f"{verb} {args.task} --model {args.model}: give a task or a model to fine-tune, not both")
    if args.data is None:
        raise UsageError(f"--model {args.model} needs data to fine-tune on: --data FILE, such as chats.jsonl")
    return True


def complete_recipe(text: str, lora: str | None, device: Device) -> str:
    """Return the recipe; with ``--lora``, how frozen matrices are stored, unless the text says it."""
    if lora is None:
        return text
    from narrowgauge.pretrained.lora_options import set_frozen

    return set_frozen(text, device)


def resolve_paths(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options with absolute paths of the model, the adapters and the data for evaluation.

    A model on the Hub is named with its commit, so that a resumed run takes the same files.
    """
    resolved = dict(options)
    if resolved.get("model") is not None:
        from narrowgauge.pretrained.hub import pin

        resolved["model"] = pin(resolved["model"])
    if resolved.get("eval_data") is not None:
        resolved["eval_data"] = str(files.resolve_path(files.expand_path(resolved["eval_data"])))
    if resolved.get("lora") is not None:
        from narrowgauge.pretrained.lora_options import resolve_lora

        resolved["lora"] = resolve_lora(resolved["lora"])
    return resolved
