"""Hugging Face's datasets: saved, in a folder, by name, streamed; and one-line errors if they cannot be read."""

import os
import subprocess
import sys

import pytest

from narrowgauge.data import hub, pack
from narrowgauge.data.documents import Documents
from narrowgauge.data.tokenizer import Bytes
from narrowgauge.errors import UsageError

datasets = pytest.importorskip("datasets")
MANY = [f"document {number} says {number * number}" for number in range(400)]


def texts(found):
    return [(text, part.for_evaluation) for part in found.open() for text in part.read()]


def refusal(found):
    with pytest.raises(UsageError) as caught:
        texts(found)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_saved_dataset_is_read(tmp_path):
    whole = datasets.Dataset.from_dict({"id": list(range(400)), "content": MANY})
    whole.select(range(399, -1, -2)).save_to_disk(str(tmp_path / "d"))
    assert hub.is_saved(tmp_path / "d") and not hub.is_saved(tmp_path)
    assert texts(hub.open_saved(tmp_path / "d", None)) == [(text, False) for text in MANY[::-1][::2]]


def test_saved_splits_keep_their_names(tmp_path):
    parts = {"train": MANY[:300], "validation": MANY[300:]}
    datasets.DatasetDict({k: datasets.Dataset.from_dict({"text": v}) for k, v in parts.items()}).save_to_disk(
        str(tmp_path / "d")
    )
    packed = pack.pack(hub.open_saved(tmp_path / "d", None), Bytes(), context=16)
    assert packed.facts["split"] == "by name" and packed.facts["eval_documents"] == 100
    assert packed.train.tobytes().decode().startswith(MANY[0] + "\n\n" + MANY[1])


def test_a_missing_column_error_lists_the_columns(tmp_path):
    datasets.Dataset.from_dict({"prompt": ["a"], "n": [3]}).save_to_disk(str(tmp_path / "d"))
    assert "its fields are prompt, n" in refusal(hub.open_saved(tmp_path / "d", None))
    assert "field 'n' holds int" in refusal(hub.open_saved(tmp_path / "d", "n"))
    assert texts(hub.open_saved(tmp_path / "d", "prompt")) == [("a", False)]


def test_a_damaged_dataset_is_a_one_line_error(tmp_path):
    datasets.Dataset.from_dict({"text": MANY}).save_to_disk(str(tmp_path / "d"))
    arrow = next((tmp_path / "d").glob("*.arrow"))
    arrow.write_bytes(arrow.read_bytes()[:100])
    assert "save_to_disk" in refusal(hub.open_saved(tmp_path / "d", None))
    (tmp_path / "d" / "state.json").write_text("{")
    assert "cannot be read as a dataset" in refusal(hub.open_saved(tmp_path / "d", None))


def test_hf_folder_is_read_by_load_dataset(tmp_path):
    folder = tmp_path / "stories"
    folder.mkdir()
    (folder / "train.csv").write_text("text,n\n" + "".join(f"{text},1\n" for text in MANY[:50]))
    (folder / "test.csv").write_text("text,n\nheld back,1\n")
    found = texts(hub.open_named(f"hf:{folder}", None))
    assert found == [(text, False) for text in MANY[:50]] + [("held back", True)]
    assert texts(hub.open_named(f"hf:{folder}@test", None)) == [("held back", False)]
    assert "cannot be loaded" in refusal(hub.open_named(f"hf:{folder}@nothing", None))


def test_a_stream_is_read_up_to_max_tokens_and_cached():
    taken = []

    def rows():
        for number in range(10**9):
            taken.append(number)
            yield {"id": number, "text": f"document {number} says {number * number}"}

    stream = datasets.IterableDataset.from_generator(rows)
    found = Documents("hf:stream", "stream", lambda: hub.list_parts(stream, None, "hf:stream"))
    packed = pack.pack(found, Bytes(), context=16, max_tokens=20_000)
    assert 20_000 <= len(packed.train) < 20_100
    assert len(taken) < 10_000
    offline = Documents("hf:stream", "stream", lambda: pytest.fail("asked again"))
    assert pack.pack(offline, Bytes(), context=16, max_tokens=20_000).train.tobytes() == packed.train.tobytes()


def test_streams_with_splits_and_other_fields():
    def rows(name):
        yield {"body": f"of {name}"}

    streams = datasets.IterableDatasetDict(
        {
            name: datasets.IterableDataset.from_generator(rows, gen_kwargs={"name": name})
            for name in ("train", "validation")
        }
    )
    found = Documents("s", "s", lambda: hub.list_parts(streams, "body", "s"))
    assert texts(found) == [("of train", False), ("of validation", True)]
    assert "its fields are body" in refusal(Documents("s", "s", lambda: hub.list_parts(streams, None, "s")))


def test_a_failing_stream_is_a_one_line_error():
    def rows():
        yield {"text": "a"}
        raise ConnectionError("the cable\nwas cut")

    stream = datasets.IterableDataset.from_generator(rows)
    message = refusal(Documents("s", "s", lambda: hub.list_parts(stream, None, "hf:some/thing")))
    assert "hf:some/thing" in message and "the cable was cut" in message


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("hf:roneneldan/TinyStories", ("roneneldan/TinyStories", None, None)),
        ("hf:wikitext:wikitext-103-raw-v1", ("wikitext", "wikitext-103-raw-v1", None)),
        ("hf:a/b:c@train[:1%]", ("a/b", "c", "train[:1%]")),
    ],
)
def test_names_are_parsed(spec, expected):
    name = hub.parse(spec)
    assert (name.dataset, name.configuration, name.split) == expected


@pytest.mark.parametrize("spec", ["hf:", "hf:a@", "hf:a:", "hf:@train"])
def test_an_incomplete_name_is_refused(spec):
    with pytest.raises(UsageError, match=r"hf:NAME\[:CONFIG\]\[@SPLIT\]"):
        hub.parse(spec)


OFFLINE = """
from narrowgauge.data import hub, pack
from narrowgauge.data.tokenizer import Bytes
from narrowgauge.errors import UsageError
try:
    pack.pack(hub.open_named("hf:no-owner/no-dataset", None), Bytes(), 16, 100)
except UsageError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"HF_ENDPOINT": "https://no-such-host.invalid"}, "the Hugging Face Hub cannot be reached"),
        ({"HF_HUB_OFFLINE": "1"}, "hf:no-owner/no-dataset cannot be loaded"),
    ],
)
def test_without_a_network_a_one_line_error_comes_quickly(environment, words):
    proxies = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")
    clean = {name: value for name, value in os.environ.items() if name.lower() not in proxies}
    done = subprocess.run(
        [sys.executable, "-c", OFFLINE], env=clean | environment, capture_output=True, text=True, timeout=60, check=True
    )
    assert words in done.stdout and len(done.stdout.splitlines()) == 1


def test_a_missing_package_is_a_one_line_error(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert "needs the package datasets" in refusal(hub.open_named("hf:a/b", None))
    assert "needs the package datasets" in refusal(hub.open_saved(tmp_path, None))
