"""Recipe ``auto`` and the line about slow FP8 on a real GPU, where products are measured and blocks verified."""

import pytest
import torch
from torch import nn

from narrowgauge import Engine, hardware, tasks
from narrowgauge.engine.choose_recipe import choose_for_model, choose_for_task
from narrowgauge.errors import SlowRecipeWarning

pytestmark = [
    pytest.mark.filterwarnings("error::narrowgauge.errors.SlowRecipeWarning"),
    pytest.mark.skipif("fp8" not in hardware.detect().native, reason="needs FP8"),
]


def stack(width, depth=4):
    return nn.Sequential(*(layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.GELU()))).cuda()


def make(model, recipe, **options):
    return Engine(model, torch.optim.AdamW(model.parameters(), fused=True), recipe, **options)


def test_auto_trains_a_gpt_in_fp8_and_says_why():
    with torch.device("cuda"):
        model = tasks.find("gpt:2x768").model()
    engine = make(model, "auto")
    assert str(engine.recipe) == "fp8", engine.recipe_reason
    assert "2 blocks are fused" in engine.recipe_reason
    assert engine.speed_advice is None
    tokens = torch.randint(0, 256, (2, 64), device="cuda")
    with engine.forward():
        loss = engine.model(tokens, tokens)
    engine.backward(loss)
    assert engine.step().applied


def test_auto_stays_in_bf16_where_fp8_does_not_pay():
    for model, options in ((stack(64), {"compile": True}), (stack(768), {}), (stack(1000), {"compile": True})):
        engine = make(model, "auto", **options)
        assert str(engine.recipe) == "bf16", engine.recipe_reason
        assert engine.recipe_reason


def test_slow_fp8_is_said_once():
    with pytest.warns(SlowRecipeWarning, match="compile=True") as caught:
        make(stack(1024), "fp8")
    assert len(caught) == 1
    with pytest.warns(SlowRecipeWarning, match="gains nothing"):
        make(stack(64), "fp8")
    assert make(stack(2048), "fp8", compile=True).speed_advice is None


def test_large_blocks_without_weights_are_verified_on_the_gpu():
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 2, "num_attention_heads": 32}
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=512, **sizes))
    recipe, reason = choose_for_model("auto", model, hardware.detect("cuda"))
    assert (str(recipe), "2 blocks are fused" in reason) == ("fp8", True), reason
    assert str(choose_for_task("auto", tasks.find("gpt:2x768"), hardware.detect("cuda"), compile=True)[0]) == "fp8"
