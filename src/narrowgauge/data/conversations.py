"""Examples for fine-tuning: checks records of four forms, and makes each of them an ``Example``.

    messages            [{"role": "user", "content": "..."}, ...]        loss on what the assistant says
    conversations       the same, or ShareGPT's [{"from": "human", "value": "..."}, ...]
    prompt, completion  two texts, or two lists of messages               loss on the completion
    text                a text                                            loss on all of it

The first record decides the form, and every other record must have the same. A record may also have ``tools``: the
functions that the assistant may call, which chat templates describe to the model. Other fields are ignored.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from narrowgauge.data.records import Record
from narrowgauge.errors import UsageError, one_line

Message = dict[str, Any]
FORMS: dict[str, tuple[str, ...]] = {
    "messages": ("messages",),
    "conversations": ("conversations",),
    "prompt/completion": ("prompt", "completion"),
    "text": ("text",),
}
"""The fields of each form. If a record has those of several forms, the first of these forms counts."""
NAMES = {
    "messages": "conversations",
    "conversations": "conversations",
    "prompt/completion": "prompts with completions",
    "text": "texts",
}
"""What to call the examples of a form in a message to the user."""
SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "bot": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
}
ASSISTANT = "assistant"
_EXPECTED = "give messages, conversations, prompt and completion, or text"


@dataclass(frozen=True)
class Example:
    """One document for fine-tuning: either messages, or a text with a part before it that carries no loss."""

    where: str
    """Its file and line, for error messages."""
    messages: tuple[Message, ...] = ()
    """The messages of a conversation. Empty: the example is a text."""
    given: int = 0
    """How many of the messages are a prompt, whose assistant turns carry no loss."""
    tools: tuple[Any, ...] | None = None
    prompt: str = ""
    text: str = ""
    """The text after the prompt, which carries the loss."""

    @property
    def digest(self) -> int:
        """A hash of the content in 64 bits, which does not depend on a tokenizer: copies have the same one."""
        content = [self.messages, self.given, self.tools] if self.messages else [self.prompt, self.text]
        data = json.dumps(content, sort_keys=True, default=str).encode()
        return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def detect_form(record: Mapping[str, Any], where: str) -> str:
    """Return the form of a record.

    Raises:
        UsageError: It has no form that is known.
    """
    for form, fields in FORMS.items():
        if all(record.get(field) is not None for field in fields):
            return form
    raise UsageError(f"{where}: {_list_fields(record)}; {_EXPECTED}")


def read_examples(records: Iterable[tuple[str, Record]], form: str | None = None) -> Iterator[tuple[str, Example]]:
    """Check records and make examples of them, each with the form of all.

    Args:
        records: Records with their places.
        form: The form that is required. None: that of the first record.

    Raises:
        UsageError: A record has another form, or is wrong in itself.
    """
    for where, record in records:
        form = form or detect_form(record, where)
        missing = [field for field in FORMS[form] if record.get(field) is None]
        if missing:
            raise UsageError(
                f"{where} has no {missing[0]!r}, which the first record has; {_list_fields(record)}: all records need "
                "the same form"
            )
        try:
            example = _make_example(record, form, where)
        except RecursionError:
            raise UsageError(f"{where} is nested too deeply; give plain messages") from None
        yield form, example


def _list_fields(record: Mapping[str, Any]) -> str:
    return one_line(f"its fields are {', '.join(map(str, list(record)[:20]))}") if record else "it has no fields"


def _make_example(record: Record, form: str, where: str) -> Example:
    if form == "text":
        return Example(where, text=_check_text(record["text"], "text", where))
    tools = _check_tools(record.get("tools"), where)
    if form == "prompt/completion":
        prompt, completion = record["prompt"], record["completion"]
        if isinstance(prompt, str) and isinstance(completion, str):
            return Example(where, prompt=prompt, text=completion)
        if not isinstance(prompt, list) or not isinstance(completion, list):
            raise UsageError(
                f"{where}: prompt holds {type(prompt).__name__} and completion {type(completion).__name__}; "
                "give two texts or two lists of messages"
            )
        first = _check_messages(prompt, "prompt", where)
        return Example(where, first + _check_messages(completion, "completion", where), len(first), tools)
    return Example(where, _check_messages(record[form], form, where), tools=tools)


def _check_text(value: object, field: str, where: str) -> str:
    if not isinstance(value, str):
        raise UsageError(f"{where}: {field} holds {type(value).__name__}; give text")
    return value


def _check_tools(value: object, where: str) -> tuple[Any, ...] | None:
    if isinstance(value, str) and value.strip():  # datasets stores lists of different structures as JSON text
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise UsageError(f"{where}: tools is a text that is not JSON; give a list of objects") from None
    if not value:
        return None
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise UsageError(f"{where}: tools holds {type(value).__name__}; give a list of objects")
    return tuple(_drop_nulls(tool) for tool in value)


def _check_messages(value: object, field: str, where: str) -> tuple[Message, ...]:
    if not isinstance(value, list) or not value:
        held = "an empty list" if value == [] else type(value).__name__
        raise UsageError(f'{where}: {field} holds {held}; give a list such as [{{"role": "user", "content": "..."}}]')
    return tuple(_check_message(item, f"{where}: {field}, message {index}") for index, item in enumerate(value, 1))


def _check_message(item: object, where: str) -> Message:
    if not isinstance(item, dict):
        raise UsageError(f"{where} is {type(item).__name__}; give an object with role and content")
    message = _drop_nulls(item)
    if "role" not in message and "from" in message:
        sender = message.pop("from")
        if not isinstance(sender, str) or sender not in SHAREGPT_ROLES:
            known = ", ".join(SHAREGPT_ROLES)
            raise UsageError(f"{where} is from {one_line(repr(sender), 60)}; expected one of {known}")
        message = {"role": SHAREGPT_ROLES[sender], "content": message.pop("value", None), **message}
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or not role:
        raise UsageError(f"{where} has no role; {_list_fields(item)}: add a role")
    if message.get("weight") == 0:
        raise UsageError(f"{where} has weight 0, which is not supported; leave its conversation out or remove weight")
    if isinstance(content, list):
        content = "".join(_read_part(part, where) for part in content)
    if content is None and message.get("tool_calls"):
        content = ""  # an assistant that only calls a function
    if not isinstance(content, str):
        held = "no content" if content is None else f"content of type {type(content).__name__}"
        raise UsageError(f"{where} has {held}; give text")
    return {**message, "content": content}


def _read_part(part: object, where: str) -> str:
    """Return the text of one part of a message whose content is a list."""
    if isinstance(part, dict) and part.get("type", "text") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    raise UsageError(f"{where} has a part of type {one_line(repr(kind), 60)}; only text can be used: leave it out")


def _drop_nulls(value: Any) -> Any:
    """Remove fields that are null, at any depth. A table stores them where only some messages have a field."""
    if isinstance(value, dict):
        return {key: _drop_nulls(item) for key, item in value.items() if item is not None}
    return [_drop_nulls(item) for item in value] if isinstance(value, list) else value
