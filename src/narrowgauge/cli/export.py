"""``narrowgauge export RUN``: writes the weights of a run, from any number of ranks, as one FP32 safetensors file."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from narrowgauge import files
from narrowgauge.cli import Outcome, prose
from narrowgauge.cli.numbers import whole
from narrowgauge.cli.terminal import say
from narrowgauge.errors import UsageError

ABOUT = "write a run's weights, saved by any number of ranks, as one plain safetensors file"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("run_folder", metavar="RUN", help="the folder of a run, or of one of its checkpoints")
    add("--step", type=whole, metavar="N", help="the checkpoint of this step (default: the newest intact one)")
    add("--file", metavar="FILE", help="where to write (default: RUN/weights-STEP.safetensors, or under --out)")


def run(args: argparse.Namespace) -> Outcome:
    from narrowgauge.runs.checkpoints import checkpoint
    from narrowgauge.runs.checkpoints.weights_file import write_weights

    folder, out = Path(args.run_folder), prose(args)
    if args.file:
        files.refuse_unwritable(Path(args.file), "--file")
        files.refuse_target(Path(args.file))
    path = _find_checkpoint(folder, args.step, lambda line: say(line, out))
    saved = checkpoint.load(path)
    target = Path(args.out) if args.out else folder
    file = Path(args.file) if args.file else target / f"weights-{saved.step:08d}.safetensors"
    files.refuse_target(file)
    tensors = write_weights(saved.weights, file)
    say(f"wrote {len(tensors)} tensors of step {saved.step} to {file}", out)
    return Outcome({"path": str(file), "step": saved.step, "checkpoint": str(path), "tensors": len(tensors)})


def _find_checkpoint(folder: Path, step: int | None, notify: Callable[[str], None]) -> Path:
    from narrowgauge.runs.checkpoints import checkpoint

    if files.is_file(folder / "manifest.json") and step is None:
        return folder
    steps = checkpoint.list_steps(folder)
    for one in steps:
        manifest = checkpoint.make_path(folder, one) / "manifest.json"
        if files.exists(manifest) and (why := files.explain_unreadable(manifest)):
            raise UsageError(f"export {folder}: {manifest}: {why}; remove it")
    if not steps:
        raise UsageError(f"export {folder}: no checkpoint there; give the folder of a run, or of a checkpoint")
    if step is not None and step not in steps:
        raise UsageError(f"--step {step}: {folder} has checkpoints of steps {', '.join(map(str, steps))}")
    if step is not None:
        return checkpoint.make_path(folder, step)
    newest = checkpoint.find_newest(folder, notify)
    assert newest is not None
    return newest
