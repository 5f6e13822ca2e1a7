"""Encodes all examples of a file for fine-tuning, and keeps their tokens in the cache.

    tokens.bin     int32   the tokens of all documents, one document after the other
    has_loss.bin   uint8   whether a token carries loss
    ends.bin       int64   where each document ends
    digests.bin    uint64  a hash of each document's content

The files depend on the data, the tokenizer and its chat template, and not on the context, the split or the seed. These
are applied later, so that changing them does not encode the data again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from narrowgauge import files
from narrowgauge.data import cache
from narrowgauge.data.cache import Array
from narrowgauge.data.chat_tokens import ChatEncoder, Rendered
from narrowgauge.data.conversations import NAMES, Example, read_examples
from narrowgauge.data.records import list_record_files, read_records
from narrowgauge.errors import UsageError

GROUP_CHARS, GROUP_EXAMPLES = 1 << 20, 512
"""How much is encoded at once, by all threads."""
REPORT_EVERY_S = 10.0
FORMAT = 1
"""Version of the files, part of their key: a change makes them again."""
FACTS = "facts.json"
ARRAYS = {"tokens": np.int32, "has_loss": np.uint8, "ends": np.int64, "digests": np.uint64}
EMPTY, NO_ASSISTANT, NO_TURN = "empty", "no_assistant_turn", "only_rewritten_turns"
"""Why an example is skipped. The last: the template rewrites all its assistant turns."""


@dataclass(frozen=True)
class TokenizedExamples:
    """Documents as tokens, memory-mapped."""

    tokens: Array
    has_loss: Array
    ends: Array
    digests: Array
    facts: dict[str, Any]
    """What was read: form, documents, skipped, turns, turns_without_loss, turns_without_end."""

    def __len__(self) -> int:
        return len(self.ends)

    @property
    def starts(self) -> Array:
        """Where each document starts."""
        return np.concatenate([np.zeros(1, np.int64), self.ends[:-1]])


def tokenize_examples(path: Path, encoder: ChatEncoder, notify: Callable[[str], None]) -> TokenizedExamples:
    """Encode the examples of a file or folder, or load their tokens from the cache.

    Args:
        path: A file of examples, or a folder of such files.
        encoder: Encodes them.
        notify: Receives a line about the progress every ten seconds.

    Raises:
        UsageError: The data cannot be read or used.
    """
    found = list_record_files(path)
    inputs = cache.fingerprint([files.resolve_path(file) for file in found], "examples", FORMAT)
    key = hashlib.blake2b(f"{inputs} {encoder.tokenizer.key}".encode(), digest_size=12).hexdigest()

    def make(folder: Path) -> None:
        _write(folder, path, found, encoder, notify)

    folder = cache.load_or_make_folder(f"examples-{key}", make)
    arrays = {name: cache.map_array(folder / f"{name}.bin", dtype) for name, dtype in ARRAYS.items()}
    facts = json.loads((folder / FACTS).read_text(encoding="utf-8"))
    return TokenizedExamples(**arrays, facts=facts)


def _write(
    folder: Path, path: Path, found: Sequence[Path], encoder: ChatEncoder, notify: Callable[[str], None]
) -> None:
    skipped: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    lengths: list[int] = []
    digests: list[int] = []
    form, started, reported = "", time.monotonic(), time.monotonic()
    examples = read_examples(chain.from_iterable(map(read_records, found)))
    with contextlib.ExitStack() as stack:
        tokens, has_loss = (stack.enter_context((folder / f"{name}.bin").open("wb")) for name in ("tokens", "has_loss"))
        for group in _group(examples, encoder, skipped, counts):
            form = group[0][0]
            rendered = [one for _, one in group]
            for one, encoded in zip(rendered, encoder.encode(rendered), strict=True):
                counts["turns"] += one.turns
                counts["turns_without_end"] += encoded.open_ends
                if not encoded.has_loss.any():
                    skipped[EMPTY] += 1
                    continue
                tokens.write(encoded.tokens.tobytes())
                has_loss.write(encoded.has_loss.astype(np.uint8).tobytes())
                lengths.append(len(encoded.tokens))
                digests.append(one.example.digest)
            now = time.monotonic()
            if now - reported >= REPORT_EVERY_S:
                reported = now
                notify(f"encoding {path}: {len(lengths):,} documents, {sum(lengths):,} tokens, {now - started:.0f} s")
    if not lengths:
        raise UsageError(_explain_nothing(path, skipped))
    np.cumsum(lengths).astype(np.int64).tofile(folder / "ends.bin")
    np.array(digests, np.uint64).tofile(folder / "digests.bin")
    facts = {
        "form": form,
        "documents": len(lengths),
        "skipped": dict(skipped),
        "turns": counts["turns"],
        "turns_without_loss": counts["turns_without_loss"],
        "turns_without_end": counts["turns_without_end"],
    }
    (folder / FACTS).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


def _group(
    examples: Iterator[tuple[str, Example]], encoder: ChatEncoder, skipped: Counter[str], counts: Counter[str]
) -> Iterator[list[tuple[str, Rendered]]]:
    """Render examples and yield groups of them to encode together, without those that have no loss."""
    group: list[tuple[str, Rendered]] = []
    chars = 0
    for form, example in examples:
        if not example.messages and not (example.prompt + example.text).strip():
            skipped[EMPTY] += 1
            continue
        rendered = encoder.render(example)
        if not rendered.turns:
            skipped[NO_ASSISTANT] += 1
            continue
        counts["turns_without_loss"] += max(rendered.turns - len(rendered.spans), 0)
        if not rendered.spans:
            skipped[NO_TURN] += 1
            continue
        group.append((form, rendered))
        chars += len(rendered.text)
        if chars >= GROUP_CHARS or len(group) >= GROUP_EXAMPLES:
            yield group
            group, chars = [], 0
    if group:
        yield group


def _explain_nothing(path: Path, skipped: Counter[str]) -> str:
    """Say why there is not one document."""
    if not skipped:
        return f"{path} has no records; give a file with examples"
    reason, count = skipped.most_common(1)[0]
    if reason == NO_ASSISTANT:
        return f"{path}: none of the {count:,} {NAMES['messages']} has an assistant turn to learn from; add the answers"
    if reason == NO_TURN:
        return (
            f"{path}: the chat template rewrites the assistant turns of all {count:,} conversations, so that training "
            "would not see what inference sees; give prompt and completion as texts, or a template with "
            "{% generation %}"
        )
    return f"{path}: all {count:,} examples are empty; give some with text"
