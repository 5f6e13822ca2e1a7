"""Models on the Hugging Face Hub: ``ORG/NAME`` or ``ORG/NAME@REVISION`` where a folder is expected.

    find_remote(spec)     config.json, the tokenizer and the index of the weights: a few megabytes, enough to refuse
    .fetch_weights()      the .safetensors files that the index names
    pin(spec)             ORG/NAME@COMMIT, which stands for the same files forever; run.json records it

A folder of that name comes first. Files go to the Hub's own cache, and are downloaded once. Only files with known names
are downloaded: never pickled weights, never code. Without a network, what is in the cache is used.
"""

from __future__ import annotations

import contextlib
import glob
import importlib
import logging
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from narrowgauge import files
from narrowgauge.data import hub as data_hub
from narrowgauge.data.cache import print_status
from narrowgauge.errors import UsageError, one_line
from narrowgauge.pretrained.folder import INDEX, WEIGHTS

NAME = re.compile(r"(?P<name>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(@(?P<revision>[\w./-]+))?", re.ASCII)
SMALL = (
    "config.json", "generation_config.json", INDEX, "tokenizer.json", "tokenizer_config.json",
    "special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt", "tokenizer.model",
    "spiece.model", "*.tiktoken", "tekken.json", "chat_template.jinja", "chat_template.json",
    "additional_chat_templates/*.jinja",
)  # fmt: skip
"""Patterns of the files beside the weights."""


@dataclass(frozen=True)
class RemoteModel:
    """A model on the Hub, of which all files but the weights are in the cache."""

    option: str
    """What the user wrote, for error messages."""
    name: str
    """ORG/NAME."""
    commit: str
    folder: Path
    """The snapshot of the commit in the Hub's cache."""

    @property
    def pinned(self) -> str:
        """The name with the commit."""
        return f"{self.name}@{self.commit}"

    def fetch_weights(self) -> None:
        """Download the files with weights that are not in the cache.

        Raises:
            UsageError: The repository has none that are read, or they cannot be downloaded.
        """
        wanted, size = self.list_weights()
        if all(files.exists(self.folder / name) for name in wanted):
            return
        known = "" if not size else f": {size / 1e9:.1f} GB" if size >= 1e8 else f": {size / 1e6:.1f} MB"
        about = f"downloading the weights of {self.name}{known}"
        _download(self.name, self.commit, [glob.escape(name) for name in wanted], self.option, wanted, about)
        lost = next((name for name in wanted if not files.exists(self.folder / name)), None)
        if lost is not None:
            raise UsageError(
                f"{self.option}: {self.name} has no {lost} on the Hub; only .safetensors files are read, as they "
                "cannot run code: convert the weights (model.save_pretrained), and give the folder"
            )

    def list_weights(self) -> tuple[list[str], int | None]:
        """Return the names of the files with weights, and their bytes if the index says so."""
        if not files.exists(self.folder / INDEX):
            return [WEIGHTS], None
        stored: Any = None
        with contextlib.suppress(ValueError):  # open_folder says what is wrong with the index
            stored = files.parse_json(files.read(self.folder / INDEX))
        places = stored.get("weight_map") if isinstance(stored, dict) else None
        named = {name for name in places.values() if _is_weights(name)} if isinstance(places, dict) else set()
        about = stored.get("metadata") if isinstance(stored, dict) else None
        size = about.get("total_size") if isinstance(about, dict) else None
        return sorted(named), int(size) if isinstance(size, int | float) else None


def find_remote(spec: str, option: str) -> RemoteModel | None:
    """Find a model on the Hub, and download its files except for the weights.

    Args:
        spec: What the user gave.
        option: How error messages name it.

    Returns:
        None if there is a file or folder with this path, or if it cannot be a name on the Hub.

    Raises:
        UsageError: There is no such model, or it cannot be downloaded.
    """
    found = NAME.fullmatch(spec)
    if found is None or files.exists(files.expand_path(spec)):
        return None
    folder = _download(found["name"], found["revision"], SMALL, option)
    if not files.exists(folder / "config.json"):
        raise UsageError(f"{option}: {found['name']} has no config.json on the Hub; give a model of transformers")
    return RemoteModel(option, found["name"], folder.name, folder)


def find_folder(spec: str, option: str) -> Path:
    """Return the folder of a model: the path itself, or the snapshot in the Hub's cache, perhaps without weights."""
    remote = find_remote(spec, option)
    return files.expand_path(spec) if remote is None else remote.folder


def pin(spec: str) -> str:
    """Return what stands for the same files later: an absolute path, or the name on the Hub with the commit."""
    remote = find_remote(spec, f"--model {spec}")
    return str(files.resolve_path(files.expand_path(spec))) if remote is None else remote.pinned


def get_short_name(spec: str) -> str:
    """Return the last part of a folder's path or of a name on the Hub, without the revision."""
    found = None if files.exists(files.expand_path(spec)) else NAME.fullmatch(spec)
    return Path(spec if found is None else found["name"]).name


def _is_weights(name: Any) -> bool:
    return isinstance(name, str) and Path(name).name == name and name.endswith(".safetensors")


def _download(
    name: str,
    revision: str | None,
    patterns: Sequence[str],
    option: str,
    needed: Sequence[str] = (),
    about: str | None = None,
) -> Path:
    """Download the files of a model that match, unless they are in the cache. Return the folder of the commit.

    Without a network the library may return an incomplete folder, so ``needed`` files are looked for. With one,
    ``about`` is printed before.
    """
    try:
        library = importlib.import_module("huggingface_hub")
    except ImportError:
        raise UsageError(
            f"{option}: there is no such folder, and huggingface_hub, which downloads models, is not installed"
        ) from None
    endpoint = library.constants.ENDPOINT
    is_local = bool(library.constants.HF_HUB_OFFLINE) or not data_hub.can_reach(endpoint)
    with explain_errors(option, name, revision), _quiet(library):
        if about is not None and not is_local:
            print_status(about)
        folder = Path(
            library.snapshot_download(
                name, revision=revision, allow_patterns=list(patterns), local_files_only=is_local, endpoint=endpoint
            )
        )
        if is_local and not all(files.exists(folder / one) for one in needed):
            raise library.errors.LocalEntryNotFoundError(name)
        return folder


@contextlib.contextmanager
def explain_errors(option: str, name: str, revision: str | None) -> Iterator[None]:
    """Turn any error of the library into one line: what was tried, and what to do.

    Args:
        option: What the user wrote.
        name: ORG/NAME.
        revision: What was asked for; None: the newest.
    """
    errors: Any = importlib.import_module("huggingface_hub.errors")
    constants: Any = importlib.import_module("huggingface_hub.constants")
    hub, missing = f"the Hub ({constants.ENDPOINT})", f"{option}: there is no such folder, and"
    try:
        yield
    except errors.GatedRepoError:
        raise UsageError(
            f"{missing} {name} is only for those who accepted its terms: accept them at {constants.ENDPOINT}/{name}, "
            "and log in with hf auth login"
        ) from None
    except errors.RevisionNotFoundError:
        raise UsageError(f"{option}: {hub} has no revision {revision} of {name}") from None
    except errors.RepositoryNotFoundError:
        raise UsageError(
            f"{missing} {hub} has no model {name}; check the name, or log in with hf auth login if it is private"
        ) from None
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled):
        if constants.HF_HUB_OFFLINE:
            why = "HF_HUB_OFFLINE is set: unset it"
        elif not data_hub.can_reach(constants.ENDPOINT):
            why = f"The Hub ({constants.ENDPOINT}) cannot be reached: check the network"
        else:
            why = f"The Hub ({constants.ENDPOINT}) does not answer: try again later"
        fetch = f"hf download {name}" + (f" --revision {revision}" if revision else "")
        raise UsageError(
            f"{missing} {name} is not complete in the Hub's cache. {why}, or run '{fetch}' where there is a network "
            "and give the folder"
        ) from None
    except (UsageError, MemoryError):
        raise
    except Exception as error:
        raise UsageError(
            f"{option}: {name} cannot be read from {hub}: {one_line(f'{type(error).__name__}: {error}', 200)}"
        ) from error


@contextlib.contextmanager
def _quiet(library: Any) -> Iterator[None]:
    """Show the library's progress bars on a terminal and nowhere else, and nothing of its retries."""
    logger, utils = logging.getLogger("huggingface_hub"), library.utils
    level, hides_bars = logger.level, not sys.stderr.isatty() and not utils.are_progress_bars_disabled()
    logger.setLevel(logging.ERROR)
    if hides_bars:
        utils.disable_progress_bars()
    try:
        yield
    finally:
        logger.setLevel(level)
        if hides_bars:
            utils.enable_progress_bars()
