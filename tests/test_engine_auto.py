"""Recipe ``auto`` of an engine: the fastest format for the model on its GPU, why, and the same when resumed."""

import warnings
from dataclasses import replace

import pytest
import torch
from torch import nn

from narrowgauge import Engine, UsageError, hardware, tasks
from narrowgauge.engine import choose_recipe as choosing
from narrowgauge.engine.choose_recipe import choose_for_model, choose_for_task, depends_on_model
from narrowgauge.errors import SlowRecipeWarning
from narrowgauge.forecast.run import Scenario
from narrowgauge.forecast.trace.fake_gpu import describe_device, simulate_gpu
from narrowgauge.hardware import find_gpu
from narrowgauge.recipe import NAMED, choose, parse

pytestmark = pytest.mark.filterwarnings("error::narrowgauge.errors.SlowRecipeWarning")
H200 = describe_device(find_gpu("h200"))


def stack(width, depth=2):
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(depth)))


def engine_on(gpu, make, recipe="auto", **options):
    with simulate_gpu(find_gpu(gpu)):
        with torch.device("cuda"):
            model = make()
        return Engine(model, torch.optim.AdamW(model.parameters(), fused=True), recipe, **options)


def gpt():
    return tasks.find("gpt:2x512").model()


@pytest.mark.parametrize(
    ("gpu", "make", "options", "recipe", "reason"),
    [
        ("h200", gpt, {}, "fp8", "2 blocks are fused"),
        ("h200", gpt, {"compile": True}, "fp8", "2 blocks are fused"),
        ("h200", gpt, {"fused": False}, "bf16", "fused=False"),
        ("h200", lambda: stack(768), {}, "bf16", "use compile=True"),
        ("h200", lambda: stack(1024), {"compile": True}, "fp8", "it is compiled"),
        ("h200", lambda: stack(8192), {}, "fp8", "its layers are wide"),
        ("h200", lambda: stack(64), {"compile": True}, "bf16", "so small"),
        ("h200", lambda: stack(1001), {"compile": True}, "bf16", "not a multiple of 16"),
        ("l40s", gpt, {}, "fp8", "L40S"),
        ("b200", gpt, {}, "fp8", "B200"),
        ("a100", gpt, {}, "bf16", "native BF16"),
        ("t4", gpt, {}, "fp16", "FP16 tensor cores"),
    ],
)  # fmt: skip
def test_auto_takes_the_fastest_with_the_reason(gpu, make, options, recipe, reason):
    engine = engine_on(gpu, make, **options)
    assert str(engine.recipe) == recipe
    assert reason in engine.recipe_reason
    assert "\n" not in engine.recipe_reason
    if recipe != "fp8":
        assert engine.conversion.scales is None
    assert (engine.speed_advice is None) or recipe != "fp8"


def test_fields_of_auto_stay_whatever_it_chooses():
    fields = "checkpoint=full,master=split,moments=8bit"
    assert engine_on("h200", gpt, f"auto[{fields}]").recipe == parse(f"fp8[{fields}]")
    small = engine_on("h200", lambda: stack(64), "auto[attention=any]")
    assert small.recipe == NAMED["bf16"].replace(attention="any")
    fixed = engine_on("h200", gpt, "auto[compute=fp16]")
    assert fixed.recipe.compute == "fp16"
    kept = engine_on("h200", gpt, "auto[keep=blocks*]", compile=True)  # nearly nothing is left for FP8
    assert (kept.recipe.compute, kept.recipe.keep) == ("bf16", ("blocks*",))


@pytest.mark.parametrize("text", ["auto[history=4]", "auto[nothing=1]", "auto[loss_scale=dynamic]"])
def test_fields_that_bf16_does_not_have_are_refused_before_anything_is_chosen(text):
    with pytest.raises(UsageError):
        engine_on("h200", gpt, text)


def test_named_recipes_have_no_reason_and_are_not_predicted(monkeypatch):
    monkeypatch.setattr(choosing, "plan_conversion", lambda *_: pytest.fail("predicted"))
    for recipe in ("bf16", "fp8", NAMED["fp8"]):
        assert engine_on("h200", lambda: stack(64), recipe).recipe_reason is None
    for device in ("cpu", "a100"):
        described = hardware.detect("cpu") if device == "cpu" else describe_device(find_gpu(device))
        assert not depends_on_model("auto", described)


def test_an_engine_on_a_cpu_chooses_by_the_cpu_alone():
    model = stack(64)
    engine = Engine(model, torch.optim.SGD(model.parameters()))
    assert (engine.recipe, engine.recipe_reason) == choose(hardware.detect("cpu"))
    model = stack(64)
    assert Engine(model, torch.optim.SGD(model.parameters()), "fp8").speed_advice is None  # and no warning


def test_an_unknown_gpu_keeps_bf16():
    unknown = replace(H200, gpu=None, name="NVIDIA H999")
    recipe, reason = choose_for_model("auto", stack(8), unknown)
    assert str(recipe) == "bf16"
    assert "H999 is not in the table" in reason


def test_a_model_without_products_keeps_bf16():
    with hardware.assume(H200):
        assert str(choose_for_model("auto", nn.Embedding(16, 16), H200)[0]) == "bf16"


def test_a_second_engine_chooses_for_the_model_as_it_was():
    with simulate_gpu(find_gpu("h200")):
        with torch.device("cuda"):
            model = gpt()
        reasons = set()
        for _ in range(2):
            engine = Engine(model, torch.optim.AdamW(model.parameters(), fused=True), "auto")
            assert len(engine.conversion.blocks) == 2
            reasons.add(engine.recipe_reason)
    assert len(reasons) == 1


def test_an_fp8_engine_warns_once_in_one_line_where_it_is_made(monkeypatch):
    monkeypatch.setattr("narrowgauge.nn.speed_advice.is_assumed", lambda: False)
    with pytest.warns(SlowRecipeWarning, match="use compile=True") as caught:
        engine = engine_on("h200", lambda: stack(768), "fp8")
    assert [str(warning.message) for warning in caught] == [engine.speed_advice]
    assert [warning.filename for warning in caught] == [__file__]
    for make, recipe, options in ((gpt, "fp8", {}), (lambda: stack(768), "fp8", {"compile": True}),
                                  (lambda: stack(768), "auto", {}), (lambda: stack(768), "bf16", {})):  # fmt: skip
        assert engine_on("h200", make, recipe, **options).speed_advice is None
    with pytest.warns(SlowRecipeWarning, match="fused=False leaves it to autocast"):
        engine_on("h200", gpt, "fp8", fused=False)


def test_forecasts_do_not_warn():
    assert engine_on("h200", lambda: stack(768), "fp8").speed_advice is not None


def test_a_state_of_another_recipe_is_announced_if_auto_chose(monkeypatch):
    def make(recipe):
        model = stack(16)
        return Engine(model, torch.optim.SGD(model.parameters()), recipe)

    monkeypatch.setattr(choosing, "depends_on_model", lambda *_: True)
    monkeypatch.setattr(choosing, "choose_for_model", lambda *_, **__: (NAMED["fp8"], "it pays"))
    state = make("bf16").state_dict()
    with pytest.warns(UserWarning, match="saved under recipe bf16, and auto chose fp8 now; .* recipe='bf16'"):
        make("auto").load_state_dict(state)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make("fp8").load_state_dict(state)  # chosen on purpose
        make("auto").load_state_dict(make("fp8").state_dict())


def test_a_task_is_chosen_for_without_its_weights():
    with hardware.assume(H200):
        assert str(choose_for_task("auto", tasks.find("gpt:2x512"), H200, compile=True)[0]) == "fp8"
        digits = tasks.find("digits")
        torch.manual_seed(0)
        before = torch.get_rng_state()
        recipe, reason = choose_for_task("auto", digits, H200, compile=True)
        assert str(recipe) == "bf16" and reason is not None
        broken = replace(digits, model=lambda: torch.ones(3).item())
        recipe, reason = choose_for_task("auto[checkpoint=full]", broken, H200)
        assert str(recipe) == "bf16[checkpoint=full]"
        assert "cannot be made without weights" in reason
        assert torch.equal(torch.get_rng_state(), before)
    assert choose_for_task("fp8", digits, H200) == (NAMED["fp8"], None)
    cpu = hardware.detect("cpu")
    assert choose_for_task("auto", digits, cpu) == choose(cpu)


def test_forecasts_predict_what_auto_trains_with():
    lines = []
    for name, expected in (("gpt:2x512", ["fp8", "bf16"]), ("digits", ["bf16"])):
        scenario = Scenario(task=tasks.find(name), gpu=find_gpu("h200"))
        recipes = scenario.choose_recipes(["auto", "bf16"], lines.append)
        assert [str(recipe) for recipe in recipes] == expected
    assert [line.partition(":")[0] for line in lines] == ["auto is fp8", "auto is bf16"]
