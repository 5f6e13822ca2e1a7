"""Encodes examples for fine-tuning, and finds the tokens that carry loss.

A conversation is rendered by the tokenizer's chat template, and the whole text is encoded at once. So training sees the
same tokens as inference. Which characters the assistant wrote is found in one of two ways:

    the template marks them with {% generation %}:   these characters
    otherwise, for each assistant turn:              what the template adds for the turn
        before = template(messages before the turn, with the generation prompt)
        after  = template(messages up to and including the turn)
        text   = template(all messages)
        common = the start that text and after share
        if common starts with before, and holds all that the assistant wrote:   common without before
        otherwise:                                                               none

The condition is also the one for inference: the model writes the turn after ``before``. Templates that rewrite earlier
turns (Qwen3 adds or removes what the assistant thought) do not fulfil it for these turns: they carry no loss and are
counted. Where ``common`` is shorter than ``after``, the template ends the last turn of a conversation in another way
than earlier ones (Phi-3, gpt-oss).

A token carries loss if it starts within these characters, apart from a space at its start. White space after the token
that ends a turn is left out, since the model never writes it. A document's first token never carries loss: nothing
precedes it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from narrowgauge.data.conversations import ASSISTANT, Example
from narrowgauge.data.model_tokenizer import ModelTokenizer
from narrowgauge.errors import UsageError, one_line

_MARKS = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_FIXED_DATE = (
    "{%- macro strftime_now(format) -%}{{ {'%Y-%m-%d': '2024-07-26', '%B %d, %Y': 'July 26, 2024', '%Y': '2024'}"
    ".get(format, '26 Jul 2024') }}{%- endmacro +%}"
)
"""Some templates write today's date, so that a resumed run would see other tokens. This is the date that Llama 3.1's
template writes by default."""


MODES: tuple[dict[str, Any], ...] = ({}, {"enable_thinking": False}, {"thinking": False})
"""Variables for the generation prompt. The prompt of some templates starts to think, which data without thoughts does
not continue; then the prompt without thinking counts."""


class Span(NamedTuple):
    """Characters that carry loss."""

    start: int
    end: int
    is_whole: bool = True
    """Whether they include the end of the turn. If not, a token across ``end`` is not part of the turn."""


@dataclass(frozen=True)
class Rendered:
    """An example as text."""

    example: Example
    text: str
    spans: tuple[Span, ...]
    turns: int = 0
    """Assistant turns that should carry loss."""


@dataclass(frozen=True)
class Encoded:
    """An example as tokens."""

    tokens: NDArray[np.int32]
    has_loss: NDArray[np.bool_]
    """The tokens to be predicted."""
    open_ends: int
    """Turns that do not end with a special token, so that the model does not learn where to stop."""


class ChatEncoder:
    """Encodes examples with a model's tokenizer and its chat template."""

    def __init__(self, tokenizer: ModelTokenizer) -> None:
        self.tokenizer = tokenizer
        self._special = np.array(sorted(tokenizer.special), np.int64)

    def render(self, example: Example) -> Rendered:
        """Render an example as text.

        Args:
            example: A conversation or a text.

        Raises:
            UsageError: The tokenizer has no chat template, or the template refuses the conversation.
        """
        if not example.messages:
            if self.tokenizer.end is None:
                raise UsageError(
                    f"{self.tokenizer.folder}: its tokenizer has no end-of-text token; name it as eos_token in "
                    "tokenizer_config.json"
                )
            start, text = len(example.prompt), example.prompt + example.text
            return Rendered(example, _encodable(text), (Span(start, len(text)),), turns=1)
        messages, turns = example.messages, _find_turns(example)
        template = self._get_template(example)
        try:
            text, marked = self._apply(template, example, len(messages))
        except Exception as error:  # templates raise jinja's errors, and any other
            raise UsageError(
                f"{example.where}: the chat template refuses the conversation ({one_line(error)}); correct its "
                "messages or leave it out"
            ) from None
        contents = [content for message in messages if (content := message["content"].strip())]
        if contents and not any(content in text for content in contents):
            raise UsageError(
                f"{example.where}: the chat template leaves out the text of all messages, as templates for images may; "
                "give prompt and completion as texts"
            )
        if marked is not None and not example.given:
            spans = [Span(start, end) for start, end in marked if start < end]
        else:
            spans = [span for turn in turns if (span := self._find_span(template, example, turn, text))]
        return Rendered(example, _encodable(text), tuple(spans), len(turns))

    def encode(self, rendered: Sequence[Rendered]) -> list[Encoded]:
        """Encode rendered examples together."""
        out = self.tokenizer.inner(
            [one.text for one in rendered],
            add_special_tokens=False,  # a template writes them itself; other texts get them below
            return_offsets_mapping=True,
            return_attention_mask=False,
            return_token_type_ids=False,
            padding=False,
            truncation=False,
            verbose=False,
        )
        found = zip(rendered, out["input_ids"], out["offset_mapping"], strict=True)
        return [self._mark_loss(one, tokens, offsets) for one, tokens, offsets in found]

    def _mark_loss(self, rendered: Rendered, tokens: list[int], offsets: list[tuple[int, int]]) -> Encoded:
        ids = np.array(tokens, np.int32)
        # Byte-level tokenizers leave spaces out of the offsets: a token of spaces alone is at the end of them, without
        # length.
        starts, ends = np.array(offsets, np.int64).reshape(-1, 2).T
        special = np.isin(ids, self._special)
        has_loss = np.zeros(len(ids), np.bool_)
        open_ends = min(rendered.turns, sum(span.is_whole for span in rendered.spans))
        for start, end, is_whole in rendered.spans:
            inside = (ends <= end) | (starts < end) if is_whole else ends <= end
            within = np.flatnonzero((starts >= start) & (ends > start) & inside)
            stops = within[special[within]]
            if len(stops) and not rendered.text[ends[stops[-1]] : ends[within[-1]]].strip():
                within = within[within <= stops[-1]]
                open_ends -= is_whole
            has_loss[within] = True
        if not rendered.example.messages:
            ids, has_loss, open_ends = *self._add_ends(ids, has_loss), 0
        has_loss[:1] = False
        return Encoded(ids, has_loss, max(open_ends, 0))

    def _add_ends(
        self, ids: NDArray[np.int32], has_loss: NDArray[np.bool_]
    ) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        """Add beginning-of-text and end-of-text to a text that does not have them, and loss on the latter."""
        prefix = np.array(self.tokenizer.prefix, np.int32)
        if np.array_equal(ids[: len(prefix)], prefix):
            prefix = prefix[:0]
        end = np.array([self.tokenizer.end], np.int32)
        if len(ids) and ids[-1] == end[0]:
            end = end[:0]
        none, all_ = np.zeros(len(prefix), np.bool_), np.ones(len(end), np.bool_)
        return np.concatenate([prefix, ids, end]), np.concatenate([none, has_loss, all_])

    def _get_template(self, example: Example) -> str:
        template: str | None = self.tokenizer.chat_template
        if example.tools is not None:
            try:
                template = self.tokenizer.inner.get_chat_template(tools=list(example.tools))
            except ValueError:
                template = None
        if template is None:
            raise UsageError(
                f"{self.tokenizer.folder}: its tokenizer has no chat template, which conversations need; add the "
                "chat_template.jinja of the model's chat version, or give prompt and completion as texts"
            )
        return _FIXED_DATE + template if "strftime_now" in template else template

    def _apply(
        self, template: str, example: Example, count: int, **variables: Any
    ) -> tuple[str, list[tuple[int, int]] | None]:
        """Render the first ``count`` messages. Returns the text, and the characters that the template marks."""
        from transformers.utils.chat_template_utils import render_jinja_template

        is_marked = _MARKS.search(template) is not None
        texts, marks = render_jinja_template(
            conversations=[list(example.messages[:count])],
            tools=None if example.tools is None else list(example.tools),
            chat_template=template,
            return_assistant_tokens_mask=is_marked,
            **{**self.tokenizer.inner.special_tokens_map, **variables},
        )
        return texts[0], list(marks[0]) if is_marked else None

    def _find_span(self, template: str, example: Example, turn: int, text: str) -> Span | None:
        """Find the characters that the template adds for a turn. None: it rewrites what precedes or follows."""
        if not turn:
            return None  # no prompt precedes it
        content = example.messages[turn]["content"].strip()
        after = text
        try:
            if turn + 1 < len(example.messages):
                after, _ = self._apply(template, example, turn + 1)
            end = _count_shared(text, after)
            is_whole = end == len(after)
            for mode in MODES:
                before, _ = self._apply(template, example, turn, add_generation_prompt=True, **mode)
                start = len(before)
                has_content = is_whole or (content and content in text[start:end])
                if start < end and text.startswith(before) and has_content:
                    return Span(start, end, is_whole)
        except Exception:  # a template may refuse a part of a conversation
            return None
        return None


def _find_turns(example: Example) -> list[int]:
    """Return the indices of the assistant turns that should carry loss."""
    turns = enumerate(example.messages)
    return [index for index, message in turns if message["role"] == ASSISTANT and index >= example.given]


def _count_shared(first: str, second: str) -> int:
    """Return how many characters two texts have in common at their start."""
    if first.startswith(second):
        return len(second)
    pairs = enumerate(zip(first, second, strict=False))
    return next((index for index, (one, other) in pairs if one != other), len(first))


def _encodable(text: str) -> str:
    """Replace unpaired surrogates, which no tokenizer encodes. The length is unchanged."""
    return text.encode(errors="replace").decode()
