"""The packed corpus: equal bytes each time, read back as the same documents, and errors are one line."""

import importlib
import json
import lzma
import subprocess
import sys
import types

import numpy as np
import pytest
from bench.corpus import pack, read_corpus
from corpus_examples import ROOT, make_code, make_prose

from narrowgauge.data import tokens

VOCAB = 600
READER = ROOT / "bench" / "corpus" / "read_corpus.py"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """A folder with 60 documents for training and 10 for evaluation."""
    folder = tmp_path_factory.mktemp("corpus")
    for part, seeds in {"train-00": range(40), "train-01": range(40, 60), "eval": range(60, 70)}.items():
        with (folder / f"{part}.jsonl").open("w") as file:
            for seed in seeds:
                kind, text = ("code", make_code(seed)) if seed % 5 == 0 else ("prose", make_prose(seed))
                record = {"text": text, "source": f"package-{seed % 3}", "path": f"{seed}.txt", "kind": kind}
                file.write(json.dumps(record) + "\n")
    return folder


@pytest.fixture(scope="module", autouse=True)
def small_dictionary():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pack, "FILTERS", [{**pack.FILTERS[0], "dict_size": 1 << 20}])
        yield


@pytest.fixture(scope="module")
def content(corpus, tmp_path_factory):
    file = tmp_path_factory.mktemp("packed") / "a"
    assert pack.main([str(corpus), str(file), "--vocab", str(VOCAB), "--jobs", "1"]) == 0
    return file.read_bytes()


@pytest.fixture
def packed(content, tmp_path):
    (tmp_path / "a.packed").write_bytes(content)
    return tmp_path / "a.packed"


def read_texts(folder, part):
    lines = [line for path in sorted(folder.glob(f"{part}*")) for line in path.read_text().splitlines()]
    return [json.loads(line)["text"] for line in lines]


def test_same_corpus_gives_same_bytes(corpus, packed, tmp_path):
    pack.pack(corpus, tmp_path / "b.packed", 10**9, None, VOCAB, jobs=2)
    assert packed.read_bytes() == (tmp_path / "b.packed").read_bytes()


def test_documents_are_read_back(corpus, packed, tmp_path):
    header = read_corpus.unpack(packed, tmp_path / "tokens")
    assert sorted(path.name for path in (tmp_path / "tokens").iterdir()) == ["eval.bin", "tokenizer.json", "train.bin"]
    tokenizer = importlib.import_module("tokenizers").Tokenizer.from_file(str(tmp_path / "tokens/tokenizer.json"))
    for part in ("train", "eval"):
        found = np.fromfile(tmp_path / f"tokens/{part}.bin", "<u2")
        assert len(found) == header[f"{part}_tokens"] and found.max() < header["vocab"] == VOCAB
        ends = np.flatnonzero(found == tokenizer.token_to_id(read_corpus.END))
        pieces = np.split(found, ends + 1)[:-1]
        assert sorted(tokenizer.decode(piece[:-1].tolist()) for piece in pieces) == sorted(read_texts(corpus, part))


def test_project_reads_the_tokens(packed, tmp_path):
    header = read_corpus.unpack(packed, tmp_path / "tokens")
    data = tokens.open_tokens(tmp_path / "tokens", vocab=VOCAB, context=64)
    assert data.size("train") == header["train_tokens"] and data.size("eval") == header["eval_tokens"]


def test_reader_needs_only_numpy(packed, tmp_path):
    """In a process that can import numpy, and neither other packages nor the other files of the corpus."""
    code = (
        "import runpy, sys\n"
        "for name in ('tokenizers', 'torch', 'bench', 'narrowgauge'): sys.modules[name] = None\n"
        f"sys.argv = ['read_corpus.py', {str(packed)!r}, {str(tmp_path / 'tokens')!r}]\n"
        f"sys.path[0] = {str(READER.parent)!r}\n"
        "import os; os.sched_getaffinity = lambda process: {0}\n"
        f"runpy.run_path({str(READER)!r}, run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "tokens for training" in done.stdout and (tmp_path / "tokens/train.bin").is_file()


def test_several_processes_read_the_same(packed, tmp_path):
    read_corpus.unpack(packed, tmp_path / "one", jobs=1)
    read_corpus.unpack(packed, tmp_path / "two", jobs=2)
    for name in ("train.bin", "eval.bin", "tokenizer.json"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


@pytest.mark.parametrize(
    "text",
    [
        "", "Don't  stop: we'll\tsee\n\n    indented\n", "1234567 x12 3.14", "naïve café “quoted” 日本語 🙂",
        "a\u00a0b\u2003c\r\n", "=" * 50 + "aaaaaaa" + " " * 40,
        "trailing  ", "\n\n\n", "they'Re 's'll" + make_code(3) + make_prose(3),
    ],
)  # fmt: skip
def test_reader_encodes_as_the_library_does(packed, text):
    _, tokenizer, _ = read_corpus.read_packed(packed)
    library = importlib.import_module("tokenizers").Tokenizer.from_str(tokenizer)
    expected = [*library.encode(text, add_special_tokens=False).ids, library.token_to_id(read_corpus.END)]
    assert np.frombuffer(read_corpus.Encoder(tokenizer).encode(text), "<u2").tolist() == expected
    assert "".join(read_corpus.WORDS.findall(text)) == text


def test_text_of_the_end_token_stays_text(packed):
    _, tokenizer, _ = read_corpus.read_packed(packed)
    encoder = read_corpus.Encoder(tokenizer)
    found = np.frombuffer(encoder.encode(f"a{read_corpus.END}b"), "<u2")
    assert (found == np.frombuffer(encoder.end, "<u2")).tolist() == [False] * (len(found) - 1) + [True]


def test_first_documents_are_packed_up_to_a_number_of_tokens(corpus, tmp_path):
    pack.pack(corpus, tmp_path / "a", 10**9, 5000, VOCAB)
    header, _, parts = read_corpus.read_packed(tmp_path / "a")
    assert 5000 <= header["train_tokens"] < 6500
    assert sorted(parts["train"]) == sorted(read_texts(corpus, "train")[: header["train_documents"]])
    assert sorted(parts["eval"]) == sorted(read_texts(corpus, "eval"))


def test_limit_is_kept(corpus, packed, tmp_path, capsys):
    limit = packed.stat().st_size * 2 // 3
    pack.pack(corpus, tmp_path / "b", limit, None, VOCAB)
    assert "packing fewer" in capsys.readouterr().out
    assert 0.8 * limit < (tmp_path / "b").stat().st_size <= limit
    read_corpus.unpack(tmp_path / "b", tmp_path / "tokens")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--vocab", "100"], "uint16"),
        (["--vocab", "70000"], "uint16"),
        (["--vocab", "600", "--limit", "5kB"], "give a higher one"),
        (["--jobs", "0"], "1 or more processes"),
        (["--limit", "0"], "not a size"),
    ],
)
def test_bad_options_are_one_line_and_exit_code_2(corpus, tmp_path, capsys, options, message):
    try:
        code = pack.main([str(corpus), str(tmp_path / "new"), "--jobs", "1", *options])
    except SystemExit as end:
        code = end.code
    assert code == 2 and message in capsys.readouterr().err.splitlines()[-1]
    assert not list(tmp_path.iterdir())


def test_folder_without_a_corpus_is_refused(tmp_path, capsys):
    assert pack.main([str(tmp_path), str(tmp_path / "new")]) == 2
    assert capsys.readouterr().err.startswith(f"pack: {tmp_path} is not a corpus")
    (tmp_path / "train-00.jsonl").write_text('{"other": 1}\n')
    assert pack.main([str(tmp_path), str(tmp_path / "new")]) == 2
    assert "line 1 is not a document" in capsys.readouterr().err


def change_header(content, **changes):
    header, rest = lzma.decompress(content).split(b"\n", 1)
    return lzma.compress(json.dumps({**json.loads(header), **changes}).encode() + b"\n" + rest)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda whole: whole[:-1000], "damaged"),
        (lambda whole: b"odd", "damaged"),
        (lambda whole: lzma.compress(b"[1]\n{}\n"), "unknown format"),
        (lambda whole: change_header(whole, format="another"), "unknown format"),
        (lambda whole: change_header(whole, train_documents=3), "another number"),
        (lambda whole: change_header(whole, train_documents=None), "damaged"),
        (lambda whole: change_header(whole, sha256="0" * 64), "the tokens differ"),
        (lambda whole: lzma.compress(lzma.decompress(whole).replace(b'"merges"', b'"other"', 1)), "byte-pair encoding"),
        (None, "No such file"),
    ],
)
def test_damaged_files_are_one_line_and_leave_nothing(packed, tmp_path, monkeypatch, capsys, damage, message):
    if damage is None:
        packed.unlink()
    else:
        packed.write_bytes(damage(packed.read_bytes()))
    before = sorted(tmp_path.iterdir())
    one_core = types.SimpleNamespace(sched_getaffinity=lambda process: {0})
    monkeypatch.setattr(read_corpus, "os", one_core)
    monkeypatch.setattr(sys, "argv", ["read_corpus.py", str(packed), str(tmp_path / "tokens")])
    capsys.readouterr()
    assert read_corpus.main() == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("read_corpus: ") and message in line
    assert sorted(tmp_path.iterdir()) == before


def test_folder_that_exists_is_not_overwritten(packed, tmp_path):
    with pytest.raises(read_corpus.BadFile, match="exists already"):
        read_corpus.unpack(packed, tmp_path)
