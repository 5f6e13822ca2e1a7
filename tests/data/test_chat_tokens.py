"""Which tokens carry loss, with the chat templates of common models."""

import chat_folders
import numpy as np
import pytest
from chat_folders import chat, make_folder

from narrowgauge.data.chat_tokens import ChatEncoder
from narrowgauge.data.conversations import read_examples
from narrowgauge.data.model_tokenizer import load_model_tokenizer
from narrowgauge.errors import UsageError


@pytest.fixture
def make_encoder(tmp_path):
    def make(template=None, **settings):
        return ChatEncoder(load_model_tokenizer(make_folder(tmp_path / "model", template, **settings)))

    return make


def encode(encoder, record):
    """Return the rendered and the encoded example, and each run of tokens with loss as text."""
    ((_, example),) = read_examples([("data.jsonl line 1", record)])
    rendered = encoder.render(example)
    (encoded,) = encoder.encode([rendered])
    runs, inner = [], encoder.tokenizer.inner
    edges = np.flatnonzero(np.diff(np.concatenate([[0], encoded.has_loss, [0]])))
    for start, end in edges.reshape(-1, 2):
        runs.append(inner.decode(encoded.tokens[start:end], clean_up_tokenization_spaces=False))
    return rendered, encoded, runs


DIALOG = chat("Hi there", "I am  fine.", "And 2 + 2?", "It is four — naïve 日本")


@pytest.mark.parametrize(
    "template, expected",
    [
        ("LLAMA3", ["I am  fine.<|eot_id|>", "It is four — naïve 日本<|eot_id|>"]),
        ("CHATML", ["I am  fine.<|im_end|>", "It is four — naïve 日本<|im_end|>"]),
        ("GEMMA", ["I am  fine.<end_of_turn>", "It is four — naïve 日本<end_of_turn>"]),
        ("MARKED", ["I am  fine.<|im_end|>", "It is four — naïve 日本<|im_end|>"]),
        ("THINKING", ["<think>\n\n</think>\n\nIt is four — naïve 日本<|im_end|>"]),
        ("CLOSING", ["I am  fine.<|end|>", "It is four — naïve 日本<|end|>\n</s>"]),
        ("ENDLESS", [" I am  fine.\n", " It is four — naïve 日本\n"]),
        ("DATED", ["I am  fine.<|im_end|>", "It is four — naïve 日本<|im_end|>"]),
    ],
)
def test_assistant_turns_carry_loss(make_encoder, template, expected):
    encoder = make_encoder(getattr(chat_folders, template), adds_bos=True)
    rendered, encoded, runs = encode(encoder, DIALOG)
    assert runs == expected
    assert rendered.turns == 2 and encoded.open_ends == (2 if template == "ENDLESS" else 0)
    if template != "DATED":  # exactly what inference sees, with one beginning-of-text at most
        assert encoded.tokens.tolist() == encoder.tokenizer.inner.apply_chat_template(DIALOG["messages"])["input_ids"]
    assert (encoded.tokens == encoder.tokenizer.inner.bos_token_id).sum() == (template in ("LLAMA3", "GEMMA"))


def test_marked_templates_agree_with_transformers(make_encoder):
    encoder = make_encoder(chat_folders.MARKED)
    _, encoded, _ = encode(encoder, DIALOG)
    theirs = encoder.tokenizer.inner.apply_chat_template(DIALOG["messages"], return_assistant_tokens_mask=True)
    assert encoded.has_loss.tolist() == [bool(one) for one in theirs["assistant_masks"]]


def test_the_date_is_fixed(make_encoder):
    rendered, _, _ = encode(make_encoder(chat_folders.DATED), DIALOG)
    assert rendered.text.startswith("Today is 26 Jul 2024\n<|im_start|>user\n")


def test_spaces_at_the_boundary(make_encoder):
    """A word with a space before it is one token, which carries loss where the word does."""
    encoder = make_encoder(chat_folders.ENDLESS)
    assert encode(encoder, chat("Hi   ", "  I am   "))[2] == ["  I am   \n"]
    assert encode(encoder, {"prompt": "Hi  ", "completion": "I am"})[2] == [" I am</s>"]
    assert encode(encoder, {"prompt": "Hi", "completion": " I am  "})[2] == [" I am  </s>"]


def test_a_system_message_tools_and_function_calls(make_encoder):
    encoder = make_encoder(chat_folders.CHATML)
    rendered, _, runs = encode(encoder, chat("Hi", "I am", system="how are you?"))
    assert runs == ["I am<|im_end|>"] and "how are you?" in rendered.text
    call = [{"type": "function", "function": {"name": "add", "arguments": {}}}]
    record = {
        "messages": [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": None, "tool_calls": call},
            {"role": "tool", "content": "4"},
            {"role": "assistant", "content": [{"type": "text", "text": "It is "}, {"type": "text", "text": "4"}]},
        ],
        "tools": '[{"type": "function", "function": {"name": "add"}}]',
    }
    rendered, _, runs = encode(encoder, record)
    assert runs == ["<|im_end|>", "It is 4<|im_end|>"] and '"add"' in rendered.text


@pytest.mark.parametrize("template", ["CHATML", "MARKED"])
def test_a_prompt_of_messages_carries_no_loss(make_encoder, template):
    record = {"prompt": DIALOG["messages"][:3], "completion": DIALOG["messages"][3:]}
    rendered, _, runs = encode(make_encoder(getattr(chat_folders, template)), record)
    assert runs == ["It is four — naïve 日本<|im_end|>"] and rendered.turns == 1


@pytest.mark.parametrize("adds_bos", [False, True])
def test_prompt_completion_and_text_have_one_start_and_one_end(make_encoder, adds_bos):
    encoder = make_encoder(adds_bos=adds_bos)
    bos = [encoder.tokenizer.inner.bos_token_id] * adds_bos
    plain = encoder.tokenizer.inner("Hi there, how", add_special_tokens=False)["input_ids"]
    for start, end in (("", ""), ("<s>" * adds_bos, "</s>")):
        _, encoded, runs = encode(encoder, {"prompt": f"{start}Hi there,", "completion": f" how{end}"})
        assert runs == [" how</s>"]
        assert encoded.tokens.tolist() == [*bos, *plain, encoder.tokenizer.end]
        _, encoded, runs = encode(encoder, {"text": f"{start}Hi there, how{end}"})
        assert encoded.tokens.tolist() == [*bos, *plain, encoder.tokenizer.end]
        assert encoded.has_loss.tolist() == [False] + [True] * (len(encoded.tokens) - 1)


def test_sharegpt_is_the_same_as_messages(make_encoder):
    encoder = make_encoder(chat_folders.LLAMA3)
    names = {"user": "human", "assistant": "gpt"}
    turns = [{"from": names[one["role"]], "value": one["content"]} for one in DIALOG["messages"]]
    theirs, ours = encode(encoder, {"conversations": turns}), encode(encoder, DIALOG)
    assert np.array_equal(theirs[1].tokens, ours[1].tokens) and theirs[2] == ours[2]
    assert theirs[0].example.digest == ours[0].example.digest


def test_unpaired_surrogates_are_replaced(make_encoder):
    _, _, runs = encode(make_encoder(chat_folders.CHATML), chat("Hi \ud800", "I am \udfff!"))
    assert runs == ["I am ?!<|im_end|>"]


def test_templates_that_cannot_be_used(make_encoder):
    encoder = make_encoder(chat_folders.FORCED)
    ((_, example),) = read_examples([("x", DIALOG)])
    assert not encoder.render(example).spans
    with pytest.raises(UsageError, match="x: the chat template leaves out the text of all messages"):
        make_encoder(chat_folders.IMAGES).render(example)
    with pytest.raises(UsageError, match=r"x: the chat template refuses the conversation \(.*must alternate"):
        ((_, wrong),) = read_examples([("x", {"messages": DIALOG["messages"][1:]})])
        make_encoder(chat_folders.GEMMA).render(wrong)
    with pytest.raises(UsageError, match="no chat template, which conversations need"):
        make_encoder().render(example)
    with pytest.raises(UsageError, match="x: the chat template refuses"):  # the sandbox
        make_encoder("{{ messages.__class__.__mro__[1].__subclasses__() }}").render(example)


def test_tokenizers_that_are_refused(tmp_path):
    with pytest.raises(UsageError, match="is not a folder"):
        load_model_tokenizer(tmp_path / "none")
    with pytest.raises(UsageError, match=r"holds no tokenizer \(no tokenizer.json\)"):
        load_model_tokenizer(tmp_path)
    folder = make_folder(tmp_path / "code", auto_map={"AutoTokenizer": ["code.Evil", None]})
    (folder / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    with pytest.raises(UsageError, match="asks for Python code"):
        load_model_tokenizer(folder)
    assert not (tmp_path / "ran").exists()
    folder = make_folder(tmp_path / "damaged")
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(UsageError, match="tokenizer cannot be loaded"):
        load_model_tokenizer(folder)
    (folder / "tokenizer_config.json").write_text("{")
    with pytest.raises(UsageError, match="is not JSON"):
        load_model_tokenizer(folder)


def test_a_text_needs_an_end(make_encoder):
    ((_, example),) = read_examples([("x", {"text": "Hi"})])
    with pytest.raises(UsageError, match="no end-of-text token"):
        make_encoder(eos_token=None).render(example)
