"""Finding a task by name: all names, the options each takes, and the errors for unknown ones."""

import subprocess
import sys

import pytest

from narrowgauge import tasks
from narrowgauge.errors import UsageError


def refusal(spec, **options):
    with pytest.raises(UsageError) as caught:
        tasks.find(spec, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("name", [name for name, _ in tasks.names() if ":" not in name])
def test_every_name_is_a_task(name):
    task = tasks.find(name)
    assert task.name == name
    assert task.items_per_batch > 0
    assert task.synthetic is not None


@pytest.mark.parametrize(
    ("name", "millions", "tokens", "vocab"),
    [
        ("gpt-tiny", 10.8, 8 * 128, 256),
        ("gpt2-124m", 124.4, 64 * 1024, 50257),
        ("gpt2-350m", 354.6, 32 * 1024, 50257),
        ("gpt-1.3b", 1315.3, 16 * 2048, 50257),
        ("gpt:8x4096", 1825.1, 8 * 2048, 50257),
        ("llama-1b", 1104.2, 16 * 2048, 32000),
        ("llama-7b", 6738.4, 8 * 2048, 32000),
        ("moe-tiny", 3.5, 8 * 128, 256),
        ("moe:4x128x8", 3.5, 8 * 128, 256),
        ("moe:8x1024x16", 942.0, 32 * 1024, 50257),
        ("olmoe-1b-7b", 6919.1, 8 * 2048, 50304),
    ],
)
def test_named_sizes(name, millions, tokens, vocab):
    task = tasks.find(name)
    assert task.facts["parameters"] / 1e6 == pytest.approx(millions, abs=0.06)
    assert task.items_per_batch == tokens
    assert task.facts["vocab"] == vocab


@pytest.mark.parametrize(("spec", "heads"), [("gpt:2x64", 1), ("gpt:3x1024", 16), ("gpt:8x4096", 32)])
def test_heads_follow_the_width(spec, heads):
    assert tasks.find(spec).facts["heads"] == heads


@pytest.mark.parametrize(("spec", "shared"), [("moe:2x64x4", 0), ("moe:2x64x4+1", 1), ("moe:2x64x4+2", 2)])
def test_a_mixture_of_any_size(spec, shared):
    facts = tasks.find(spec).facts
    assert (facts["layers"], facts["width"], facts["experts"]) == (2, 64, 4)
    assert (facts["experts_per_token"], facts["shared_experts"]) == (2, shared)
    one = 3 * 64 * 128 * 2  # an expert of two layers
    assert facts["parameters"] - facts["active_parameters"] == 2 * one
    assert facts["parameters"] == tasks.find("moe:2x64x4").facts["parameters"] + shared * one


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("gpt:0x64", "at least 1 layer"),
        ("gpt:2x100", "try gpt:2x128"),
        ("gpt:2x32", "try gpt:2x64"),
        ("gpt:2x4000", "multiple of 128"),
        ("gpt:2", "LAYERSxWIDTH"),
        ("gpt:axb", "LAYERSxWIDTH"),
        ("gpt:-1x64", "LAYERSxWIDTH"),
        ("moe:2x64", "moe:LAYERSxWIDTHxEXPERTS"),
        ("moe:2x64x4+x", "moe:LAYERSxWIDTHxEXPERTS"),
        ("moe:2x64x1", "at least 2 experts"),
        ("moe:0x64x4", "moe:0x64x4: expected at least 1 layer"),
        ("moe:2x100x4", "try moe:2x128"),
        ("gpt2-124", "did you mean gpt2-124m?"),
        ("GPT-tiny", "did you mean gpt-tiny?"),
        ("zzz", "The tasks are gpt-tiny, gpt2-124m"),
        ("", "The tasks are gpt-tiny"),
        ("missing.py:task", "no file"),
    ],
)
def test_an_unknown_task_is_refused_with_advice(spec, words):
    assert words in refusal(spec)


@pytest.mark.parametrize(
    ("spec", "options", "words"),
    [
        ("gpt-tiny", {"batch": 0}, "--batch 0"),
        ("gpt-tiny", {"context": -5}, "--context -5"),
        ("gpt-tiny", {"vocab": 0}, "--vocab 0"),
        ("gpt-tiny", {"vocab": 100}, "text takes 256"),
        ("gpt-tiny", {"data": "/no/such/file.bin"}, "no file or folder"),
        ("gpt-tiny", {"data": "/tmp", "packages": True}, "either"),
        ("gpt-tiny", {"colour": 1}, "takes no --colour"),
        ("digits", {"batch": 0}, "at least 1"),
        ("digits", {"context": 64}, "takes no --context"),
    ],
)
def test_bad_options_are_refused(spec, options, words):
    assert words in refusal(spec, **options)


def test_an_option_of_none_is_ignored():
    assert tasks.find("digits", context=None, data=None, batch=None).items_per_batch == 64


def test_a_users_task_is_found(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        "from narrowgauge import Task\ndef make(batch=3):\n"
        "    return Task(model=None, batch=None, loss=None, items_per_batch=batch)\n"
    )
    assert tasks.find(f"{path}:make").items_per_batch == 3
    assert tasks.find(f"{path}:make", batch=5).items_per_batch == 5


def test_the_default_task_depends_on_the_device():
    assert tasks.default("cpu") == "gpt-tiny"
    assert tasks.default("cuda") == "gpt2-124m"
    assert {"gpt-tiny", "gpt2-124m"} <= {name for name, _ in tasks.names()}


def test_names_are_listed_without_torch():
    code = "import sys; from narrowgauge import tasks; tasks.names(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
