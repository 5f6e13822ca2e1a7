"""The text of ``--lora`` and the folders of adapters: what is accepted, and what is refused in one line."""

import json

import pytest

from narrowgauge.errors import UsageError
from narrowgauge.hardware import detect
from narrowgauge.pretrained.lora_options import names_folder, parse_lora, resolve_lora, restore_lora, set_frozen

PLAIN = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}


def test_defaults():
    config = parse_lora("rank=8").config
    assert (config["r"], config["lora_alpha"], config["target_modules"]) == (8, 16, "all-linear")
    assert (config["lora_dropout"], config["use_rslora"], config["init_lora_weights"]) == (0.0, False, True)
    assert parse_lora("alpha=32").rank == 16


def test_all_options():
    text = " rank=4, alpha=2.5,targets=v_proj+mlp.up_proj, dropout=0.05,rslora=True,init=gaussian"
    assert parse_lora(text).config == {
        "r": 4, "lora_alpha": 2.5, "target_modules": ["mlp.up_proj", "v_proj"], "lora_dropout": 0.05,
        "use_rslora": True, "init_lora_weights": "gaussian",
    }  # fmt: skip
    assert resolve_lora("rank=4, alpha=2") == "rank=4,alpha=2"
    assert names_folder("adapters/one") and not names_folder("rank=4")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("rank=1.5", "rank=1.5 must be a whole number from 1 to 65,536"),
        ("rank=-1", "rank=-1 must be"),
        ("rank=99999999", "rank=99999999 must be"),
        ("rank=", "'rank=' should read name=value"),
        ("rank=4,", "'' should read name=value"),
        ("rank=4,rank=4", "rank is given twice"),
        ("r=4", "there is no 'r'; the options are rank, alpha, targets, dropout, rslora, init"),
        ("alpha=0", "alpha=0 must be a positive number"),
        ("alpha=nan", "alpha=nan must be"),
        ("alpha=inf", "alpha=inf must be"),
        ("dropout=1", "dropout=1 must be a number from 0 to less than 1"),
        ("dropout=a", "dropout=a must be"),
        ("targets=q+", "targets=q+ must be all-linear, or names of modules joined with +"),
        ("targets=all-linear+q", "must be all-linear, or"),
        ("targets=(.*", "must be all-linear, or"),
        ("rslora=1", "rslora=1 must be true or false"),
        ("init=pissa", "init=pissa is unknown; expected one of kaiming, gaussian"),
    ],
)
def test_wrong_options_are_refused(text, words):
    with pytest.raises(UsageError, match=r"^--lora ") as error:
        parse_lora(text)
    assert words in str(error.value) and "\n" not in str(error.value)


def test_folders(tmp_path):
    config, weights = tmp_path / "adapter_config.json", tmp_path / "adapter_model.safetensors"
    for write, words in (
        (lambda: None, "no adapter_config.json"),
        (lambda: config.write_text("{"), "no adapter_model.safetensors"),
        (lambda: (tmp_path / "adapter_model.bin").write_bytes(b"x"), "adapter_model.bin is a pickle"),
        (lambda: weights.write_bytes(b""), "adapter_config.json is not JSON"),
        (lambda: config.write_text("[]"), "not a JSON object"),
    ):
        write()
        with pytest.raises(UsageError, match=words):
            parse_lora(str(tmp_path))
    config.write_text(json.dumps(PLAIN))
    assert parse_lora(str(tmp_path)).config == {
        "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], "init_lora_weights": True,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"peft_type": "IA3"}, "type 'IA3', expected 'LORA'"),
        ({"use_dora": True}, "sets use_dora, which is not supported"),
        ({"modules_to_save": ["lm_head"]}, "sets modules_to_save"),
        ({"lora_bias": True}, "sets lora_bias"),
        ({"of_the_future": 1}, "sets of_the_future"),
        ({"bias": "all"}, "trains biases"),
        ({"init_lora_weights": "pissa"}, "changes the base weights"),
        ({"r": "4"}, "has r='4'"),
        ({"r": 0}, "has r=0"),
        ({"lora_dropout": "x"}, "has lora_dropout='x'"),
        ({"target_modules": [3]}, "has target_modules="),
        ({"target_modules": None}, "has no target_modules"),
        ({"rank_pattern": {"q": "4"}}, "has rank_pattern="),
        ({"layers_to_transform": ["a"]}, "has layers_to_transform="),
        ({"use_rslora": 1}, "has use_rslora=1"),
    ],
)
def test_other_adapters_are_refused(fields, words):
    with pytest.raises(UsageError) as error:
        restore_lora({**PLAIN, **fields}, "--lora x")
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("fp8", "fp8[frozen=fp8]"),
        ("fp8-lean[frozen=bf16]", "fp8-lean[frozen=bf16]"),
        ("bf16[keep=lm_head]", "bf16[keep=lm_head,frozen=bf16]"),
        ("fp32", "fp32"),
        ("fp16", "fp16"),
        ("auto[compute=bf16]", "auto[compute=bf16,frozen=bf16]"),
    ],
)
def test_the_recipe_says_how_the_base_is_stored(given, expected):
    assert set_frozen(given, detect("cpu")) == expected
