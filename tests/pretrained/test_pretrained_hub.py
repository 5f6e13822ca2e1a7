"""Models on the Hub: what is downloaded and what never is, the cache, pinned commits, and errors in one line."""

import json
import shutil
import sys
from pathlib import Path

import hub_server
import pytest
import torch
from huggingface_hub import constants
from tiny_folders import SMALL, make_model

from narrowgauge import tasks
from narrowgauge.cli import main
from narrowgauge.errors import UsageError
from narrowgauge.pretrained import hub, open_folder
from narrowgauge.pretrained.hub import find_remote, get_short_name, pin
from narrowgauge.pretrained.hub_headers import outline_weights
from narrowgauge.pretrained.transformers_model import find_model

sys.path.append(str(Path(__file__).parents[1] / "data"))
from chat_folders import CHATML, chat, make_folder, write_lines

NAME = "tiny/llama"
NEVER = ("pytorch_model.bin", "modeling_tiny.py", "consolidated.safetensors", "original/params.json")
TRAIN = [
    "train", "--data", "chats.jsonl", "--recipe", "bf16-lean", "--device", "cpu", "--context", "32", "--batch", "1",
    "--log", "none", "--watch", "0", "--steps", "1",
]  # fmt: skip


@pytest.fixture(autouse=True)
def in_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NARROWGAUGE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))


@pytest.fixture
def server(monkeypatch):
    with hub_server.start(hub_server.Hub()) as running:
        use_endpoint(monkeypatch, running.url)
        yield running


def use_endpoint(monkeypatch, url):
    """As the environment variable HF_ENDPOINT does, which the library reads when it is imported."""
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")


def make_files(folder="source", seed=7, **settings):
    """Make the files of a repository: a model in shards, its tokenizer, and what must not be downloaded."""
    model = make_model(fields={**SMALL, "vocab_size": 384})
    with torch.no_grad():
        model.lm_head.weight.add_(seed)
    model.bfloat16().save_pretrained(folder, max_shard_size="40KB")
    made = make_folder(Path(folder), CHATML)
    for name in NEVER:
        (made / name).parent.mkdir(exist_ok=True)
        (made / name).write_bytes(b"raise SystemExit('this must never be read')")
    config = json.loads((made / "config.json").read_text())
    (made / "config.json").write_text(json.dumps(config | settings))
    return made


def refuse(spec, **options):
    with pytest.raises(UsageError) as caught:
        find_model(spec, {}, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_model_is_downloaded_once_and_trained(server, capsys):
    commit = server.push(NAME, make_files())
    write_lines(Path("chats.jsonl"), [chat(f"What is {n}?", "It is four.") for n in range(30)])
    assert main([*TRAIN, "--model", NAME, "--out", "run"]) == 0
    assert "downloading the weights of tiny/llama: 0." in capsys.readouterr().err
    asked = " ".join(server.requests)
    assert "model-00001-of" in asked and "tokenizer.json" in asked and not any(name in asked for name in NEVER)
    saved = json.loads(Path("run/run.json").read_text())
    assert saved["options"]["model"] == f"{NAME}@{commit}"
    assert get_short_name(saved["options"]["model"]) == "llama"

    server.push(NAME, make_files("newer", seed=9))
    assert pin(NAME) != f"{NAME}@{commit}"
    server.requests.clear()
    assert main(["train", "--resume", "run", "--device", "cpu"]) == 0  # of the commit, which is in the cache
    task = tasks.find("finetune", **{**saved["options"], "data": "chats.jsonl"})
    assert open_folder(task.model.found.weights).path.name == commit and task.name == "llama"
    assert main(["export", "run", "--format", "hf", "--out", "exported"]) == 0
    assert server.requests == [] and Path("exported/tokenizer.json").exists()


def test_memory_reads_headers_and_downloads_no_weights(server, capsys):
    server.push(NAME, source := make_files())
    command = ["memory", "--gpu", "h200", "--recipes", "bf16-lean", "--batch", "1", "--context", "16", "--no-search"]
    predicted = []
    for spec in (NAME, str(source)):
        assert main([*command, "--model", spec, "--json"]) == 0
        predicted.append(json.loads(capsys.readouterr().out)["recipes"])
    assert predicted[0] == predicted[1]
    remote = find_remote(NAME, NAME)
    assert not list(remote.folder.glob("*.safetensors"))
    outline = outline_weights(remote)
    for own, real in zip(open_folder(outline).tensors.values(), open_folder(source).tensors.values(), strict=True):
        assert (own.name, own.shape, own.dtype) == (real.name, real.shape, real.dtype)
    remote.fetch_weights()
    assert outline_weights(remote) == remote.folder  # the real files, once they are there


def test_code_and_pickles_are_refused_before_weights_are_downloaded(server):
    server.push("tiny/code", make_files(auto_map={"AutoModelForCausalLM": "modeling_tiny.TinyModel"}))
    assert "never run" in refuse("tiny/code")
    assert not any(".safetensors" in asked and "index" not in asked for asked in server.requests)
    pickled = make_files("pickled")
    for path in [*pickled.glob("model*.safetensors"), pickled / "model.safetensors.index.json"]:
        path.unlink()
    server.push("tiny/pickled", pickled)
    assert "has no model.safetensors on the Hub" in refuse("tiny/pickled")
    assert not any(name in " ".join(server.requests) for name in NEVER)


def test_errors_say_what_was_tried_and_what_to_do(server, monkeypatch):
    server.push(NAME, make_files())
    assert f"the Hub ({server.url}) has no model tiny/nothing; check the name" in refuse("tiny/nothing")
    assert f"accept them at {server.url}/tiny/gated, and log in" in refuse(hub_server.GATED)
    assert "has no revision v2 of tiny/llama" in refuse(f"{NAME}@v2")
    assert "ORG/NAME on the Hub" in refuse("nowhere")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    line = refuse(NAME)
    assert "HF_HUB_OFFLINE is set: unset it, or run 'hf download tiny/llama'" in line
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    use_endpoint(monkeypatch, "http://hub.invalid")
    assert "The Hub (http://hub.invalid) cannot be reached: check the network" in refuse(f"{NAME}@main")


@pytest.mark.parametrize("offline", [True, False])
def test_without_a_network_the_cache_is_used(offline, tmp_path, monkeypatch):
    """Also one that another tool has filled, and that has no list of the repository's files."""
    commit = hub_server.make_commit(1)
    snapshots = tmp_path / "hub" / "models--tiny--llama"
    (snapshots / "refs").mkdir(parents=True)
    (snapshots / "refs" / "main").write_text(commit)
    shutil.copytree(make_files(), snapshots / "snapshots" / commit, ignore=shutil.ignore_patterns(*NEVER, "original"))
    use_endpoint(monkeypatch, "http://hub.invalid")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
    found = find_model(NAME, {})
    assert found.weights == snapshots / "snapshots" / commit and pin(NAME) == f"{NAME}@{commit}"
    (found.weights / "model-00001-of-00003.safetensors").unlink()
    assert "not complete in the Hub's cache" in refuse(NAME)


def test_a_folder_comes_before_the_hub(monkeypatch):
    monkeypatch.setattr(hub, "_download", lambda *_: pytest.fail("the Hub was asked"))
    Path("tiny").mkdir()
    folder = make_files(NAME)
    assert find_model(NAME, {}).weights == folder and pin(NAME) == str(folder.resolve())
    for spec in ("./tiny/nothing", "../x", "/a/b", "~/a", "a/b/c", "gpt2", "a.py:Model", "a/b@", "a/../b"):
        assert find_remote(spec, spec) is None
    assert get_short_name(NAME) == get_short_name(f"{folder.resolve()}/") == "llama"
