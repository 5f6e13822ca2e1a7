"""Data sources: each kind is recognized, and opened as bytes, byte pairs or with a tokenizer."""

import importlib
import json
import pkgutil

import numpy as np
import pytest

from narrowgauge import data as data_package
from narrowgauge.data import sources
from narrowgauge.data.source import DataSource
from narrowgauge.errors import UsageError

MANY = [f"document {number} says that {number} squared is {number * number}" for number in range(300)]


@pytest.fixture
def lines(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text("".join(json.dumps({"text": text, "short": text[9:16]}) + "\n" for text in MANY))
    return path


def open_(data, vocab=256, **options):
    return sources.open_source(str(data), vocab=vocab, context=16, **options)


def test_every_data_source_is_registered():
    """A new source needs its own file and a line in the registry, and nothing else."""
    found = set()
    for module in pkgutil.iter_modules(data_package.__path__, "narrowgauge.data."):
        values = vars(importlib.import_module(module.name)).values()
        found |= {value for value in values if isinstance(value, DataSource)}
    assert found == set(sources.SOURCES)


def test_kinds_are_recognized(tmp_path, lines):
    text = tmp_path / "a.txt"
    text.write_text("text")
    (tmp_path / "b.bin").write_bytes(bytes(200))
    only_text, saved, tabled = tmp_path / "texts", tmp_path / "saved", tmp_path / "tables"
    for folder, names in ((only_text, ["a.txt"]), (saved, ["dataset_dict.json"]), (tabled, ["README.md", "d.jsonl"])):
        folder.mkdir()
        for name in names:
            (folder / name).write_text("{}")
    kinds = {None: "corpus", "hf:a/b": "documents", lines: "documents", text: "text", tmp_path / "b.bin": "tokens"}
    kinds |= {only_text: "text", saved: "documents", tabled: "documents", tmp_path: "tokens"}
    for data, kind in kinds.items():
        assert sources.kind_of(None if data is None else str(data)) == kind
    with pytest.raises(UsageError, match="there is no file or folder"):
        sources.kind_of(str(tmp_path / "nothing"))
    with pytest.raises(UsageError, match="there is no file or folder"):
        sources.kind_of(str(tmp_path / "no.bin"))


def test_documents_are_bytes_or_byte_pairs(lines):
    as_bytes = open_(lines)
    assert as_bytes.decode(as_bytes.data.shards["train"][0][:20].tolist()) == MANY[0][:20]
    assert as_bytes.facts["documents"] == 300
    pairs = open_(lines, vocab=300)
    assert pairs.data.size("train") < as_bytes.data.size("train") / 2
    whole = pairs.decode(pairs.data.shards["eval"][0].tolist())
    assert whole == as_bytes.data.shards["eval"][0].tobytes().decode()
    assert pairs.prompt == pairs.data.shards["eval"][0][:8].tolist()


def test_a_tokenizer_adds_an_end_token_between_documents(lines, tmp_path):
    tokenizer = pytest.importorskip("narrowgauge.data.tokenizer")
    coder = tokenizer.open_tokenizer(word_tokenizer(tmp_path))
    source = open_(lines, vocab=coder.vocab, coder=coder)
    tokens = np.concatenate([source.data.shards["train"][0], source.data.shards["eval"][0]])
    assert (tokens == coder.end).sum() == 300
    first = source.data.shards["train"][0].tolist()
    assert source.decode(first[: first.index(coder.end)]) == MANY[0]


def test_a_tokenizer_decodes_the_tokens_of_a_bin(tmp_path):
    tokenizer = pytest.importorskip("narrowgauge.data.tokenizer")
    coder = tokenizer.open_tokenizer(word_tokenizer(tmp_path))
    ids = np.array(coder.encode("".join(MANY)), "<u2")
    (tmp_path / "x.bin").write_bytes(ids.tobytes())
    source = open_(tmp_path / "x.bin", vocab=coder.vocab, coder=coder)
    assert source.decode(source.prompt) in "".join(MANY)


def test_a_tokenizer_encodes_text(tmp_path):
    tokenizer = pytest.importorskip("narrowgauge.data.tokenizer")
    coder = tokenizer.open_tokenizer(word_tokenizer(tmp_path))
    (tmp_path / "x.txt").write_text("\n".join(MANY))
    source = open_(tmp_path / "x.txt", vocab=coder.vocab, coder=coder)
    whole = [source.decode(source.data.shards[split][0].tolist()) for split in ("train", "eval")]
    assert "".join(whole) == "\n".join(MANY)


def test_field_and_max_tokens_are_only_for_documents(lines, tmp_path):
    assert open_(lines, field="short").data.size("train") < open_(lines).data.size("train") / 2
    assert open_(lines, max_tokens=6000).data.size("train") < 6100
    (tmp_path / "x.txt").write_text("text " * 100)
    for option in ({"field": "text"}, {"max_tokens": 100}):
        with pytest.raises(UsageError, match="is for documents"):
            open_(tmp_path / "x.txt", **option)


def test_batches_are_pure_functions_of_their_number(lines):
    first, again = (open_(lines).data.sample(7, "train", 4, 16, seed=3) for _ in range(2))
    assert first[0].tolist() == again[0].tolist()


def test_names_are_made_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    assert sources.resolve_name("x.jsonl") == str(tmp_path / "x.jsonl")
    assert sources.resolve_name("hf:a/b:c@train") == "hf:a/b:c@train"
    assert sources.resolve_name("hf:./folder@train") == f"hf:{tmp_path}/folder@train"


def word_tokenizer(folder):
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(MANY, trainer)
    made.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"
