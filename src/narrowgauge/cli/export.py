"""``narrowgauge export RUN``: writes the weights of a run, from any number of ranks, for other tools.

--format safetensors    one file in FP32 (runs/checkpoints/weights_file.py)
--format hf             a Hugging Face folder (runs/export/hf_folder.py)
--format fp8            the same in FP8, for inference (runs/export/fp8_folder.py)
--format peft           the adapters of a run with LoRA (runs/export/peft_folder.py); hf and fp8 merge them
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from narrowgauge import files
from narrowgauge.byte_sizes import format_size, parse_size
from narrowgauge.cli import Outcome, prose
from narrowgauge.cli.numbers import whole
from narrowgauge.cli.terminal import say
from narrowgauge.errors import UsageError

ABOUT = "write a run's weights, saved by any number of ranks, as a safetensors file or a Hugging Face folder"
FORMATS = ("safetensors", "hf", "fp8", "peft")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("run_folder", metavar="RUN", help="the folder of a run, or of one of its checkpoints")
    add("--step", type=whole, metavar="N", help="the checkpoint of this step (default: the newest intact one)")
    add("--format", default="safetensors", choices=FORMATS,
        help="one FP32 file (default), a Hugging Face folder, one in FP8 for inference, or LoRA adapters")  # fmt: skip
    add("--file", metavar="FILE", help="where to write (default: RUN/weights-STEP.safetensors, or under --out)")
    add("--model", metavar="PATH", help="hf, fp8, peft: folder of the model that was trained (default: as in run.json)")
    add("--dtype", choices=("bf16", "fp16", "fp32"), help="dtype of the weights (default: hf bf16, peft fp32)")
    add("--max-shard-size", type=_parse_size, metavar="SIZE", help="hf, fp8: largest file (default: 5GB)")


def run(args: argparse.Namespace) -> Outcome:
    _refuse_other_options(args)
    return _write_file(args) if args.format == "safetensors" else _write_folder(args)


def _write_file(args: argparse.Namespace) -> Outcome:
    from narrowgauge.runs.checkpoints import checkpoint
    from narrowgauge.runs.checkpoints.weights_file import write_weights

    folder, out = Path(args.run_folder), prose(args)
    if args.file:
        files.refuse_unwritable(Path(args.file), "--file")
        files.refuse_target(Path(args.file))
    path = _find_checkpoint(folder, args.step, lambda line: say(line, out))
    saved = checkpoint.read(path)
    target = Path(args.out) if args.out else folder
    file = Path(args.file) if args.file else target / f"weights-{saved.step:08d}.safetensors"
    files.refuse_target(file)
    tensors = write_weights(saved.weights, file)
    say(f"wrote {len(tensors)} tensors of step {saved.step} to {file}", out)
    return Outcome({"path": str(file), "step": saved.step, "checkpoint": str(path), "tensors": len(tensors)})


def _write_folder(args: argparse.Namespace) -> Outcome:
    from narrowgauge.runs import atomic_files
    from narrowgauge.runs.checkpoints.tensor_reader import TensorReader, WeightReader
    from narrowgauge.runs.export.adapter_run import MergedWeights, find_adapter_run, read_adapter_config
    from narrowgauge.runs.export.fp8_folder import write_fp8_folder
    from narrowgauge.runs.export.hf_folder import DTYPES, MAX_SHARD_BYTES, write_hf_folder
    from narrowgauge.runs.export.peft_folder import write_peft_folder
    from narrowgauge.runs.export.source_model import find_source

    folder, out = Path(args.run_folder), prose(args)
    if args.out:
        atomic_files.refuse_filled_folder(Path(args.out))
    is_checkpoint = not _list_steps(folder, args.step)
    run_folder = files.resolve_path(folder).parent.parent if is_checkpoint else folder
    if args.format == "peft" and read_adapter_config(run_folder) is None:
        raise UsageError(
            f"--format peft is for runs with adapters (train --lora), and {run_folder} trained all weights; use "
            "--format hf or --format safetensors"
        )
    source = find_source(run_folder, args.model)  # before the checkpoint, which takes minutes to verify if it is large
    trained = find_adapter_run(run_folder, args.model)
    path = _find_checkpoint(folder, args.step, lambda line: say(line, out))
    adapters = TensorReader(path)
    saved: WeightReader = adapters
    if trained is not None and args.format != "peft":
        saved = MergedWeights(adapters, trained)
    if args.format != "peft":
        source.check(saved.shapes, run_folder)
    target = Path(args.out) if args.out else run_folder / f"{args.format}-{saved.step:08d}"
    most_bytes = args.max_shard_size or MAX_SHARD_BYTES
    if args.format == "hf":
        dtype = args.dtype or "bf16"
        written = write_hf_folder(saved, source, target, DTYPES[dtype], most_bytes)
        what = dtype.upper()
    elif args.format == "peft":
        assert trained is not None
        dtype = args.dtype or "fp32"
        written = write_peft_folder(adapters, trained, source, target, DTYPES[dtype])
        what = f"{dtype.upper()}, adapters of {trained.base}"
    else:
        dtype = "fp8"
        written = write_fp8_folder(saved, source, target, most_bytes)
        facts = written.facts
        what = (
            f"FP8 in {facts['layers_fp8']} linear layers ({facts['layers_static']} with the run's input scales), "
            f"BF16 in {facts['layers_bf16']}"
        )
    size_bytes = sum(written.weights.values())
    count = f"{len(written.weights)} files" if len(written.weights) > 1 else "1 file"
    size = format_size(size_bytes)
    say(
        f"wrote {written.tensors} tensors of step {saved.step} to {target}: {size} in {count}, {what}",
        out,
    )
    say(f"copied from {source.folder}: {', '.join(written.copied) or 'nothing (no tokenizer there)'}", out)
    data = {"path": str(target), "step": saved.step, "checkpoint": str(path), "tensors": written.tensors}
    more = {"format": args.format, "dtype": dtype, "bytes": size_bytes, "files": written.weights}
    return Outcome({**data, **more, "copied": written.copied, "model": str(source.folder), **written.facts})


def _refuse_other_options(args: argparse.Namespace) -> None:
    """Refuse options that the chosen format would ignore."""
    folder = args.format != "safetensors"
    if folder and args.file:
        raise UsageError(f"--file is for --format safetensors; --format {args.format} writes a folder: use --out")
    if args.dtype and args.format not in ("hf", "peft"):
        reason = "writes FP8, and BF16 where FP8 is not used" if folder else "writes FP32"
        raise UsageError(f"--dtype {args.dtype}: --format {args.format} {reason}; --dtype is for --format hf and peft")
    for name, formats in (("model", ("hf", "fp8", "peft")), ("max_shard_size", ("hf", "fp8"))):
        if getattr(args, name) is not None and args.format not in formats:
            raise UsageError(f"--{name.replace('_', '-')} is for --format {' and '.join(formats)}")


def _parse_size(text: str) -> int:
    """Parse a size such as 5GB, 500MB or 2GiB."""
    size = parse_size(text) or parse_size(f"{text}B")  # without a unit: bytes
    if size is None:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a size; give one such as 5GB, 500MB or 2GiB")
    return size


def _find_checkpoint(folder: Path, step: int | None, notify: Callable[[str], None]) -> Path:
    """Find the checkpoint to export, and verify it."""
    from narrowgauge.runs.checkpoints import checkpoint

    if not _list_steps(folder, step):
        checkpoint.verify(folder)
        return folder
    if step is not None:
        checkpoint.verify(checkpoint.make_path(folder, step))
        return checkpoint.make_path(folder, step)
    newest = checkpoint.find_newest(folder, notify)
    assert newest is not None
    return newest


def _list_steps(folder: Path, step: int | None) -> list[int]:
    """List the checkpoints of a run; none if the folder is itself a checkpoint. Refuse a folder that is neither."""
    from narrowgauge.runs.checkpoints import checkpoint

    if files.is_file(folder / "manifest.json") and step is None:
        return []
    steps = checkpoint.list_steps(folder)
    for one in steps:
        manifest = checkpoint.make_path(folder, one) / "manifest.json"
        if files.exists(manifest) and (why := files.explain_unreadable(manifest)):
            raise UsageError(f"export {folder}: {manifest}: {why}; remove it")
    if not steps:
        raise UsageError(f"export {folder}: no checkpoint there; give the folder of a run, or of a checkpoint")
    if step is not None and step not in steps:
        raise UsageError(f"--step {step}: {folder} has checkpoints of steps {', '.join(map(str, steps))}")
    return steps
