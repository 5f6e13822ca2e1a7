"""Documents from JSON lines and Parquet: which texts are read, and the errors for invalid files."""

import gzip
import json
import sys

import pytest

from narrowgauge.data import documents
from narrowgauge.errors import UsageError

TEXTS = ["one", "größer ≠ 🚂", "", "three\nlines\n"]


def write_jsonl(path, records):
    data = "".join(json.dumps(record) + "\n" for record in records).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def write_parquet(path, columns):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table(columns), path)
    return path


def texts(path, field=None):
    return [text for part in documents.open_files(path, field).open() for text in part.read()]


def refusal(path, field=None):
    with pytest.raises(UsageError) as caught:
        texts(path, field)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("name", ["x.jsonl", "x.jsonl.gz", "X.JSONL"])
@pytest.mark.parametrize("field", ["text", "content"])
def test_the_usual_fields_of_json_lines_are_found(tmp_path, name, field):
    path = write_jsonl(tmp_path / name, [{"id": 1, field: text} for text in TEXTS])
    assert texts(path) == TEXTS


def test_the_named_field_is_first_then_text_then_content(tmp_path):
    path = write_jsonl(tmp_path / "x.jsonl", [{"content": "c", "text": "t", "body": "b"}, {"text": None, "body": "d"}])
    assert texts(path) == ["t", ""]
    assert texts(path, "body") == ["b", "d"]


def test_json_is_the_same_with_and_without_orjson(tmp_path, monkeypatch):
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "a", "score": NaN}\n\n  \n{"text": "\\ud800b"}\r\n{"text": "last"}')
    found = texts(path)
    assert found == ["a", "\ud800b", "last"]
    monkeypatch.setattr(documents, "orjson", None)
    assert texts(path) == found


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is empty"),
        (b'{"text": "a"}\n{"text": "b', "line 2 is not JSON"),
        (b"plain text\n", "line 1 is not JSON"),
        (b'{"text": "\xff\xfe"}\n', "line 1 is not JSON"),
        (b'\n["a", "b"]\n', "line 2 is list, not an object"),
        (b'{"prompt": "a", "answer": "b"}\n', "its fields are prompt, answer: name the field with the text by --field"),
        (b"{}\n", "it has no fields"),
        (b'{"text": "a"}\n{"body": "b"}\n', "line 2 has no field 'text'; its fields are body"),
        (b'{"text": ["a"]}\n', "field 'text' holds list, not text"),
        (b"\x1f\x8b\x08" + bytes(20), "is a gzip archive, not JSON lines"),
        (b"PAR1" + bytes(20), "is a Parquet file, not JSON lines"),
        (bytes(range(256)), "line 1 is not JSON"),
    ],
)
def test_invalid_json_lines_are_one_line_errors(tmp_path, content, words):
    path = tmp_path / "x.jsonl"
    path.write_bytes(content)
    message = refusal(path)
    assert words in message
    assert str(path) in message


def test_an_endless_line_is_not_read_into_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "LINE_BYTES", 1 << 20)
    (tmp_path / "x.jsonl").write_bytes(b'{"text": "' + b"a" * (1 << 21))
    assert "longer than 1 MB" in refusal(tmp_path / "x.jsonl")


def test_a_truncated_or_damaged_archive_is_refused(tmp_path):
    path = write_jsonl(tmp_path / "x.jsonl.gz", [{"text": f"{n} {n * n}"} for n in range(2000)])
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    assert "truncated or damaged" in refusal(path)
    path.write_bytes(whole[:500] + bytes(200) + whole[700:])
    refusal(path)
    path.write_bytes(b'{"text": "not packed"}\n')
    assert "damaged or not a gzip archive" in refusal(path)


@pytest.mark.parametrize("field", ["text", "content"])
def test_a_parquet_column_is_read(tmp_path, field):
    path = write_parquet(tmp_path / "x.parquet", {"id": [1, 2, 3, 4], field: ["one", None, "three", ""]})
    assert texts(path) == ["one", "", "three", ""]


def test_parquet_large_strings_and_dictionaries_are_read(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    large = pyarrow.array(["a", "b"], pyarrow.large_string())
    assert texts(write_parquet(tmp_path / "x.parquet", {"text": large})) == ["a", "b"]
    assert texts(write_parquet(tmp_path / "y.parquet", {"text": pyarrow.array(["a", "b"]).dictionary_encode()})) == [
        "a",
        "b",
    ]


def test_a_missing_parquet_column_error_lists_the_columns(tmp_path):
    path = write_parquet(tmp_path / "x.parquet", {"story": ["a"], "n": [1]})
    assert "its fields are story, n" in refusal(path)
    assert texts(path, "story") == ["a"]
    assert "column 'n' holds int64, not text" in refusal(path, "n")
    assert "no field 'other'" in refusal(path, "other")


def test_every_truncation_of_a_parquet_file_is_refused(tmp_path):
    path = write_parquet(tmp_path / "x.parquet", {"text": [f"{n}" * 9 for n in range(100)]})
    whole = path.read_bytes()
    for size in (0, 3, 4, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        refusal(path)
    path.write_bytes(whole[:8] + b"\xff" * 200 + whole[208:])
    assert "damaged" in refusal(path)
    path.write_bytes(b'{"text": "a"}\n')
    assert "damaged or not a Parquet file" in refusal(path)


def test_parquet_without_pyarrow_is_a_one_line_error(tmp_path, monkeypatch):
    path = write_parquet(tmp_path / "x.parquet", {"text": ["a"]})
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert "needs the package pyarrow" in refusal(path)


def test_a_folder_is_read_in_order_and_split_by_names(tmp_path):
    (tmp_path / "validation").mkdir()
    (tmp_path / ".hidden").mkdir()
    write_jsonl(tmp_path / "b.jsonl", [{"text": "b"}])
    write_parquet(tmp_path / "a.parquet", {"content": ["a"]})
    write_jsonl(tmp_path / "validation" / "0.jsonl.gz", [{"text": "v"}])
    write_jsonl(tmp_path / ".hidden" / "c.jsonl", [{"text": "hidden"}])
    (tmp_path / "README.md").write_text("left out")
    parts = documents.open_files(tmp_path, None).open()
    assert [(next(part.read()), part.for_evaluation) for part in parts] == [("a", False), ("b", False), ("v", True)]


def test_parent_folders_do_not_decide_the_split(tmp_path):
    folder = tmp_path / "test" / "data"
    folder.mkdir(parents=True)
    write_jsonl(folder / "x.jsonl", [{"text": "a"}])
    assert not documents.open_files(folder, None).open()[0].for_evaluation


def test_the_key_depends_on_content_and_field(tmp_path):
    path = write_jsonl(tmp_path / "x.jsonl", [{"text": "a"}])
    before = documents.open_files(path, None).key
    assert documents.open_files(path, None).key == before
    assert documents.open_files(path, "text").key != before
    write_jsonl(path, [{"text": "a"}, {"text": "b"}])
    assert documents.open_files(path, None).key != before
