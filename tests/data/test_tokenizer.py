"""The user's tokenizer: its tokens, the end of documents, and no settings for inference."""

import json

import numpy as np
import pytest

from narrowgauge.data import tokenizer
from narrowgauge.data.corpus import Text
from narrowgauge.errors import UsageError

tokenizers = pytest.importorskip("tokenizers")
WORDS = ["the train runs on a narrow gauge", "a gauge says how the train runs", "größer 🚂"]


def make(specials=("<|endoftext|>",), vocab=300):
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab, special_tokens=list(specials), initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(WORDS * 10, trainer)
    return made


def saved(path, made):
    made.save(str(path))
    return path


def test_a_file_or_its_folder_is_opened(tmp_path):
    made = make()
    path = saved(tmp_path / "tokenizer.json", made)
    for given in (path, tmp_path):
        opened = tokenizer.open_tokenizer(given)
        assert opened.vocab == made.get_vocab_size()
        assert opened.end == made.token_to_id("<|endoftext|>")
        assert opened.separator.tolist() == [opened.end]
        assert opened.decode(opened.encode(WORDS[2])) == WORDS[2]


def test_a_tokenizer_of_transformers_is_opened_with_its_end_token(tmp_path):
    transformers = pytest.importorskip("transformers")
    made = make(("<s>", "<stop>", "</s>"))
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="<stop>")
    fast.save_pretrained(tmp_path)
    opened = tokenizer.open_tokenizer(tmp_path)
    assert opened.end == made.token_to_id("<stop>")
    assert opened.encode(WORDS[0]) == fast.encode(WORDS[0], add_special_tokens=False)


def test_without_an_end_token_documents_are_separated_by_an_empty_line(tmp_path):
    opened = tokenizer.open_tokenizer(saved(tmp_path / "t.json", make(())))
    assert opened.end is None
    assert opened.decode(opened.separator.tolist()) == "\n\n"


def test_truncation_padding_and_start_tokens_are_disabled(tmp_path):
    made = make(("<|endoftext|>", "<s>"))
    made.enable_truncation(4)
    made.enable_padding(length=50)
    made.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    opened = tokenizer.open_tokenizer(saved(tmp_path / "t.json", made))
    for tokens in (opened.encode_all([WORDS[0]])[0].tolist(), opened.encode(WORDS[0])):
        assert len(tokens) > 4 and 1 not in tokens
        assert opened.decode(tokens) == WORDS[0]


def test_special_tokens_in_a_document_are_characters(tmp_path):
    opened = tokenizer.open_tokenizer(saved(tmp_path / "t.json", make()))
    text = "it ends with <|endoftext|> they say"
    tokens = opened.encode_all([text, "a \ud800 b"])
    assert opened.end not in tokens[0].tolist()
    assert opened.decode(tokens[0].tolist()) == text
    assert opened.decode(tokens[1].tolist()) == "a ? b"


def test_special_tokens_in_plain_text_are_tokens(tmp_path):
    opened = tokenizer.open_tokenizer(saved(tmp_path / "t.json", make()))
    text = np.frombuffer(b"one story\n<|endoftext|>\nanother", np.uint8)
    encoded = tokenizer.encode_text(Text(text, text, "key"), opened)
    assert encoded.train.tolist().count(opened.end) == 1
    assert encoded.train.dtype == np.uint16


def test_tokens_have_the_smallest_dtype():
    kinds = [tokenizer.dtype_for(vocab) for vocab in (256, 257, 65536, 65537)]
    assert kinds == [np.uint8, np.uint16, np.uint16, np.uint32]


def test_vocab_is_the_largest_token_plus_one(tmp_path):
    vocabulary = {"a": 0, "b": 99_999, "[UNK]": 1}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    opened = tokenizer.open_tokenizer(saved(tmp_path / "t.json", made))
    assert opened.vocab == 100_000
    tokens = opened.encode_all(["a b a"])[0]
    assert tokens.dtype == np.uint32 and tokens.tolist() == [0, 99_999, 0]


def test_the_key_depends_on_the_content(tmp_path):
    one = tokenizer.open_tokenizer(saved(tmp_path / "a.json", make()))
    same = tokenizer.open_tokenizer(saved(tmp_path / "b.json", make()))
    other = tokenizer.open_tokenizer(saved(tmp_path / "c.json", make(vocab=280)))
    assert one.key == same.key != other.key


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "cannot read"),
        (b"", "is not a tokenizer"),
        (b"\xff\xfe\x00", "is not a tokenizer"),
        (b"{}", "is not a tokenizer"),
        (json.dumps({"model": {"type": "BPE"}}).encode(), "is not a tokenizer"),
    ],
)
def test_an_invalid_tokenizer_is_a_one_line_error(tmp_path, content, words):
    path = tmp_path / "t.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UsageError, match=words) as caught:
        tokenizer.open_tokenizer(path)
    assert "\n" not in str(caught.value) and str(path) in str(caught.value)


def test_a_folder_without_a_tokenizer_is_an_error_with_advice(tmp_path):
    with pytest.raises(UsageError, match=r"holds no tokenizer.json.*save_pretrained"):
        tokenizer.open_tokenizer(tmp_path)


def test_a_damaged_configuration_is_ignored(tmp_path):
    saved(tmp_path / "tokenizer.json", make())
    (tmp_path / "tokenizer_config.json").write_text("[1, 2")
    assert tokenizer.open_tokenizer(tmp_path).end is not None


def test_a_missing_package_is_a_one_line_error(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "tokenizers", None)
    with pytest.raises(UsageError, match="needs the package tokenizers"):
        tokenizer.open_tokenizer(tmp_path)
