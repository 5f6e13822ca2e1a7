"""Batches for fine-tuning: from files to packed rows."""

import gzip
import itertools
import json
import re

import chat_folders
import numpy as np
import pytest
import torch
from chat_folders import chat, make_folder, write_lines
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from narrowgauge.data import tokenized_examples
from narrowgauge.data.finetuning import hold_out, open_finetuning_data
from narrowgauge.errors import UsageError

CHATS = [chat(f"Hi there {i}", "I am fine. " * (1 + i % 5)) for i in range(40)]


@pytest.fixture
def folder(tmp_path):
    return make_folder(tmp_path / "model", chat_folders.CHATML)


def no_lines(line):
    raise AssertionError(line)


def open_data(path, folder, **options):
    return open_finetuning_data(path, folder, **{"context": 64, "batch": 4, "notify": no_lines, **options})


def split_documents(batch):
    """Return the tokens and the labels of each document in a batch, padding included, as pairs of tuples."""
    found = []
    for ids, labels, positions in zip(batch["input_ids"], batch["labels"], batch["position_ids"], strict=True):
        starts = [*np.flatnonzero(positions.numpy() == 0).tolist(), len(ids)]
        for start, end in itertools.pairwise(starts):
            assert positions[start:end].tolist() == list(range(end - start))
            assert labels[start] == -100
            found.append((tuple(ids[start:end].tolist()), tuple(labels[start:end].tolist())))
    return found


def take_epoch(data, split="train"):
    """Return the documents of all rows of a split."""
    found = []
    for step in range(-(-data.rows(split) // data.batch_rows)):
        batch = data.batch(step, split)
        left = data.rows(split) - step * data.batch_rows
        found += split_documents({name: tensor[:left] for name, tensor in batch.items()})
    return [one for one in found if any(label != -100 for label in one[1])]


def test_every_document_is_in_one_batch_of_an_epoch(tmp_path, folder):
    data = open_data(write_lines(tmp_path / "chats.jsonl", CHATS), folder, eval_share=0.2)
    documents = take_epoch(data) + take_epoch(data, "eval")
    facts = data.facts
    assert len(documents) == facts["documents"] == 40 and len(take_epoch(data, "eval")) == facts["eval_documents"] > 0
    assert sum(len(ids) for ids, _ in documents) == facts["tokens"]
    assert sum(label != -100 for _, labels in documents for label in labels) == facts["loss_tokens"]
    assert (data.rows("train") + data.rows("eval")) * 64 == facts["tokens"] + facts["padding"]
    assert facts["largest_token"] == max(max(ids) for ids, _ in documents)
    alone = {tuple(ids): tuple(labels) for ids, labels in documents}
    assert len(alone) == 40
    assert facts["form"] == "messages" and facts["truncated"] == 0 and not sum(facts["skipped"].values())
    assert re.fullmatch(
        r"40 conversations: \d+ for training, \d+ for evaluation; [\d.]+% of the packed tokens are data, "
        r"[\d.]+% of the data carries loss",
        data.describe(),
    )


def test_batches_are_a_pure_function(tmp_path, folder):
    path = write_lines(tmp_path / "chats.jsonl", CHATS)
    data, again = open_data(path, folder), open_data(path, folder)
    steps = [0, 7, 3, 0, 50, 7]
    first = {step: data.batch(step, "train") for step in steps}
    for step in reversed(steps):
        for name, tensor in again.batch(step, "train").items():
            assert tensor.dtype == torch.long and tensor.shape == (4, 64)
            assert torch.equal(tensor, first[step][name])
    other = open_data(path, folder, seed=1)
    assert not torch.equal(other.batch(0, "train")["input_ids"], first[0]["input_ids"])
    assert torch.equal(other.batch(0, "eval")["input_ids"], data.batch(0, "eval")["input_ids"])


def test_epochs_follow_each_other_without_a_gap(tmp_path, folder):
    data = open_data(write_lines(tmp_path / "chats.jsonl", CHATS), folder, batch=3, eval_share=0)
    rows = data.rows("train")
    assert rows % 3 and data.steps_per_epoch == -(-rows // 3) and data.steps_for(3) == rows
    flat = [tuple(row.tolist()) for step in range(rows) for row in data.batch(step, "train")["input_ids"]]
    epochs = [flat[start : start + rows] for start in (0, rows, 2 * rows)]
    assert all(len(set(epoch)) == rows and set(epoch) == set(flat) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    wide = open_data(tmp_path / "chats.jsonl", folder, batch=5 * rows // 2, eval_share=0)
    assert wide.steps_per_epoch == 1
    assert [tuple(row.tolist()) for row in wide.batch(0, "train")["input_ids"]] == flat[: 5 * rows // 2]


def test_long_documents_are_cut_and_counted(tmp_path, folder):
    records = [chat("Hi", "I am fine. " * 50), chat("Hi there, " * 50, "I am"), chat("Hi", "I am"), chat("how", "are")]
    data = open_data(write_lines(tmp_path / "chats.jsonl", records), folder, eval_share=0)
    facts = data.facts
    assert facts["documents"] == 3 and facts["truncated"] == 1 and facts["lost_tokens"] > 50
    assert facts["skipped"]["cut_before_loss"] == 1
    assert max(len(ids) for ids, _ in take_epoch(data)) == 64
    assert "1 were cut at 64 tokens" in data.describe()
    assert data.describe().splitlines()[1] == "skipped: 1 cut before the first token with loss"
    with pytest.raises(UsageError, match="none of the 4 documents has a token with loss in its first 2"):
        open_data(tmp_path / "chats.jsonl", folder, eval_share=0, context=2)


def test_skipped_conversations_and_turns_are_said(tmp_path, folder):
    records = [chat("Hi"), chat("Hi", "I am"), chat("Hi", "I am", "how", "are"), chat("you")]
    path = write_lines(tmp_path / "chats.jsonl", records)
    data = open_data(path, make_folder(tmp_path / "thinking", chat_folders.THINKING), eval_share=0)
    assert data.facts["skipped"]["no_assistant_turn"] == 2 and data.facts["turns_without_loss"] == 1
    assert "skipped: 2 without an assistant turn" in data.describe()
    assert "1 of 3 assistant turns carry no loss" in data.describe()
    endless = open_data(path, make_folder(tmp_path / "endless", chat_folders.ENDLESS), eval_share=0)
    assert "3 of 3 assistant turns do not end with a special token" in endless.describe()


def test_the_split_keeps_copies_together_and_does_not_depend_on_the_order(tmp_path, folder):
    data = open_data(write_lines(tmp_path / "a.jsonl", CHATS), folder, eval_share=0.2)
    held = set(take_epoch(data, "eval"))
    more = [*reversed(CHATS), *CHATS, chat("new", "one")]
    other = open_data(write_lines(tmp_path / "b.jsonl", more), folder, eval_share=0.2)
    assert held <= set(take_epoch(other, "eval")) and not set(take_epoch(other)) & set(take_epoch(other, "eval"))


@given(st.lists(st.integers(0, 2**64 - 1), max_size=20), st.floats(0, 0.99))
def test_both_splits_have_documents(digests, share):
    held = hold_out(np.array(digests, np.uint64), share)
    if not share or len(set(digests)) < 2:
        assert not held.any()
    else:
        assert held.any() and not held.all()


def test_a_file_for_evaluation(tmp_path, folder):
    path = write_lines(tmp_path / "train.jsonl", CHATS[:30])
    data = open_data(path, folder, eval_path=write_lines(tmp_path / "eval.jsonl", CHATS[30:]))
    assert data.facts["documents"] == 40 and data.facts["eval_documents"] == 10
    assert data.eval_batches == -(-data.rows("eval") // 4)
    without = open_data(path, folder, eval_share=0)
    assert without.rows("eval") == 0 and without.eval_batches == 0
    with pytest.raises(UsageError, match="no data for evaluation"):
        without.batch(0, "eval")
    with pytest.raises(UsageError, match="no split 'test'; expected one of train, eval"):
        without.rows("test")


def test_all_kinds_of_files_give_the_same(tmp_path, folder):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    records = [chat("Hi there", "I am"), {**chat("how", "are", system="you"), "tools": None}]
    records[1]["messages"][0]["name"] = "boss"  # null in the other messages of the table
    lines = "".join(json.dumps(record) + "\n" for record in records)
    (tmp_path / "a.jsonl").write_text(lines)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    (tmp_path / "a.json").write_text(json.dumps(records))
    (tmp_path / "parts").mkdir()
    for number, record in enumerate(records):
        (tmp_path / "parts" / f"{number}.jsonl").write_text(json.dumps(record))
    parquet.write_table(pyarrow.Table.from_pylist(records), tmp_path / "a.parquet")
    batches = [
        open_data(tmp_path / name, folder, eval_share=0, batch=1).batch(0, "train")
        for name in ("a.jsonl", "a.jsonl.gz", "a.json", "parts", "a.parquet")
    ]
    assert all(torch.equal(batch[name], batches[0][name]) for batch in batches for name in batch)


def test_tokens_come_from_the_cache(tmp_path, folder, monkeypatch):
    path = write_lines(tmp_path / "chats.jsonl", CHATS)
    before = open_data(path, folder)
    with monkeypatch.context() as patch:
        patch.setattr(tokenized_examples, "_write", no_lines)
        after = open_data(path, folder, context=96)
        assert after.facts["tokens"] == before.facts["tokens"]
        with pytest.raises(TypeError):  # another template: encoded again
            open_data(path, make_folder(tmp_path / "other", chat_folders.LLAMA3))
    monkeypatch.setattr(tokenized_examples, "REPORT_EVERY_S", 0)
    lines = []
    write_lines(path, CHATS[:20])
    open_data(path, folder, notify=lines.append)
    assert re.fullmatch(r"encoding .*chats.jsonl: 20 documents, [\d,]+ tokens, 0 s", lines[0]), lines


USER, ASSISTANT = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "I am"}


@pytest.mark.parametrize(
    "content, expected",
    [
        ("", "chats.jsonl is empty"),
        ("\n\n", "chats.jsonl has no records; give a file with examples"),
        ("hello", "chats.jsonl line 1 is not JSON"),
        ("[1]", "chats.jsonl line 1 is list, not an object"),
        ('{"instruction": 1, "output": 2}', "line 1: its fields are instruction, output; give messages,"),
        ("{}", "line 1: it has no fields; give messages,"),
        ('{"prompt": "Hi"}', "line 1: its fields are prompt; give messages"),
        ('{"prompt": "Hi", "completion": []}', "line 1: prompt holds str and completion list; give two texts"),
        ('{"text": 1}', "line 1: text holds int; give text"),
        ('{"text": "  "}', "all 1 examples are empty; give some with text"),
        (
            '{"text": "a"}\n{"messages": []}',
            "line 2 has no 'text', which the first record has; its fields are messages",
        ),
        ('{"messages": []}', "line 1: messages holds an empty list; give a list such as"),
        ('{"messages": "Hi"}', "line 1: messages holds str; give a list such as"),
        ({"messages": ["Hi"]}, "line 1: messages, message 1 is str; give an object with role and content"),
        (
            {"messages": [USER, {"content": "a"}]},
            "line 1: messages, message 2 has no role; its fields are content: add",
        ),
        ({"messages": [USER, {"role": "assistant"}]}, "line 1: messages, message 2 has no content; give text"),
        ({"messages": [{**USER, "content": 1}]}, "message 1 has content of type int; give text"),
        ({"messages": [{**USER, "content": [{"type": "image"}]}]}, "message 1 has a part of type 'image'; only text"),
        ({"messages": [{**ASSISTANT, "weight": 0}]}, "message 1 has weight 0, which is not supported"),
        ({"conversations": [{"from": "me", "value": "a"}]}, "message 1 is from 'me'; expected one of human, user, gpt"),
        ({"messages": [USER, ASSISTANT], "tools": "{"}, "line 1: tools is a text that is not JSON"),
        ({"messages": [USER, ASSISTANT], "tools": 3}, "line 1: tools holds int; give a list of objects"),
        ({"messages": [USER]}, "none of the 1 conversations has an assistant turn to learn from; add the answers"),
        ({"messages": [ASSISTANT]}, "the chat template rewrites the assistant turns of all 1 conversations"),
        ('{"messages": ' + "[" * 1500 + "]" * 1500 + "}", "line 1"),
        ({"messages": [json.loads('{"a":' * 900 + "1" + "}" * 900)]}, "line 1"),
    ],
)
def test_wrong_files_are_refused_in_one_line(tmp_path, folder, content, expected):
    path = tmp_path / "chats.jsonl"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(UsageError) as caught:
        open_data(path, folder)
    assert expected in str(caught.value) and "\n" not in str(caught.value)


def test_wrong_paths_and_arguments_are_refused(tmp_path, folder):
    path = write_lines(tmp_path / "chats.jsonl", CHATS[:2])
    (tmp_path / "empty").mkdir()
    for wrong, expected in (
        (tmp_path / "none.jsonl", "No such file"),
        (tmp_path / "empty", "holds no .jsonl, .json or .parquet file"),
        (path.rename(tmp_path / "chats.csv"), "expected a .jsonl, .jsonl.gz, .json or .parquet file"),
    ):
        with pytest.raises(UsageError, match=expected):
            open_data(wrong, folder)
    (tmp_path / "pickled.jsonl").write_bytes(b"\x80\x04K\x01.")
    with pytest.raises(UsageError, match="is a Python pickle, not JSON lines"):
        open_data(tmp_path / "pickled.jsonl", folder)
    for options in ({"context": 1}, {"batch": 0}, {"eval_share": 1.0}, {"eval_share": -0.1}):
        with pytest.raises(UsageError, match=f"{next(iter(options))} .*: expected at least"):
            open_data(path, folder, **options)


contents = st.lists(st.text("ab \n日<|im_end>", max_size=12), min_size=2, max_size=5)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(contents, min_size=1, max_size=6))
def test_any_conversations_keep_their_tokens(tmp_path, folder, conversations):
    path = write_lines(tmp_path / "any.jsonl", [chat(*one) for one in conversations])
    data = open_data(path, folder, eval_share=0, context=256, batch=2)
    tokenizer = open_tokenizer(folder)
    expected = sorted(
        tuple(tokenizer.apply_chat_template(chat(*one)["messages"])["input_ids"]) for one in conversations
    )
    assert sorted(ids for ids, _ in take_epoch(data)) == expected


def open_tokenizer(folder):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder, local_files_only=True)


def test_a_packed_loss_is_that_of_the_documents_alone(tmp_path, folder):
    """With a transformers Llama in FP32, which separates documents by position_ids."""
    from transformers import LlamaConfig, LlamaForCausalLM

    data = open_data(write_lines(tmp_path / "chats.jsonl", CHATS), folder, eval_share=0)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=data.facts["largest_token"] + 1, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=2, max_position_embeddings=64, use_cache=False, initializer_range=0.2,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    batch = data.batch(0, "train")
    documents = [one for one in split_documents(batch) if any(label != -100 for label in one[1])]
    assert len(documents) > 8

    def run(**inputs):
        found = model(**inputs).loss
        model.zero_grad()
        found.backward()
        return found.item(), [parameter.grad.clone() for parameter in model.parameters()]

    packed, packed_grads = run(**batch, use_cache=False)
    total, count, grads = 0.0, 0, [torch.zeros_like(parameter) for parameter in model.parameters()]
    for ids, labels in documents:
        number = sum(label != -100 for label in labels)
        one, its_grads = run(input_ids=torch.tensor([ids]), labels=torch.tensor([labels]))
        total, count = total + one * number, count + number
        grads = [grad + own * number for grad, own in zip(grads, its_grads, strict=True)]
    assert packed == pytest.approx(total / count, abs=1e-5)
    for ours, theirs in zip(packed_grads, grads, strict=True):
        torch.testing.assert_close(ours, theirs / count, rtol=1e-4, atol=1e-5)
