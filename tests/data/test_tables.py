"""Texts from JSON arrays and CSV: which are read, for any file size, and what is refused."""

import csv
import gzip
import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from narrowgauge.data import documents, sources, tables
from narrowgauge.errors import UsageError

TEXTS = ["one", "größer ≠ 🚂", "", 'quote "here", and ] there', "three\nlines\r\n"]


def texts(path, field=None):
    return [text for part in documents.open_files(path, field).open() for text in part.read()]


def refusal(path, field=None):
    with pytest.raises(UsageError) as caught:
        texts(path, field)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def write(path, text):
    data = text.encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


@pytest.mark.parametrize("name", ["x.json", "x.json.gz", "X.JSON"])
@pytest.mark.parametrize("indent", [None, 1])
def test_json_arrays_are_read(tmp_path, name, indent):
    rows = [{"id": n, "content": text} for n, text in enumerate(TEXTS)]
    assert texts(write(tmp_path / name, json.dumps(rows, indent=indent))) == TEXTS
    assert texts(write(tmp_path / name, "﻿ \n" + json.dumps(TEXTS, indent=indent) + "\n")) == TEXTS
    assert texts(write(tmp_path / name, "\n".join(map(json.dumps, rows)))) == TEXTS  # JSON lines under that name
    assert texts(write(tmp_path / name, "[ ]")) == []


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60, deadline=None)
@given(
    found=st.lists(st.text(st.characters(exclude_categories=["Cs"])), max_size=6),
    chunk=st.integers(1, 40),
    indent=st.sampled_from([None, 2]),
)
def test_arrays_do_not_depend_on_the_chunk_size(tmp_path, monkeypatch, found, chunk, indent):
    path = tmp_path / "x.json"
    path.write_text(json.dumps([{"text": text} for text in found], indent=indent), encoding="utf-8")
    monkeypatch.setattr(tables, "CHUNK", chunk)
    assert list(tables.read_array(path, None)) == found


@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
@pytest.mark.parametrize("name", ["x.csv", "x.tsv", "x.csv.gz"])
def test_tables_are_read(tmp_path, delimiter, name):
    path = tmp_path / "plain"
    with path.open("w", newline="", encoding="utf-8-sig") as file:
        rows = csv.writer(file, delimiter=delimiter)
        rows.writerow(["id", "text", "other"])
        rows.writerows([n, text, text[::-1]] for n, text in enumerate(TEXTS))
    data = path.read_bytes()
    path = tmp_path / name
    path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    assert texts(path) == TEXTS
    assert texts(path, "other") == [text[::-1] for text in TEXTS]


def test_a_long_cell_is_read_whole(tmp_path):
    long = "word " * 100_000
    assert texts(write(tmp_path / "x.csv", f"text,n\n{long},1\n")) == [long]


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("x.json", '{\n "data": [1]\n}', "neither an array nor one object per line"),
        ("x.json", '{"data": [{"text": "a"}]}', "its fields are data"),
        ("x.json", "[1, 2]", "item 1 is int, not an object"),
        ("x.json", '["a", ["b"]]', "item 2 is list, not an object"),
        ("x.json", '["a", "b"', "item 3 is not JSON (it ends within the array); the file is truncated"),
        ("x.json", '["a", "b', "item 2 is not JSON"),
        ("x.json", '["a"] trailing', "has more text after its array"),
        ("x.json", "[" * 100_000, "is nested too deeply"),
        ("x.json", '[{"body": "a"}]', "item 1 has no field 'text' or 'content'; its fields are body"),
        ("x.csv", "id,label\n1,2\n", "its fields are id, label"),
        ("x.csv", "just a letter\nwith lines\n", "its fields are just a letter"),
        ("x.json", "", "is empty"),
        ("x.csv", "", "is empty"),
    ],
)
def test_other_structures_are_refused(tmp_path, name, text, says):
    assert says in refusal(write(tmp_path / name, text))


def test_files_of_another_type_are_refused(tmp_path):
    for name in ("x.json", "x.csv"):
        (tmp_path / name).write_bytes(b"\xff\xfe[\x00")
        assert "is not UTF-8" in refusal(tmp_path / name)
        (tmp_path / name).write_bytes(b"PAR1" + bytes(20))
        assert "is a Parquet file, not" in refusal(tmp_path / name)
    (tmp_path / "x.csv.gz").write_bytes(gzip.compress(b"text\n" + b"abc\n" * 5000)[:-9])
    assert "truncated or damaged" in refusal(tmp_path / "x.csv.gz")


def test_a_folder_of_tables_is_documents_and_source_code_is_text(tmp_path, capsys):
    data = tmp_path / "data"
    data.mkdir()
    write(data / "train.json", json.dumps(["train " * 50]))
    write(data / "val.csv", "text\n" + "evaluation " * 30)
    assert sources.kind_of(str(data)) == "documents" and len(texts(data)) == 2
    (data / "notes.md").write_text("hello " * 100)
    assert sources.kind_of(str(data)) == "text"
    sources.open_source(str(data), vocab=256, context=16)
    assert "2 JSON files and tables among the texts are read as plain text" in capsys.readouterr().err


@pytest.mark.parametrize("text", [f"document number {n} " * 400 for n in range(8)], ids=range(8))
@pytest.mark.parametrize("name", ["x.jsonl", "x.json"])
def test_a_single_long_document_is_split(tmp_path, name, text):
    """By its hash a single document would be in one split as a whole, sometimes in evaluation."""
    path = write(tmp_path / name, json.dumps({"text": text}))
    source = sources.open_source(str(path), vocab=256, context=64)
    train, evaluation = source.data.size("train"), source.data.size("eval")
    assert train > 4 * evaluation > 4 * 64 and train + evaluation == len(text) + 2
    joined = bytes(source.data.shards["train"][0]) + bytes(source.data.shards["eval"][0])
    assert joined == text.encode() + b"\n\n"
