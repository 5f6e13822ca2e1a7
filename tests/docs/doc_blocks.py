"""Extracts the code blocks of the documentation that tests run, and shortens their commands.

A comment before a block, which is not rendered, changes how it is run:

    <!-- run: COMMAND -->      for shell and Python: run this instead, because the block takes too long
    <!-- before CODE -->       Python that is run before the block: definitions that the page assumes
    <!-- after CODE -->        Python that is run at this place, to clean up
    <!-- not run: WHY -->      the block needs something that a test cannot have; the number of these is limited

A Python block whose first line is a comment with a file's name is also written to that file. Commands that name a
built-in task, or a file that the page assumes (``my_task.py``), are shortened: one layer, two steps, two seeds.
"""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
ELSEWHERE = {"integrations.md"}
"""Pages whose code another test runs: tests/integrations."""

_PART = re.compile(
    r"^<!-- (?P<word>run:|not run:|before|after)\s(?P<text>.*?)\s*-->[ \t]*\n"
    r"|^(?P<fence>```+)(?P<language>\w*)[^\n]*\n(?P<code>.*?)^(?P=fence)[ \t]*$",
    re.DOTALL | re.MULTILINE,
)
_FILE = re.compile(r"# ([\w/]+\.py)\n")
_SHELL = ("bash", "sh")
_BUILT_IN = {"gpt-tiny", "gpt2-124m", "gpt2-350m", "gpt-1.3b", "llama-1b", "llama-7b", "llama-70b", "llama-405b"}
_READERS = ("my_task.py:", "task.py:", "my.py:")
_SMALL = {
    "train": {"--steps": "2"},
    "validate": {"--steps": "2", "--seeds": "2"},
    "bench": {"--steps": "1", "--rounds": "2"},
}
_SMALL_MODEL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
                "num_key_value_heads": 1, "vocab_size": 64}  # fmt: skip
_QUICK = {"memory": "--no-search", "roofline": "--quick"}


@dataclass
class Block:
    """A part of a page that is executed."""

    page: str
    line: int
    kind: str
    """python, shell, or "not run"."""
    code: str

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def file(self) -> str | None:
        named = _FILE.match(self.code)
        return named[1] if named else None

    def commands(self) -> list[str]:
        """Return the shell commands, without comments, with continued lines joined."""
        lines = self.code.replace("\\\n", " ").splitlines()
        stripped = [shlex.join(shlex.split(line, comments=True)) for line in lines]
        return [line for line in stripped if line]


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks_of(page: Path) -> list[Block]:
    """Return the blocks of a page that are executed, in order, with replacements from comments applied."""
    text = page.read_text()
    found: list[Block] = []
    replacement: tuple[str, str] | None = None
    for part in _PART.finditer(text):
        line = text.count("\n", 0, part.start()) + 1
        word, code = part["word"], part["code"]
        if word in ("before", "after"):
            found.append(Block(page.name, line, "python", part["text"]))
        elif word:
            replacement = (word, part["text"])
        else:
            kind = _kind(part["language"], code)
            if kind and replacement:
                found.append(
                    Block(page.name, line, "not run" if replacement[0] == "not run:" else kind, replacement[1])
                )
            elif kind:
                found.append(Block(page.name, line, kind, code))
            replacement = None
    return found


def _kind(language: str, code: str) -> str | None:
    if language == "python":
        return "python"
    bare = not language and code.startswith("narrowgauge ")
    return "shell" if language in _SHELL or bare else None


def shorten(words: list[str]) -> list[str]:
    """Return the command that the test runs: one layer and two steps, unless the page defines the model itself."""
    verb, *rest = words
    built_in = [word for word in rest if word in _BUILT_IN]
    named = [word for word in rest if word.startswith(("gpt:", *_READERS)) or word.endswith(".py") or ".py:" in word]
    unnamed = verb in ("train", "bench", "validate") and not built_in and not named
    unnamed = unnamed and not {"--resume", "--against", "--curves", "--model"} & set(rest)
    if unnamed:
        rest = ["gpt:1x64", *rest]
    if built_in and verb != "lint":
        rest = ["gpt:1x64" if word in _BUILT_IN else word for word in rest]
    ours = unnamed or built_in
    if ours and verb != "lint":
        rest = _with(rest, {"--batch": "2", "--context": "16"})
        rest += [_QUICK[verb]] if verb in _QUICK else []
    if any(word.startswith("transformers:") for word in rest):
        small = {"--config": json.dumps(_SMALL_MODEL), "--batch": "2", "--context": "16", "--recipes": "fp32"}
        rest = _with(rest, small | _SMALL["bench"])
    rest = [word.replace("tf32,", "") for word in rest]  # needs tensor cores; refused on a CPU
    if "--to-loss" in rest:
        rest = _with(rest, {"--updates": "4", "--seeds": "2"})
    if "--capture" in rest:
        rest = _with(rest, {"--capture": "1"})
    if ours or any(word.startswith(_READERS) for word in rest):
        rest = _with(rest, _SMALL.get(verb, {}))
    return [verb, *rest]


def _with(words: list[str], options: dict[str, str]) -> list[str]:
    """Return the words with these options set, replacing earlier values."""
    kept: list[str] = []
    skip = False
    for word in words:
        if not skip and word not in options:
            kept.append(word)
        skip = word in options
    return kept + [word for pair in options.items() for word in pair]
