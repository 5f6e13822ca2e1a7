"""Frozen weights that are stored in FP8: the same products as weights that are cast, one byte each, never trained."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from model_families import LANGUAGE, make_batch, without_dropout
from torch import Tensor, nn

from narrowgauge import Engine, UsageError
from narrowgauge.nn.convert import convert
from narrowgauge.nn.products.stored_fp8 import is_stored, store_in_fp8, widen_stored

E4M3 = torch.float8_e4m3fn
CAST, STORED = "fp8[products=all,frozen=bf16]", "fp8[products=all,frozen=fp8]"


def adapt(family: str = "llama", **options: Any) -> Any:
    """Return a small model with frozen layers and adapters that add something."""
    peft = pytest.importorskip("peft")
    model = without_dropout(LANGUAGE[family](**options))
    model = peft.get_peft_model(model, peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear"))
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.05)
    return model.train()


class Layers(nn.Module):
    """Layers that are no transformer block: two are frozen, the last is trained."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(width, 64), nn.Linear(64, width), nn.Linear(width, 16)
        self.first.requires_grad_(False)
        self.second.weight.requires_grad_(False)  # its bias is trained

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.second(torch.relu(self.first(x))))


def make_layers() -> Layers:
    torch.manual_seed(0)
    return Layers()


def make_engine(model: nn.Module, recipe: str, **options: Any) -> Engine:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return Engine(model, torch.optim.AdamW(trained, 1e-3), recipe, **options)


def train(model: Any, engine: Engine, steps: int = 3) -> list[float]:
    tokens, losses = make_batch(0), []
    for _ in range(steps):
        with engine.forward():
            loss = model(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def train_layers(engine: Engine, steps: int = 4) -> list[float]:
    generator, losses = torch.Generator().manual_seed(1), []
    for _ in range(steps):
        x = torch.randn(24, 32, generator=generator)
        with engine.forward():
            loss = engine.model(x).float().square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def list_layers(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if is_stored(module)]


@pytest.mark.parametrize("family", ["llama", "qwen3", "bert"])
def test_stored_weights_give_the_same_steps_as_cast_weights(family):
    """The scale of a frozen weight is the same at each forward, so the casts are, too."""
    cast, stored = adapt(family), adapt(family)
    expected = train(cast, make_engine(cast, CAST))
    engine = make_engine(stored, STORED)
    assert len(engine.conversion.blocks) == 2 and len(engine.conversion.stored) >= 12
    assert train(stored, engine) == expected
    before = dict(cast.named_parameters())
    for name, parameter in stored.named_parameters():
        if parameter.requires_grad:
            assert torch.equal(parameter, before[name]), name


@pytest.mark.parametrize("lean", ["fp8-lean", "fp8[master=split]", "fp8[checkpoint=full]", "fp8[scaling=current]"])
def test_every_kind_of_recipe_trains_with_stored_weights(lean):
    name, _, fields = lean.rstrip("]").partition("[")
    fields = f"{fields}," if fields else ""
    losses = []
    for frozen in ("bf16", "fp8"):
        model = adapt()
        engine = make_engine(model, f"{name}[{fields}products=all,frozen={frozen}]")
        losses.append(train(model, engine))
    assert losses[0] == losses[1]


def test_a_stored_weight_takes_one_byte():
    model = adapt()
    engine = make_engine(model, STORED)
    stored = list_layers(model)
    assert stored and len(stored) == len(engine.conversion.stored)
    assert f"{len(stored)} frozen weights stored in FP8" in engine.conversion.summary()
    for layer in stored:
        assert layer.weight.dtype is torch.uint8 and not layer.weight.requires_grad and layer.weight_scale.shape == ()
    linear = {id(module.weight) for module in model.modules() if isinstance(module, nn.Linear)}
    wide = [p for p in model.parameters() if id(p) in linear and not p.requires_grad and p.dtype is not torch.uint8]
    assert not wide


def test_layers_that_are_one_product_have_one_scale():
    model = adapt()
    make_engine(model, STORED)
    attention: Any = model.get_submodule("base_model.model.model.layers.0.self_attn")
    scales = [getattr(attention, name).base_layer.weight_scale for name in ("q_proj", "k_proj", "v_proj")]
    assert scales[0] == scales[1] == scales[2]


def test_stored_values_are_the_nearest_in_the_format():
    layer = nn.Linear(64, 48)
    weight = layer.weight.detach().clone()
    layer.requires_grad_(False)
    store_in_fp8([layer])
    scale = weight.abs().max() / 448
    assert torch.equal(layer.weight.detach().view(E4M3).float(), (weight * scale.reciprocal()).to(E4M3).float())
    assert (widen_stored(layer, torch.float32) - weight).abs().max() <= weight.abs().max() / 16


def test_layers_outside_of_blocks():
    losses = []
    for recipe in (CAST, STORED):
        engine = make_engine(make_layers(), recipe)
        losses.append(train_layers(engine))
        assert engine.conversion.stored == (["first", "second"] if recipe == STORED else [])
    assert losses[0] == losses[1]


def test_torch_compile_reads_stored_weights():
    plain, compiled = make_layers(), make_layers()
    reports = [convert(model, STORED, compile=True) for model in (plain, compiled)]
    graph = torch.compile(compiled, backend="aot_eager", fullgraph=True)
    x = torch.randn(24, 32, generator=torch.Generator().manual_seed(1))
    for _ in range(3):
        losses = []
        for run, report in zip((plain, graph), reports, strict=True):
            loss = run(x).float().square().mean()
            loss.backward()
            assert report.scales is not None
            report.scales.update()
            losses.append(loss.item())
        assert losses[0] == losses[1]
    for one, other in zip(plain.parameters(), compiled.parameters(), strict=True):
        assert one.grad is None if other.grad is None else torch.equal(one.grad, other.grad)


def test_only_frozen_layers_of_fp8_products_are_stored():
    model = make_layers()
    engine = make_engine(model, "fp8[products=all,frozen=fp8,keep=first]")
    assert engine.conversion.stored == ["second"]
    assert model.first.weight.dtype is torch.float32 and model.last.weight.dtype is torch.float32


def test_a_group_with_a_trained_member_is_not_stored():
    model = adapt()
    attention: Any = model.get_submodule("base_model.model.model.layers.0.self_attn")
    attention.k_proj.base_layer.weight.requires_grad_(True)
    engine = make_engine(model, STORED)
    first = [path for path in engine.conversion.stored if "layers.0.self_attn" in path]
    assert len(first) == 1 and "o_proj" in first[0]
    train(model, engine)


def test_a_weight_of_a_head_and_a_small_embedding_is_not_stored():
    model = adapt(tie_word_embeddings=True)
    engine = make_engine(model, STORED)
    assert engine.conversion.stored and not any("lm_head" in path for path in engine.conversion.stored)
    train(model, engine)


@pytest.mark.parametrize("tied", [False, True])
def test_a_large_embedding_is_stored_too(tied, monkeypatch):
    monkeypatch.setattr("narrowgauge.nn.products.stored_fp8.LARGE", 1024)
    plain, model = adapt(tie_word_embeddings=tied), adapt(tie_word_embeddings=tied)
    expected = train(plain, make_engine(plain, CAST))
    engine = make_engine(model, STORED)
    table, head = (model.get_submodule(f"base_model.model.{name}") for name in ("model.embed_tokens", "lm_head"))
    assert is_stored(table) and is_stored(head) and (table.weight is head.weight) == tied
    assert len(engine.conversion.stored) == (15 if tied else 16)
    assert train(model, engine) == pytest.approx(expected, rel=0.01)  # the rows are rounded to FP8
    tokens, words = make_batch(0), widen_stored(table, torch.float32)
    assert torch.equal(table(tokens), words[tokens].to(torch.bfloat16))
    saved = copy.deepcopy(engine.state_dict())
    losses = train(model, engine)
    engine.load_state_dict(saved)
    assert train(model, engine) == losses
    engine.detach()
    assert not list_layers(model) and torch.equal(table.weight, words) and (table.weight is head.weight) == tied
    assert not any("weight_scale" in name for name in model.state_dict())


@pytest.mark.parametrize("option", ["max_norm", "own forward", "trained", "kept"])
def test_other_embeddings_are_not_stored(option, monkeypatch):
    monkeypatch.setattr("narrowgauge.nn.products.stored_fp8.LARGE", 64)

    class Scaled(nn.Embedding):
        def forward(self, ids: Tensor) -> Tensor:
            return super().forward(ids) * 2

    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            cls = Scaled if option == "own forward" else nn.Embedding
            self.table = cls(64, 32, max_norm=1.0 if option == "max_norm" else None)
            self.layers = make_layers()

        def forward(self, ids: Tensor) -> Tensor:
            return self.layers(self.table(ids))

    model = Words()
    model.table.requires_grad_(option == "trained")
    engine = make_engine(model, STORED.replace("]", ",keep=table]") if option == "kept" else STORED)
    assert engine.conversion.stored == ["layers.first", "layers.second"]


def test_a_stored_layer_runs_as_written():
    """Without the engine, in evaluation, in generation with a cache, and in a copy."""
    model = adapt()
    engine = make_engine(model, STORED)
    train(model, engine)
    tokens = make_batch(0)
    model.eval()
    with torch.no_grad(), engine.forward():
        expected = model(input_ids=tokens).logits.float()
    with torch.no_grad():
        plain = model(input_ids=tokens).logits.float()
        copied = copy.deepcopy(model)(input_ids=tokens).logits.float()
        made = model.generate(input_ids=tokens[:, :4], max_new_tokens=3, do_sample=False, pad_token_id=0)
    assert (plain - expected).abs().max() < 0.1 * expected.std()
    assert torch.equal(plain, copied) and made.shape == (2, 7)


def test_the_state_of_stored_weights():
    model = adapt()
    engine = make_engine(model, STORED)
    train(model, engine)
    saved = copy.deepcopy(engine.state_dict())
    name = next(name for name in saved["model"] if name.endswith("base_layer.weight_scale"))
    assert saved["model"][name.removesuffix("_scale")].dtype is torch.uint8
    expected = train(model, engine)
    engine.load_state_dict(copy.deepcopy(saved))
    assert train(model, engine) == expected
    again = adapt()
    other = make_engine(again, STORED)
    other.load_state_dict(saved)
    assert train(again, other) == expected


def test_a_loaded_weight_gets_the_scale_of_the_layer():
    layer = nn.Linear(32, 16, bias=False).requires_grad_(False)
    store_in_fp8([layer])
    scale, values = layer.weight_scale.clone(), widen_stored(layer, torch.float32)
    layer.load_state_dict({"weight": values.to(torch.bfloat16)})
    assert torch.equal(layer.weight_scale, scale)
    assert (widen_stored(layer, torch.float32) - values).abs().max() <= values.abs().max() / 16
    layer.load_state_dict({"weight": (values / (2 * scale)).to(E4M3), "weight_scale": 2 * scale})
    assert torch.equal(layer.weight_scale, scale)
    assert (widen_stored(layer, torch.float32) - values).abs().max() <= values.abs().max() / 8
    with pytest.raises(UsageError, match="does not fit the scale"):
        layer.load_state_dict({"weight": 4 * values})
    with pytest.raises(UsageError, match="does not fit the scale"):
        layer.load_state_dict({"weight": torch.full_like(values, torch.nan)})
    with pytest.raises(RuntimeError, match="weight_scale"):
        layer.load_state_dict({"weight": layer.weight.detach().clone()})


def test_code_that_does_not_know_of_the_scale_fails():
    """It would compute with numbers that are wrong by the scale."""
    model = adapt()
    make_engine(model, STORED)
    layer = list_layers(model)[0]
    x = torch.randn(3, layer.weight.shape[1], dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(RuntimeError):
        nn.functional.linear(x, layer.weight)
    with pytest.raises(RuntimeError, match="Byte"):
        layer.weight.data += 0.5
    with pytest.raises(RuntimeError, match="Byte"):
        model.merge_adapter()
    with pytest.raises(RuntimeError, match="floating point"):
        layer.weight.requires_grad_(True)
    before = layer.weight.detach().clone()
    model.to(torch.bfloat16)
    assert torch.equal(layer.weight, before)


def test_a_second_engine_and_detach():
    model = adapt()
    train(model, make_engine(model, STORED))
    bits = [layer.weight.detach().view(torch.uint8).clone() for layer in list_layers(model)]
    engine = make_engine(model, STORED)
    assert all(
        torch.equal(old, layer.weight.view(torch.uint8)) for old, layer in zip(bits, list_layers(model), strict=True)
    )
    train(model, engine)
    values = [widen_stored(layer, torch.float32) for layer in list_layers(model)]
    paths = engine.conversion.stored
    engine.detach()
    assert not list_layers(model) and not any("weight_scale" in name for name in model.state_dict())
    found = sorted(float(model.get_submodule(path).weight.detach().sum()) for path in paths)
    assert found == sorted(float(value.sum()) for value in values)
    tokens = make_batch(0)
    assert torch.isfinite(model(input_ids=tokens, labels=tokens).loss)
