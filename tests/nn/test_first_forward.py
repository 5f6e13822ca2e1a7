"""``first_forward=auto``: rows of six blocks or more multiply in BF16 in the first block's forward, in every mode."""

import copy
from dataclasses import replace

import pytest
import torch
from model_families import LANGUAGE, make_batch, without_dropout
from torch import nn

from narrowgauge import Engine, hardware, recipe
from narrowgauge.forecast.trace.fake_gpu import describe_device
from narrowgauge.models.gpt import GPT, GPTConfig
from narrowgauge.nn.block_memory import find_block_memory
from narrowgauge.nn.convert import convert, plan_conversion
from narrowgauge.nn.fused.casts import AdapterPlan
from narrowgauge.nn.fused.modules import FusedBlock
from narrowgauge.nn.module_changes import find_change
from narrowgauge.nn.recompute import count_blocks, shorten_row
from narrowgauge.nn.wide_forwards import FIRST_FORWARD
from narrowgauge.scaling.operand import Operand

FP8, MIXED = ("fp8", "fp8", "fp8"), ("bf16", "fp8", "fp8")


def make_gpt(layers=6, width=64):
    torch.manual_seed(0)
    return GPT(GPTConfig(layers=layers, width=width, heads=4, vocab=128, context=32))


def make_llama(**options):
    return without_dropout(LANGUAGE["llama"](num_hidden_layers=6, **options))


def make_engine(text, model=None, rate=1e-3, **options):
    model = model or make_gpt()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return Engine(model, torch.optim.AdamW(trained, rate), text, **options)


def train(engine, steps=3):
    """Return the losses, and the gradients of the last step."""
    losses, grads = [], {}
    for step in range(steps):
        with engine.forward():
            if isinstance(engine.inner, GPT):
                tokens = torch.randint(0, 128, (2, 33), generator=torch.Generator().manual_seed(step))
                loss = engine.model(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
            else:
                ids = make_batch(step)
                loss = engine.model(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        grads = {name: p.grad.clone() for name, p in engine.inner.named_parameters() if p.grad is not None}
        engine.step()
        losses.append(loss.item())
    return losses, grads


def find_choices(conversion, part):
    return {layer.path.partition(part)[2]: layer.choice for layer in conversion.layers if part in layer.path}


def test_six_blocks_are_enough_and_five_are_not():
    conversion = convert(make_gpt(6), "fp8[products=all]")
    assert find_choices(conversion, "blocks.0.") == {"qkv": MIXED, "out": MIXED, "up": MIXED, "down": FP8}
    assert set(find_choices(conversion, "blocks.1.").values()) == {FP8}
    told = [layer.path for layer in conversion.layers if layer.reason == FIRST_FORWARD]
    assert told == ["blocks.0.qkv", "blocks.0.out", "blocks.0.up"]
    assert FIRST_FORWARD in str(conversion)
    assert "in 72 of 75 products" in conversion.summary() and "3 linear layers in BF16" in conversion.summary()
    assert {layer.choice for layer in convert(make_gpt(5), "fp8[products=all]").layers} == {FP8}


@pytest.mark.parametrize("value", ["fp8", "mostly-bf16", "bf16"])
def test_the_other_values_do_not_depend_on_the_number_of_blocks(value):
    few, many = (convert(make_gpt(layers), f"fp8[products=all,first_forward={value}]") for layers in (2, 7))
    assert find_choices(few, "blocks.0.") == find_choices(many, "blocks.0.")
    assert [layer.choice.output for layer in many.layers].count("bf16") == {"fp8": 0, "mostly-bf16": 3, "bf16": 4}[
        value
    ]


def test_encoder_and_decoder_are_counted_separately():
    conversion = convert(LANGUAGE["t5"](num_hidden_layers=6, num_decoder_layers=5), "fp8[products=all]")
    assert MIXED in find_choices(conversion, "encoder.block.0.").values()
    assert set(find_choices(conversion, "decoder.block.0.").values()) == {FP8}


@pytest.mark.parametrize("hidden", [48, 64])
def test_an_mlp_that_is_not_wider_than_the_stream_has_no_exception(hidden):
    model = make_llama(intermediate_size=hidden)
    width = model.config.hidden_size
    found = find_choices(convert(model, "fp8[products=all]"), "layers.0.")
    assert hidden <= width and found and set(found.values()) == {MIXED}


MODES = [
    "", ",activations=normalized", ",activations=8bit", ",activations=recompute", ",checkpoint=selective",
    ",checkpoint=full", ",checkpoint=full,offload=activations", ",scaling=current", ",granularity=row",
    ",master=split,moments=8bit,gradients=bf16",
]  # fmt: skip


@pytest.mark.parametrize("mode", MODES)
def test_auto_is_mostly_bf16_to_the_bit(mode):
    ends = ("", ",first_forward=mostly-bf16", ",first_forward=fp8")
    (losses, grads), (same, same_grads), (other, _) = (
        train(make_engine(f"fp8[products=all{mode}{end}]")) for end in ends
    )
    assert losses == same and all(torch.equal(grads[name], same_grads[name]) for name in grads)
    assert losses != other and losses == pytest.approx(other, rel=0.02)


@pytest.mark.parametrize("build", [make_gpt, make_llama])
@pytest.mark.parametrize("mode", [",checkpoint=selective", ",checkpoint=full", ",checkpoint=full,offload=activations"])
def test_recomputation_changes_no_bit(mode, build):
    """In chains (GPT) and in blocks that are called one by one (Llama)."""
    plain, again = (train(make_engine(f"fp8[products=all,activations=bf16{more}]", build())) for more in ("", mode))
    assert plain[0] == again[0] and all(torch.equal(plain[1][name], again[1][name]) for name in plain[1])


@pytest.mark.parametrize("build", [make_gpt, make_llama])
def test_the_mlp_of_the_first_block_runs_in_tiles(build):
    whole, tiled = (make_engine("fp8[products=all,checkpoint=full]", build(), rate=0.0) for _ in range(2))
    train(whole, 1), train(tiled, 1)  # a first step computes scales tile by tile
    changes = [change for change in (find_change(module, FusedBlock) for module in tiled.inner.modules()) if change]
    for change in changes:
        change.plan = replace(change.plan, tile_rows=24)
    (losses, grads), (same, got) = train(whole), train(tiled)
    assert losses == same and len(changes) == 6
    for name, value in grads.items():
        assert (got[name] - value).norm() <= 2e-6 * value.norm(), name
    for one, other in zip(whole.conversion.scales.sites.values(), tiled.conversion.scales.sites.values(), strict=True):
        assert torch.equal(one.scale, other.scale)


def adapt(model):
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(model, peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear"))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3)) * 0.05)
    return model.train()


@pytest.mark.parametrize("frozen", ["keep", "bf16", "fp8"])
def test_layers_with_frozen_weights_stay_in_fp8(frozen):
    engine = make_engine(f"fp8[products=all,frozen={frozen}]", adapt(make_llama()))
    first = {
        name: choice for name, choice in find_choices(engine.conversion, "layers.0.").items() if "lora" not in name
    }
    assert first and set(first.values()) == {FP8}
    stored = [path for path in engine.conversion.stored if ".layers.0." in path]
    assert len(stored) == (7 if frozen == "fp8" else 0)
    losses = train(engine)[0]
    wanted = make_engine(f"fp8[products=all,frozen={frozen},first_forward=fp8]", adapt(make_llama()))
    assert losses == train(wanted)[0]


@pytest.mark.parametrize("frozen", ["keep", "bf16", "fp8"])
@pytest.mark.parametrize("mode", ["", ",checkpoint=full,offload=activations"])
def test_adapters_of_a_first_block_in_bf16(frozen, mode):
    """A recipe can set BF16 for frozen layers too; these are then not stored in FP8."""
    text = f"fp8[products=all,frozen={frozen},first_forward=mostly-bf16{mode}]"
    engine, plain = make_engine(text, adapt(make_llama())), make_engine("bf16", adapt(make_llama()))
    stored = [path for path in engine.conversion.stored if ".layers.0." in path]
    assert len(stored) == (1 if frozen == "fp8" else 0) and all("down_proj" in path for path in stored)
    assert train(engine)[0] == pytest.approx(train(plain)[0], rel=0.02)


def test_a_product_of_frozen_and_trained_layers_is_computed_in_bf16():
    """Layers that read one input are one product, so that they have one format."""
    model = make_llama()
    first = model.model.layers[0]
    for part in (first.self_attn.q_proj, first.self_attn.k_proj, first.self_attn.o_proj):
        part.requires_grad_(False)
    engine = make_engine("fp8[products=all]", model)
    found = find_choices(engine.conversion, "layers.0.self_attn.")
    assert found == {"q_proj": MIXED, "k_proj": MIXED, "v_proj": MIXED, "o_proj": FP8}
    losses, grads = train(engine)
    assert losses[-1] < losses[0] + 0.5 and "model.layers.0.self_attn.v_proj.weight" in grads


def test_a_memory_plan_has_options_that_keep_the_same_in_all_blocks():
    """The first block would keep its norm's output in BF16 to compute the activation's input again."""
    engine = make_engine("fp8[products=all]")
    first, *others = find_block_memory(engine.inner, engine.recipe)
    assert others[0].options.keys() - first.options.keys() == {"recompute"} and first.kind == others[0].kind
    given = make_engine("fp8[products=all,activations=8bit]")
    assert "8bit" in find_block_memory(given.inner, given.recipe)[0].options


@pytest.mark.parametrize("mode", MODES)
def test_weights_of_the_first_block_have_scales(mode):
    """Forward does not cast them, so that backward must record them: a scale of 1 would round most of them to 0."""
    engine = make_engine(f"fp8[products=all{mode}]")
    (_, grads), (_, narrow) = train(engine), train(make_engine(f"fp8[products=all,first_forward=fp8{mode}]"))
    if engine.recipe.scaling == "delayed" and engine.recipe.granularity == "tensor":
        scales = engine.conversion.scales
        for path in ("blocks.0.qkv", "blocks.0.up", "blocks.1.qkv"):
            weight = engine.inner.get_submodule(path).weight.detach()
            assert float(scales.sites[f"{path}.weight"].scale * weight.abs().max()) == pytest.approx(448, rel=0.1)
    exact = train(make_engine("fp32"))[1]
    error, other = ((of["pos.weight"].float() - exact["pos.weight"]).norm() for of in (grads, narrow))
    assert error < 1.1 * other


def test_backward_keeps_no_operand_that_forward_alone_reads():
    """In FP8, gradients of weights read the FP8 copy only; adapters and gradients in BF16 read BF16 too."""
    engine = make_engine("fp8[products=all]")
    part = find_change(engine.inner.blocks[0], FusedBlock).plan.qkv
    hp = torch.zeros(4, 16, dtype=torch.bfloat16)
    lp, inv_scale = hp.to(torch.float8_e4m3fn), torch.ones(())
    made = Operand(hp, lp, None, inv_scale)
    assert part.choice == MIXED and part.keep_for_backward(made) == Operand(None, lp, None, inv_scale)
    assert part.keep_for_backward(made._replace(lp_t=lp.t())).lp is None
    wide = replace(part, choice=part.choice._replace(grad_weight="bf16"))
    assert wide.keep_for_backward(made).hp is hp
    adapted = replace(part, adapters=(AdapterPlan(0, (0, 16), 1.0, (None, None)),))
    assert adapted.keep_for_backward(made).hp is hp


def test_a_shortened_row_has_the_formats_of_the_whole():
    model = make_gpt(8)
    shorten_row(model.blocks, 2)
    assert count_blocks(model) == {"blocks": 8} and len(model.blocks) == 2
    found = find_choices(convert(model, "fp8[products=all]"), "blocks.0.")
    assert list(found.values()).count(MIXED) == 3


def test_predicted_speeds_count_the_product_in_bf16():
    device = describe_device(hardware.find_gpu("h200"))
    with torch.device("meta"):
        model = GPT(GPTConfig(layers=6, width=4096, heads=32, vocab=1024, context=512))
    speeds, shares = [], []
    with hardware.assume(device):
        for value in ("bf16", "auto", "fp8"):
            speed = plan_conversion(model, recipe(f"fp8[first_forward={value}]"), device).predict_speed()
            speeds.append(speed.as_converted)
            shares.append(speed.fp8_share)
    assert speeds == sorted(speeds) and len(set(speeds)) == 3, speeds
    assert shares == sorted(shares) and shares[-1] == 1
    assert speeds[1] > 0.96 * speeds[2]


def test_a_state_keeps_the_format_of_its_recipe():
    """A run that set FP8 says so in its state, and continues with it; the default's text is short."""
    assert str(recipe("fp8")) == str(recipe("fp8[first_forward=auto]")) == "fp8"
    engine = make_engine("fp8[products=all,first_forward=fp8]")
    train(engine, 2)
    state = copy.deepcopy(engine.state_dict())
    assert state["recipe"] == "fp8[products=all,first_forward=fp8]"
    again = make_engine(state["recipe"])
    again.load_state_dict(state)
    assert {layer.choice for layer in again.conversion.layers} == {FP8}
    assert train(engine)[0] == train(again)[0]


def test_a_state_of_the_default_before_loads():
    """Texts from before this default say "fp8" and were all FP8: they load, and the first block becomes more exact."""
    old, new = make_engine("fp8[products=all,first_forward=fp8]"), make_engine("fp8[products=all]")
    train(old, 2)
    new.load_state_dict(copy.deepcopy(old.state_dict()) | {"recipe": "fp8[products=all]"})
    for name, site in new.conversion.scales.sites.items():
        assert torch.equal(site.scale, old.conversion.scales.sites[name].scale)
    assert train(new)[0] == pytest.approx(train(old)[0], rel=0.01)


def test_a_model_without_rows_of_blocks_has_none():
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(8)))
    assert count_blocks(model) == {}
    assert {layer.choice for layer in convert(model, "fp8[products=all]").layers} == {FP8}
