"""``attention_keys=bf16``: the forward products that compute attention's keys are in BF16, and nothing else changes."""

import copy

import pytest
import torch
from model_families import LANGUAGE, make_batch, without_dropout
from torch import nn

from narrowgauge import Engine, UsageError, recipe
from narrowgauge.kernels import cast
from narrowgauge.models.gpt import GPT, GPTConfig
from narrowgauge.nn.convert import convert
from narrowgauge.nn.wide_forwards import KEYS

FP8, MIXED = ("fp8", "fp8", "fp8"), ("bf16", "fp8", "fp8")
TEXT = "fp8[products=all,first_forward=fp8,attention_keys=bf16{}]"


def make_gpt():
    torch.manual_seed(0)
    return GPT(GPTConfig(layers=3, width=64, heads=4, vocab=128, context=32))


def make_llama(**options):
    return without_dropout(LANGUAGE["llama"](num_hidden_layers=2, **options))


def train(text, build, steps=4, **options):
    """Return the losses, and the gradients of the last step."""
    model = build()
    engine = Engine(model, torch.optim.AdamW(model.parameters(), 1e-3), text, **options)
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


def list_wide(model, text, **options):
    engine = Engine(model, torch.optim.SGD(model.parameters(), 0.1), text, **options)
    return sorted(layer.path for layer in engine.conversion.layers if layer.choice == MIXED)


def test_products_with_keys_in_fused_blocks():
    conversion = convert(make_gpt(), TEXT.format(""))
    wide = {layer.path: layer.reason for layer in conversion.layers if layer.choice == MIXED}
    assert wide == {f"blocks.{number}.qkv": KEYS for number in range(3)}
    assert {layer.choice for layer in conversion.layers if layer.path not in wide} == {FP8}
    assert KEYS in str(conversion)


def test_the_first_block_keeps_its_own_reason():
    conversion = convert(make_gpt(), "fp8[products=all,first_forward=mostly-bf16,attention_keys=bf16]")
    told = {layer.path: layer.reason for layer in conversion.layers if layer.choice == MIXED}
    assert [path for path, reason in told.items() if reason == KEYS] == ["blocks.1.qkv", "blocks.2.qkv"]
    assert len(told) == 5


def test_separate_projections_that_are_one_product():
    found = list_wide(make_llama(), TEXT.format(""))
    assert found == [f"model.layers.{i}.self_attn.{name}_proj" for i in range(2) for name in "kqv"]


def test_without_fused_blocks_only_keys_change():
    found = list_wide(make_llama(), TEXT.format(",granularity=row"))
    assert found == [f"model.layers.{i}.self_attn.k_proj" for i in range(2)]


def test_keys_of_attention_in_the_models_own_code():
    found = {path.rpartition(".")[2] for path in list_wide(LANGUAGE["deepseek-dense"](), TEXT.format(""))}
    assert found == {"q_a_proj", "kv_a_proj_with_mqa", "kv_b_proj"}


def test_a_model_without_keys_is_an_error():
    with pytest.raises(UsageError, match="found no layer in Sequential that computes attention's keys"):
        convert(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)), TEXT.format(""))


def test_keys_of_cross_attention():
    found = list_wide(LANGUAGE["t5"](), TEXT.format(""))
    assert any("EncDecAttention.k" in path for path in found)
    assert not any("EncDecAttention.q" in path or "EncDecAttention.o" in path for path in found)


@pytest.mark.parametrize("build", [make_gpt, make_llama])
@pytest.mark.parametrize(
    "mode",
    ["", ",activations=8bit", ",checkpoint=full", ",scaling=current", ",master=split,moments=8bit,gradients=bf16"],
)
def test_training_is_that_of_fp8_with_other_roundings(mode, build):
    wide, narrow = (train(text.format(mode), build) for text in (TEXT, TEXT.replace("keys=bf16", "keys=fp8")))
    assert wide[0] != narrow[0] and wide[0] == pytest.approx(narrow[0], rel=0.02)
    for name, grad in wide[1].items():
        assert torch.nn.functional.cosine_similarity(grad.flatten(), narrow[1][name].flatten(), dim=0) > 0.98, name


@pytest.mark.parametrize("build", [make_gpt, make_llama])
@pytest.mark.parametrize("mode", [",checkpoint=selective", ",checkpoint=full"])
def test_recomputation_changes_no_bit(mode, build):
    plain, again = (train(TEXT.format(f",activations=bf16{more}"), build) for more in ("", mode))
    assert plain[0] == again[0] and all(torch.equal(plain[1][name], again[1][name]) for name in plain[1])


@pytest.mark.parametrize("activations", ["normalized", "8bit"])
def test_norms_record_what_backward_casts(activations, monkeypatch):
    """Without a cast of their own: scales are those of a forward in FP8, and forward casts nothing."""
    seen, casts = {}, {}
    plain = cast.cast

    def note(x, *arguments, **options):
        casts[keys].append(tuple(x.shape))
        return plain(x, *arguments, **options)

    for keys in ("fp8", "bf16"):
        model, casts[keys] = make_gpt(), []
        recipe = f"fp8[products=all,first_forward=fp8,activations={activations},attention_keys={keys}]"
        engine = Engine(model, torch.optim.SGD(model.parameters(), 0.0), recipe)
        for step in range(3):
            if step == 2:
                monkeypatch.setattr(cast, "cast", note)
            tokens = torch.randint(0, 128, (2, 33), generator=torch.Generator().manual_seed(step))
            with engine.forward():
                loss = model(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
            monkeypatch.undo()
            engine.backward(loss)
            engine.step()
        seen[keys] = {name: site.scale.item() for name, site in engine.conversion.scales.sites.items()}
    first = "blocks.0.qkv.input"
    assert seen["bf16"][first] == seen["fp8"][first] not in (0.0, 1.0)
    for name, scale in seen["fp8"].items():
        assert seen["bf16"][name] == pytest.approx(scale, rel=0.1), name
    assert casts["bf16"] == casts["fp8"]


class Sharp(nn.Module):
    """Attention over few keys whose inputs have columns of a large size, as in trained language models."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.attn = nn.ModuleDict({name: nn.Linear(64, 64, bias=False) for name in ("q_proj", "k_proj", "v_proj")})
        with torch.no_grad():
            self.attn["k_proj"].weight.mul_(6)

    def forward(self, x):
        q, k, v = (
            self.attn[name](x).view(2, 32, 4, 16).transpose(1, 2).float() for name in ("q_proj", "k_proj", "v_proj")
        )
        return nn.functional.scaled_dot_product_attention(q, k, v).square().mean()


def test_sharp_attention_has_a_smaller_error():
    torch.manual_seed(0)
    x = torch.randn(2, 32, 64)
    x[..., :4] *= 8
    model, errors = Sharp(), {}
    wanted = model(x)
    exact = torch.autograd.grad(wanted, model.attn["v_proj"].weight)[0]
    for keys in ("fp8", "bf16"):
        engine = Engine(
            own := copy.deepcopy(model),
            torch.optim.SGD(own.parameters(), 0.0),
            f"fp8[products=all,first_forward=fp8,attention_keys={keys}]",
        )
        with engine.forward():
            loss = engine.model(x)
        engine.backward(loss)
        grad = own.attn["v_proj"].weight.grad
        errors[keys] = ((grad - exact).norm() / exact.norm()).item()
    assert errors["bf16"] < 0.8 * errors["fp8"], errors


def test_the_field_belongs_to_fp8():
    assert str(recipe("fp8[attention_keys=fp8]")) == "fp8"
    for text in ("bf16[attention_keys=bf16]", "fp8[attention_keys=fp32]"):
        with pytest.raises(UsageError, match="attention_keys"):
            recipe(text)
