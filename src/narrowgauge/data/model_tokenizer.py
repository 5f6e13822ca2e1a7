"""Loads the tokenizer of a Hugging Face model from its folder, with its chat template, without running any code.

The folder's own Python files are never run, nothing is downloaded, and nothing is unpickled. Chat templates are
rendered by transformers in jinja's sandbox.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from narrowgauge import files
from narrowgauge.errors import UsageError, one_line

VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
"""A folder with a tokenizer has one of these files."""
SETTINGS = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "config.json",
)
"""The other files that a tokenizer is made from."""
LARGEST = 512 << 20
"""Maximum size of one of the files in bytes."""


@dataclass(frozen=True)
class ModelTokenizer:
    """A model's tokenizer."""

    inner: Any
    """The tokenizer of transformers."""
    folder: Path
    key: str
    """A fingerprint of the files and of the version of transformers."""
    chat_template: str | None
    """The template for conversations without tools. None: there is none."""
    prefix: tuple[int, ...]
    """The tokens that the tokenizer puts before a text by itself: beginning-of-text, or none."""
    end: int | None
    """The token that ends a text."""
    special: frozenset[int]
    """Tokens that are no text, such as the one that ends a turn."""

    @property
    def pad(self) -> int:
        """The token for the unused end of a row. Nothing attends to it, and it carries no loss."""
        own = self.inner.pad_token_id
        return int(own) if own is not None else self.end or 0


def load_model_tokenizer(folder: Path) -> ModelTokenizer:
    """Load the tokenizer in the folder of a model.

    Args:
        folder: A folder that transformers' ``save_pretrained`` made.

    Raises:
        UsageError: The folder holds no tokenizer, or one that needs code from the folder.
    """
    if not files.is_folder(folder):
        raise UsageError(f"{folder} is not a folder; give the folder of a Hugging Face model with its tokenizer")
    if not any(files.is_file(folder / name) for name in VOCABULARIES):
        raise UsageError(
            f"{folder} holds no tokenizer (no {VOCABULARIES[0]}); copy the tokenizer's files of the model into it"
        )
    if importlib.util.find_spec("transformers") is None:
        raise UsageError("a model's tokenizer needs the package transformers; install it (pip install transformers)")
    contents = {
        name: files.read(folder / name, LARGEST) for name in (*VOCABULARIES, *SETTINGS) if files.exists(folder / name)
    }
    _refuse_code(folder, contents)
    inner = _load(folder)
    if not inner.is_fast:
        raise UsageError(
            f"{folder}: its tokenizer does not say which characters a token stands for; save it as tokenizer.json"
        )
    import transformers

    digest = hashlib.blake2b(str(transformers.__version__).encode(), digest_size=12)
    for name, content in contents.items():
        digest.update(f"{name}\0{len(content)}\0".encode() + content)
    try:
        template = inner.get_chat_template()
    except ValueError:  # no template, or several of which none is the default
        template = None
    digest.update(repr(template).encode(errors="replace"))
    added = {token for token, found in inner.added_tokens_decoder.items() if found.special}
    return ModelTokenizer(
        inner=inner,
        folder=folder,
        key=digest.hexdigest(),
        chat_template=template,
        prefix=_find_prefix(inner),
        end=inner.eos_token_id,
        special=frozenset(added | set(inner.all_special_ids)),
    )


def _refuse_code(folder: Path, contents: dict[str, bytes]) -> None:
    """Refuse a tokenizer that is defined by Python files in the folder."""
    for name in ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.json"):
        if name not in contents:
            continue
        try:
            settings = files.parse_json(contents[name])
        except ValueError as error:
            raise UsageError(f"{folder / name} is not JSON ({one_line(error)}); copy it from the model again") from None
        if not isinstance(settings, dict):
            raise UsageError(f"{folder / name} is not a JSON object; copy it from the model again")
        if settings.get("auto_map"):
            raise UsageError(
                f"{folder / name} asks for Python code from the folder (auto_map), which is never run; if transformers "
                "has this tokenizer, remove auto_map from the file"
            )


def _load(folder: Path) -> Any:
    transformers: Any = importlib.import_module("transformers")
    try:
        with _quiet():
            return transformers.AutoTokenizer.from_pretrained(
                str(files.resolve_path(folder)), local_files_only=True, trust_remote_code=False
            )
    except Exception as error:  # a damaged file raises whatever the library happens to raise
        reason = one_line(f"{type(error).__name__}: {error}")
        raise UsageError(
            f"{folder}: its tokenizer cannot be loaded ({reason}); copy the tokenizer's files again"
        ) from error


def _find_prefix(inner: Any) -> tuple[int, ...]:
    """Find the tokens that the tokenizer adds before a text, by comparing a text with and without them."""
    plain = list(inner("a", add_special_tokens=False)["input_ids"])
    whole = list(inner("a")["input_ids"])
    for start in range(len(whole) - len(plain) + 1):
        if whole[start : start + len(plain)] == plain:
            return tuple(whole[:start])
    return ()


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide the advice of transformers."""
    logging: Any = importlib.import_module("transformers.utils.logging")
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)
