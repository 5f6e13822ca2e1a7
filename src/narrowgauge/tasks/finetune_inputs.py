"""Identifies the files that a fine-tuning reads, so that its results are not taken for those of other files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from narrowgauge import files
from narrowgauge.data import cache
from narrowgauge.data.records import list_record_files
from narrowgauge.pretrained.hub import find_folder


def fingerprint_inputs(options: Mapping[str, Any]) -> str:
    """Return a short key for the files of the model and the data, from their paths, sizes and times.

    Args:
        options: The options of the task: ``model``, ``data`` and perhaps ``eval_data``.
    """
    folder = find_folder(str(options["model"]), f"--model {options['model']}")
    found = sorted(path for path in folder.iterdir() if files.is_file(path))
    for name in ("data", "eval_data"):
        if options.get(name) is not None:
            found += list_record_files(files.expand_path(str(options[name])))
    return cache.fingerprint([files.resolve_path(path) for path in found], "finetuning")
