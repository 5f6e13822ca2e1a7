"""Recipes: names, texts that parse back, errors, and the choice of ``auto``."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

import narrowgauge as ng
from narrowgauge.errors import UsageError
from narrowgauge.hardware import Device
from narrowgauge.recipe import NAMED, Recipe, choose, parse, refusal
from narrowgauge.recipe_checks import CHOICES


def device(kind="cpu", native=("fp32",), capability=None):
    return Device(
        kind=kind,
        name="a machine",
        torch_device=kind,
        capability=capability,
        memory_bytes=1 << 30,
        native=native,
        gpu=None,
        features=(),
    )


patterns = st.from_regex(r"[A-Za-z0-9_.*?-]+", fullmatch=True)


@st.composite
def recipes(draw):
    fields = {name: draw(st.sampled_from(values)) for name, values in CHOICES.items()}
    fields["loss_scale"] = draw(st.one_of(st.sampled_from(["none", "dynamic"]), st.floats(1e-30, 1e30)))
    fields["history"] = draw(st.integers(1, 4096))
    fields["margin"] = draw(st.integers(0, 16))
    fields["keep"] = tuple(draw(st.lists(patterns, max_size=3)))
    if fields["compute"] != "fp16":
        fields["loss_scale"] = "none"
    if fields["compute"] != "fp8":
        fields.update(scaling="none", history=16, margin=0, amax="max", products="fastest")
        fields.update(
            gradients_format="e5m2", first_forward="auto", head="fp8", granularity="tensor", attention_keys="fp8"
        )
    if fields["granularity"] != "tensor":
        fields.update(scaling="current", activations="auto", offload="none")
    if fields["gradients_format"] == "auto" and fields["scaling"] != "delayed":
        fields["gradients_format"] = "e4m3"
    if fields["compute"] != "bf16":
        fields["emulate"] = "none"
    if fields["emulate"] == "none":
        fields.update(gradient_rounding="nearest", hadamard="none")
    if fields["compute"] not in ("bf16", "fp8"):
        fields["master"], fields["frozen"] = "fp32", "keep"
    is_fp8 = fields["compute"] == "fp8"
    fits = {"auto": True, "bf16": True, "normalized": is_fp8, "8bit": is_fp8}
    fits["recompute"] = fields["compute"] in ("bf16", "fp8") and fields["checkpoint"] == "none"
    if not fits[fields["activations"]]:
        fields["activations"] = "bf16"
    if fields["compute"] == "bf16" and fields["frozen"] == "fp8":
        fields["frozen"] = "bf16"
    if fields["gradients"] == "released":
        fields["loss_scale"] = "none"
    if fields["compute"] not in ("bf16", "fp8") or fields["checkpoint"] != "full":
        fields["offload"] = "none"
    if fields["gradients"] == "bf16" and fields["master"] == "fp32":
        fields["gradients"] = "fp32"
    if fields["emulate"] != "none":
        fields.update(activations="auto", offload="none")
    if fields["emulate"] == "mxfp8":
        fields["gradients_format"] = draw(st.sampled_from(CHOICES["gradients_format"]))
    return Recipe(**fields)


@given(recipes())
def test_every_recipe_parses_back_from_its_text(recipe):
    assert parse(str(recipe)) == recipe


@pytest.mark.parametrize("text", ["fp8-lean[frozen=fp8]", "bf16-lean[gradients=released]", "bf16[moments=8bit]"])
def test_the_text_names_the_nearest_recipe(text):
    assert str(parse(text)) == text
    assert str(parse("fp8[master=split,gradients=bf16,moments=8bit,checkpoint=full]")) == "fp8-lean"


def test_every_field_changes_the_text():
    """The test above is meaningful only if a changed field changes the text."""
    base = NAMED["fp8"]
    bases = {"offload": NAMED["fp8-lean"], "emulate": NAMED["bf16"]}
    bases |= dict.fromkeys(("gradient_rounding", "hadamard"), NAMED["emulated-nvfp4"])
    changed = {
        "compute": "bf16", "master": "split", "gradients": "released", "moments": "8bit", "scaling": "current",
        "history": 3, "margin": 2, "amax": "recent", "products": "all", "keep": ("head",),
        "attention": "flash", "checkpoint": "full", "frozen": "fp8", "activations": "8bit",
        "offload": "activations", "gradients_format": "e4m3", "first_forward": "bf16", "head": "bf16",
        "attention_keys": "bf16", "granularity": "row", "emulate": "nvfp4", "gradient_rounding": "stochastic",
        "hadamard": "random",
    }  # fmt: skip
    for field in dataclasses.fields(Recipe):
        if field.name in ("compute", "loss_scale"):
            continue
        other = bases.get(field.name, base).replace(**{field.name: changed[field.name]})
        assert f"{field.name}=" in str(other) or str(other) == "emulated-nvfp4"
        assert parse(str(other)) == other
    assert str(NAMED["fp16"].replace(loss_scale=1024.0)) == "fp16[loss_scale=1024.0]"


def test_named_recipes():
    assert [str(NAMED[name]) for name in NAMED] == list(NAMED)
    lean = parse("bf16-lean")
    assert (lean.master, lean.gradients, lean.moments) == ("split", "bf16", "8bit")
    assert parse("bf16[moments=8bit,master=split,checkpoint=selective]").checkpoint == "selective"
    assert ng.recipe("bf16").replace(moments="8bit").moments == "8bit"


def test_recipes_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        NAMED["bf16"].compute = "fp32"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("bf15", "did you mean bf16"),
        ("", "unknown recipe"),
        ("bf16[", "unknown recipe"),
        ("bf16[checkpoint]", "field=value"),
        ("bf16[checkpoint=sometimes]", "none, selective, full"),
        ("bf16[chekpoint=full]", "did you mean checkpoint"),
        ("bf16[checkpoint=full,checkpoint=none]", "twice"),
        ("bf16[loss_scale=dynamic]", "only fp16"),
        ("fp32[loss_scale=8]", "only fp16"),
        ("fp16[loss_scale=-1]", "positive number"),
        ("fp16[loss_scale=nan]", "positive number"),
        ("fp16[loss_scale=much]", "positive number"),
        ("fp16[master=split]", "BF16 weights"),
        ("bf16[activations=8bit]", "belongs to fp8"),
        ("bf16[activations=normalized]", "belongs to fp8"),
        ("fp16[activations=recompute]", "needs fused blocks"),
        ("fp8-lean[activations=recompute]", "add checkpoint=none"),
        ("bf16[offload=activations]", "needs bf16 or fp8, and checkpoint=full"),
        ("fp32[checkpoint=full,offload=activations]", "needs bf16 or fp8, and checkpoint=full"),
        ("bf16[gradients=bf16]", "needs master=split"),
        ("bf16[history=4]", "history=4 has no effect on bf16: it belongs to fp8"),
        ("fp8[history=0]", "1 to 4096"),
        ("fp8[margin=x]", "whole number"),
        ("bf16[keep=a b]", "module paths"),
        ("mxfp8[emulate=none]", "emulate=none contradicts emulated-mxfp8, which emulates MXFP8; use bf16"),
        ("mxfp8[emulate=nvfp4]", "emulate=nvfp4 contradicts emulated-mxfp8, which emulates MXFP8; use emulated-nvfp4"),
        ("mxfp8[emulate=fp4]", "emulate=fp4 is unknown"),
        ("mxfp8[emulate=none,gradients_format=e4m3]", "gradients_format=e4m3 has no effect on bf16"),
    ],
)
def test_wrong_recipes_are_refused_in_one_line(text, message):
    with pytest.raises(UsageError) as caught:
        parse(text)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("machine", "name"),
    [
        (device("cuda", ("fp32", "tf32", "fp16", "bf16", "fp8"), (9, 0)), "bf16"),
        (device("cuda", ("fp32", "tf32", "fp16", "bf16"), (8, 0)), "bf16"),
        (device("cuda", ("fp32", "fp16"), (7, 5)), "fp16"),
        (device("cuda", ("fp32",), (6, 1)), "fp32"),
        (device("cpu", ("fp32", "bf16")), "bf16"),
        (device("cpu", ("fp32", "fp16")), "fp32"),
        (device("cpu", ("fp32",)), "fp32"),
    ],
)
def test_auto_chooses_for_the_device_and_explains(machine, name):
    recipe, reason = choose(machine)
    assert str(recipe) == name == str(parse("auto", machine))
    assert "a machine" in reason
    assert refusal(recipe, machine) is None
    assert parse("auto[attention=any]", machine) == recipe.replace(attention="any")


def test_recipes_a_device_cannot_run_are_refused():
    turing = device("cuda", ("fp32", "fp16"), (7, 5))
    assert "use fp16" in refusal(NAMED["bf16"], turing)
    assert "8.9" in refusal(NAMED["fp8"], device("cuda", ("bf16",), (8, 0)))
    assert "tensor cores" in refusal(NAMED["tf32"], device())


def test_fp8_activations_are_kept_in_8_bits():
    assert parse("fp8[activations=fp8]") == parse("fp8[activations=8bit]")
    assert str(parse("fp8[activations=fp8]")) == "fp8[activations=8bit]"
    with pytest.raises(UsageError, match="belongs to fp8"):
        parse("bf16[activations=fp8]")
