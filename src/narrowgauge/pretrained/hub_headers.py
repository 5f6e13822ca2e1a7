"""The headers of a model's weights on the Hub, without the weights: enough to predict memory and time.

A folder in narrowgauge's cache gets config.json, the index, and files that have the header and the size of the real
.safetensors files, but only zeros after it. They are sparse: zeros take no space on the disk.
"""

from __future__ import annotations

import importlib
import json
import shutil
from pathlib import Path
from typing import Any

from narrowgauge import files
from narrowgauge.data import cache
from narrowgauge.pretrained.folder import INDEX
from narrowgauge.pretrained.hub import RemoteModel, explain_errors


def outline_weights(remote: RemoteModel) -> Path:
    """Return a folder with the headers of a model's weights, or the real files if they are in the Hub's cache.

    Args:
        remote: From ``find_remote``.

    Raises:
        UsageError: The weights are not in .safetensors files, or the Hub cannot be reached.
    """
    wanted, _ = remote.list_weights()
    if all(files.exists(remote.folder / name) for name in wanted):
        return remote.folder

    def make(folder: Path) -> None:
        for name in ("config.json", "generation_config.json", INDEX):
            if files.exists(remote.folder / name):
                shutil.copyfile(remote.folder / name, folder / name)
        for name in wanted:
            _write_outline(folder / name, read_header(remote, name))

    return cache.load_or_make_folder(f"outline-{remote.name.replace('/', '--')}-{remote.commit}", make)


def read_header(remote: RemoteModel, name: str) -> dict[str, Any]:
    """Read the header of one file with a few requests for its beginning."""
    library: Any = importlib.import_module("huggingface_hub")
    with explain_errors(remote.option, remote.name, remote.commit):
        api = library.HfApi(endpoint=library.constants.ENDPOINT)
        found = api.parse_safetensors_file_metadata(remote.name, name, revision=remote.commit)
    return {
        tensor: {"dtype": info.dtype, "shape": list(info.shape), "data_offsets": list(info.data_offsets)}
        for tensor, info in found.tensors.items()
    }


def _write_outline(path: Path, header: dict[str, Any]) -> None:
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + max((entry["data_offsets"][1] for entry in header.values()), default=0))
