"""Language tasks on documents: tokenizer, field, max_tokens, and reproducible batches."""

import json

import pytest
import torch

from narrowgauge import tasks
from narrowgauge.data import pack
from narrowgauge.errors import UsageError

tokenizers = pytest.importorskip("tokenizers")
MANY = [f"document {number} says that {number} squared is {number * number}" for number in range(300)]


@pytest.fixture(autouse=True)
def places(tmp_path, monkeypatch):
    monkeypatch.setenv("NARROWGAUGE_CACHE", str(tmp_path / "cache"))
    (tmp_path / "x.jsonl").write_text("".join(json.dumps({"body": text}) + "\n" for text in MANY))
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 1, "[UNK]": 0, "</s>": 2}, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def small(folder, **options):
    return tasks.find("gpt:1x64", **{"batch": 4, "context": 16, "data": str(folder / "x.jsonl")} | options)


def test_a_task_on_documents_has_batches_and_facts(places):
    task = small(places, field="body")
    inputs, _ = task.batch(3, "train")
    train = "".join(text + "\n\n" for text in MANY if not pack.is_held_out(text, 20))
    assert all(bytes(row.tolist()).decode() in train for row in inputs)
    assert torch.equal(inputs, small(places, field="body").batch(3, "train")[0])
    assert task.facts["documents"] == 300
    assert task.facts["train_tokens"] + task.facts["eval_tokens"] == sum(len(text) + 2 for text in MANY)
    assert len(task.sample(task.model())) > len("document")


def test_a_tokenizer_decides_the_vocabulary(places):
    task = small(places, field="body", tokenizer=str(places))
    assert task.facts["vocab"] == 3 and task.facts["padded_vocab"] == 128
    assert int(task.batch(0, "train")[0].max()) == 2
    assert small(places, field="body", tokenizer=str(places), vocab=500).facts["vocab"] == 500
    with pytest.raises(UsageError, match="the tokenizer has 3 tokens"):
        small(places, field="body", tokenizer=str(places), vocab=2)


def test_invalid_field_and_max_tokens_are_one_line_errors(places):
    with pytest.raises(UsageError, match="its fields are body"):
        small(places).batch(0, "train")
    with pytest.raises(UsageError, match="--max-tokens 0"):
        small(places, max_tokens=0)
    with pytest.raises(UsageError, match="hf:NAME"):
        small(places, data="hf:")
