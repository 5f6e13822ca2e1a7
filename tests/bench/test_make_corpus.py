"""Making the corpus: archives are read safely, the same bytes come out each time, and errors are one line."""

import errno
import gzip
import hashlib
import io
import json
import re
import stat
import subprocess
import tarfile
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
from bench.corpus import make, read, write
from bench.corpus.documents import read_package
from bench.corpus.download import download
from bench.corpus.errors import Failed
from bench.corpus.packages import PACKAGES, Package
from bench.corpus.progress import parse_count
from corpus_examples import ROOT, make_code, make_prose, write_deb, write_wheel

from narrowgauge.data import documents

SMALL_SHA256 = "3f8e704472cd028b98278bbf74d4cb10eb1d391fe67a36239e6939a7e18f542e"
"""The hash of the corpus of the fixture `small`: the same in each process, where Python's own hashes differ."""


def reasons(archive):
    """Read an archive. Return the paths of documents, and the counts of files that were dropped."""
    found, count = read_package(("test", archive))
    return [document.path for document in found], {key: value for key, value in count.items() if key != "files"}


@pytest.fixture
def small(tmp_path):
    """Two small archives with 120 documents, their packages, and a function that makes a corpus of them."""
    folder = tmp_path / "archives"
    folder.mkdir()
    prose = {f"usr/share/doc/a/{seed}.txt": make_prose(seed).encode() for seed in range(100)}
    prose["usr/share/doc/a/again.md"] = make_prose(3).encode()
    prose["usr/share/doc/a/nearly.rst"] = (make_prose(4) + "\n\nOne more sentence at the end.").encode()
    write_deb(folder / "a.deb", prose)
    write_wheel(folder / "b.whl", {f"b/{seed}.py": make_code(seed).encode() for seed in range(20)})
    packages = [
        Package(registry, name, "1.0", hashlib.sha256((folder / name).read_bytes()).hexdigest())
        for registry, name in (("deb", "a.deb"), ("pip", "b.whl"))
    ]
    return SimpleNamespace(
        packages=packages,
        archives=folder,
        arguments=lambda name: [str(tmp_path / name), "--archives", str(folder), "--jobs", "1"],
        make=lambda name, size=10_000_000, jobs=1: make.make(tmp_path / name, packages, size, folder, jobs),
    )


@pytest.fixture
def free_disk(monkeypatch):
    monkeypatch.setattr(make, "DISK_BYTES", 0)


def read_all(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def read_texts(folder, part):
    return [
        json.loads(line)["text"] for path in sorted(folder.glob(f"{part}*")) for line in path.read_text().splitlines()
    ]


def test_packages_are_pinned_and_name_no_address():
    assert len({package.name for package in PACKAGES}) == len(PACKAGES) > 50
    assert all(len(bytes.fromhex(package.sha256)) == 32 for package in PACKAGES)
    assert {package.registry for package in PACKAGES} == {"deb", "pip"}
    assert len(bytes.fromhex(make.EXPECTED_SHA256)) == 32
    for path in (ROOT / "bench" / "corpus").glob("*.py"):
        assert not re.search(r"\w://\w", path.read_text()), path
        assert len(path.read_text().splitlines()) <= 400, path


def test_list_needs_no_folder(capsys):
    assert make.main(["--list"]) == 0
    assert "dict-gcide" in capsys.readouterr().out


@pytest.mark.parametrize(("text", "value"), [("200MB", 200_000_000), ("40M", 40_000_000), ("1.5GB", 1_500_000_000)])
def test_sizes_are_parsed(text, value):
    assert parse_count(text) == value


def test_unsafe_members_are_refused_and_nothing_is_written(tmp_path):
    text = make_prose(1).encode()
    entries = []
    for name, kind in (("link.txt", tarfile.SYMTYPE), ("hard.txt", tarfile.LNKTYPE), ("device.txt", tarfile.CHRTYPE)):
        entry = tarfile.TarInfo(name)
        entry.type, entry.linkname = kind, "/etc/passwd"
        entries.append(entry)
    members = {"./good.txt": text, "../escape.txt": text, "/absolute.txt": text, "a/../../b.txt": text}
    archive = write_deb(tmp_path / "a.deb", members, entries)
    assert reasons(archive) == (["good.txt"], {"unsafe path": 3})
    assert list(tmp_path.iterdir()) == [archive]


def test_links_in_wheels_are_not_read(tmp_path):
    link = zipfile.ZipInfo("link.txt")
    link.external_attr = (stat.S_IFLNK | 0o777) << 16
    with zipfile.ZipFile(tmp_path / "a.whl", "w") as archive:
        archive.writestr(link, "/etc/passwd")
        archive.writestr("../escape.txt", make_prose(1))
        archive.writestr("good.txt", make_prose(2))
    assert reasons(tmp_path / "a.whl") == (["good.txt"], {"unsafe path": 1})


def test_huge_members_are_not_unpacked(tmp_path, monkeypatch):
    monkeypatch.setattr(read, "MEMBER_BYTES", 10_000)
    huge = b"a" * 1_000_000
    text = make_prose(1).encode()
    members = {"huge.txt": huge, "bomb.txt.gz": gzip.compress(huge), "good.txt": text}
    for archive in (write_deb(tmp_path / "a.deb", members), write_wheel(tmp_path / "a.whl", members)):
        assert reasons(archive) == (["good.txt"], {"too large": 2})
    monkeypatch.setattr(read, "ARCHIVE_BYTES", 3000)
    with pytest.raises(Failed, match="unpacks to more"):
        reasons(write_deb(tmp_path / "b.deb", {f"{n}.txt": text for n in range(9)}))


def test_archives_within_archives_are_read(tmp_path):
    inner = io.BytesIO()
    with tarfile.open(fileobj=inner, mode="w:gz") as archive:
        entry = tarfile.TarInfo("x/main.c")
        entry.size = len(make_code(1))
        archive.addfile(entry, io.BytesIO(make_code(1).encode()))
    deb = write_deb(tmp_path / "a.deb", {"usr/src/x.tar.gz": inner.getvalue()})
    assert reasons(deb) == (["x/main.c"], {})
    deeper = io.BytesIO()
    with tarfile.open(fileobj=deeper, mode="w:gz") as archive:
        entry = tarfile.TarInfo("x.tar.gz")
        entry.size = len(inner.getvalue())
        archive.addfile(entry, io.BytesIO(inner.getvalue()))
    assert reasons(write_deb(tmp_path / "b.deb", {"usr/src/y.tar.gz": deeper.getvalue()})) == ([], {})


def test_one_of_two_formats_is_read(tmp_path):
    text = make_prose(1)
    page = "<body>" + "".join(f"<p>{paragraph}</p>" for paragraph in text.split("\n\n")) + "</body>"
    members = {"doc/guide.html": page.encode(), "doc/guide.md.gz": gzip.compress(text.encode())}
    assert reasons(write_deb(tmp_path / "a.deb", members)) == (["doc/guide.html"], {"another format": 1})


@pytest.mark.parametrize("content", [b"", b"!<arch>\nodd", b"PK\x03\x04 odd", b"odd"])
def test_damaged_archives_are_reported_in_one_line(tmp_path, content):
    path = tmp_path / "x.deb"
    path.write_bytes(content)
    with pytest.raises(Failed, match=r"^x\.deb is damaged .*; delete it and start again$"):
        list(read.read_archive(path))


def test_truncated_package_is_reported(tmp_path):
    path = write_deb(tmp_path / "x.deb", {"a.txt": make_prose(1, 5000).encode()})
    path.write_bytes(path.read_bytes()[:-2000])
    with pytest.raises(Failed, match="is damaged"):
        list(read.read_archive(path))


@pytest.mark.usefixtures("free_disk")
def test_same_archives_give_same_bytes(small, tmp_path):
    about = small.make("one")
    assert about == small.make("two", jobs=2) == json.loads((tmp_path / "one/about.json").read_text())
    assert read_all(tmp_path / "one") == read_all(tmp_path / "two")
    assert about["sha256"] == SMALL_SHA256
    assert about["documents"] == 120
    assert about["sources"]["a.deb"]["dropped"] == {"equal document": 1, "near duplicate": 1}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["archives", "one", "two"]


@pytest.mark.usefixtures("free_disk")
def test_evaluation_part_is_disjoint_and_stays_the_same(small, tmp_path, monkeypatch):
    monkeypatch.setattr(write, "EVAL_EVERY", 5)
    about = small.make("all")
    train, held = (set(read_texts(tmp_path / "all", part)) for part in ("train", "eval"))
    assert not train & held and len(train) + len(held) == about["documents"] and 10 < len(held) < 40
    small.make("less", size=100_000)
    assert set(read_texts(tmp_path / "less", "train")) <= train
    assert set(read_texts(tmp_path / "less", "eval")) <= held


@pytest.mark.usefixtures("free_disk")
def test_size_limits_text_and_code(small, monkeypatch):
    monkeypatch.setattr(write, "SOURCE_SHARE", 1)
    about = small.make("small", size=100_000)
    assert 90_000 < about["bytes"] <= 100_000
    assert about["prose_share"] == pytest.approx(1 - write.CODE_SHARE, abs=0.03)
    monkeypatch.setattr(write, "SOURCE_SHARE", 0.2)
    limited = small.make("limited", size=100_000)["sources"]["a.deb"]
    assert limited["prose_bytes"] <= 20_000 and limited["dropped"]["beyond the share of a package"] > 10


@pytest.mark.usefixtures("free_disk")
def test_project_reads_the_corpus(small, tmp_path, monkeypatch):
    monkeypatch.setattr(write, "EVAL_EVERY", 5)
    small.make("corpus")
    found = documents.open_files(tmp_path / "corpus", None)
    parts = {Path(part.name).name: part for part in found.open()}
    assert {name: part.for_evaluation for name, part in parts.items()} == {"train-00.jsonl": False, "eval.jsonl": True}
    assert list(parts["eval.jsonl"].read()) == read_texts(tmp_path / "corpus", "eval")


@pytest.mark.usefixtures("free_disk")
@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit(143), OSError(errno.ENOSPC, "full")])
def test_interrupted_run_leaves_nothing(small, tmp_path, monkeypatch, capsys, error):
    calls = iter(range(60))

    def dumps(record, **options):
        if next(calls, None) is None:
            raise error
        return json.JSONEncoder(**options).encode(record)

    monkeypatch.setattr(write, "json", SimpleNamespace(dumps=dumps))
    monkeypatch.setattr(make, "PACKAGES", small.packages)
    arguments = small.arguments("new")
    if isinstance(error, SystemExit):
        with pytest.raises(SystemExit):
            make.main(arguments)
    else:
        assert make.main(arguments) != 0
        assert len(capsys.readouterr().err.splitlines()) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["archives"]


@pytest.mark.usefixtures("free_disk")
def test_hash_is_compared_with_the_expected_one(small, monkeypatch, capsys):
    monkeypatch.setattr(make, "PACKAGES", small.packages)
    assert make.main(small.arguments("one")) == 1
    assert f"differs from the expected one, {make.EXPECTED_SHA256}" in capsys.readouterr().out
    monkeypatch.setattr(make, "EXPECTED_SHA256", small.make("two")["sha256"])
    assert make.main(small.arguments("three")) == 0
    assert "the hash is the expected one" in capsys.readouterr().out
    assert make.main([*small.arguments("four"), "--size", "1MB"]) == 0
    assert "not compared" in capsys.readouterr().out


@pytest.mark.usefixtures("free_disk")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give the folder to make"),
        (["here"], "exists already; delete it"),
        (["new", "--size", "many"], "'many' is not a size such as 200MB"),
        (["new", "--jobs", "0"], "give 1 or more processes"),
        (["new", "--archives", "damaged"], "x.deb is damaged"),
        (["file/new"], "file"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    Path("here").mkdir()
    Path("file").touch()
    Path("damaged").mkdir()
    Path("damaged/x.deb").write_bytes(b"odd")
    package = Package("deb", "x", "1", hashlib.sha256(b"odd").hexdigest())
    monkeypatch.setattr(make, "PACKAGES", [package])
    try:
        code = make.main(arguments)
    except SystemExit as end:
        code = end.code
    *usage, line = capsys.readouterr().err.splitlines()
    assert code == 2 and message in line
    assert not usage or usage[0].startswith("usage: "), "argparse adds the usage"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["damaged", "file", "here"]


def test_small_disk_is_reported_before_the_download(small, monkeypatch):
    monkeypatch.setattr(make, "DISK_BYTES", 1 << 62)
    with pytest.raises(Failed, match="free space"):
        small.make("new")


def test_tool_errors_are_one_line_without_addresses(tmp_path, monkeypatch):
    package = Package("deb", "x", "1", "0" * 64)
    output = "W: odd\nE: Failed to fetch https://mirror.example/x.deb  Connection refused\nE: more\n"
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: SimpleNamespace(returncode=100, stdout="", stderr=output))
    with pytest.raises(Failed) as caught:
        download([package], tmp_path)
    assert "Connection refused" in str(caught.value) and "://" not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_tool_and_wrong_archive_are_reported(tmp_path, monkeypatch):
    def run(*_, **__):
        raise FileNotFoundError

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(Failed, match="apt-get is not installed"):
        download([Package("deb", "x", "1", "0" * 64)], tmp_path)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: SimpleNamespace(returncode=0, stderr=""))
    with pytest.raises(Failed, match="expected hash"):
        download([Package("pip", "x", "1", "0" * 64)], tmp_path)
    assert not list(tmp_path.iterdir())
