"""An MLP in tiles of rows: the same outputs and gradients as in one piece, the same FP8 statistics, less memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from model_families import LANGUAGE, make_batch, without_dropout
from torch import Tensor, nn

import narrowgauge as ng
from narrowgauge import events
from narrowgauge.nn.fused import halves, tiles
from narrowgauge.nn.fused.modules import FusedBlock
from narrowgauge.nn.module_changes import find_change

FULL = "products=all,checkpoint=full"
ROWS = 48
"""Rows of a tile: 128 tokens make three tiles, of which the last is shorter."""
FAMILIES = ["llama", "gpt2", "qwen3", "gemma2", "nano", "bert", "gpt-neox", "t5", "olmo2", "torch-pre"]
"""Gated and plain MLPs, with and without biases, RMSNorm and LayerNorm, transposed weights, norms after branches."""


def set_tiles(model: nn.Module, rows: int | None) -> None:
    changes = [change for change in (find_change(module, FusedBlock) for module in model.modules()) if change]
    assert changes
    for change in changes:
        change.plan = replace(change.plan, tile_rows=rows)


def make_model(family: str) -> nn.Module:
    return without_dropout(LANGUAGE[family]())


def train(
    make: Callable[[], nn.Module], recipe: str, rows: int | None, from_step: int = 1
) -> tuple[list[float], dict[str, Tensor], Any]:
    """Return the losses, the gradients of the last of two steps, and the amax, counts and history of FP8 scales.

    Tiles begin with the second step, or with ``from_step``, after which nothing else follows.
    """
    model = make()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer: torch.optim.Optimizer = torch.optim.SGD(trained, 0.0)
    if "lean" in recipe:
        optimizer = torch.optim.AdamW(trained, 0.0, weight_decay=0.0)
    engine = ng.Engine(model, optimizer, recipe, fused=True)
    set_tiles(model, 0)
    losses, grads, ids = [], {}, make_batch(0, rows=4, length=32)
    for number in range(from_step + 1):
        if number == from_step:
            set_tiles(model, rows)
        with engine.forward():
            loss = engine.model(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        scales = engine.conversion.scales
        seen = None if scales is None else (scales.amax.clone(), scales.counts.clone(), scales.history.clone())
        engine.step()
        losses.append(loss.item())
    return losses, grads, seen


def assert_close(got: dict[str, Tensor], wanted: dict[str, Tensor], relative: float) -> None:
    assert got.keys() == wanted.keys()
    for name, value in wanted.items():
        assert got[name].dtype is value.dtype and got[name].stride() == value.stride(), name
        error = (got[name].double() - value.double()).norm() / value.double().norm().clamp(min=1e-30)
        assert error <= relative, (name, float(error))


@pytest.mark.parametrize("family", FAMILIES)
def test_fp8_with_delayed_scales(family):
    """Scales are given from the second step on, so that tiles change nothing but the order of sums over rows."""
    make = lambda: make_model(family)  # noqa: E731
    whole, wanted, seen = train(make, f"fp8[{FULL}]", 0)
    tiled, got, same = train(make, f"fp8[{FULL}]", ROWS)
    assert tiled == whole
    assert_close(got, wanted, 2e-6)
    assert all(torch.equal(one, other) for one, other in zip(seen, same, strict=True))


@pytest.mark.parametrize("family", FAMILIES)
def test_bf16(family):
    make = lambda: make_model(family)  # noqa: E731
    whole, wanted, _ = train(make, "bf16[checkpoint=full]", 0)
    tiled, got, _ = train(make, "bf16[checkpoint=full]", ROWS)
    assert tiled == whole
    assert_close(got, wanted, 2e-6)


@pytest.mark.parametrize("recipe", ["fp8-lean[products=all]", "bf16-lean"])
def test_lean_recipes_round_the_sum_once(recipe):
    """BF16 gradients are sums in FP32, rounded at the end: at most one rounding step from those in one piece."""
    make = lambda: make_model("llama")  # noqa: E731
    _, wanted, _ = train(make, recipe, 0)
    _, got, _ = train(make, recipe, ROWS)
    assert wanted["model.layers.0.mlp.down_proj.weight"].dtype is torch.bfloat16
    for name, value in wanted.items():
        exact = value.float()
        assert ((got[name].float() - exact).abs() <= exact.abs() * 2**-7 + 1e-9).all(), name
        assert (got[name] == value).float().mean() > 0.99, name


@pytest.mark.parametrize("recipe", ["fp8[products=all,scaling=current,checkpoint=full]", f"fp8[{FULL}]"])
def test_scales_of_each_tile_are_as_accurate(recipe):
    """A scale that is found from the tensor itself is found for each tile: no less accurate than one for all."""
    make = lambda: make_model("llama")  # noqa: E731
    exact = compute_exact_gradients("llama")
    _, whole, seen = train(make, recipe, 0, 0)
    _, tiled, same = train(make, recipe, ROWS, 0)
    assert torch.allclose(seen[0], same[0], rtol=0.1)  # amax of all tiles together
    errors = [
        {name: float((g[name] - exact[name]).norm() / exact[name].norm()) for name in exact} for g in (whole, tiled)
    ]
    ratios = [errors[1][name] / errors[0][name] for name in exact]
    assert max(ratios) < 1.2 and sum(ratios) / len(ratios) < 1.02, ratios


def compute_exact_gradients(family: str) -> dict[str, Tensor]:
    model = make_model(family)
    ids = make_batch(0, rows=4, length=32)
    model(input_ids=ids, labels=ids).loss.backward()  # type: ignore[attr-defined]
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def count_pieces(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    found: list[int] = []
    original = halves._run_rows

    def run(run: Any, h: Any, whole: bool) -> Any:
        found.append(h.rows)
        return original(run, h, whole)

    monkeypatch.setattr(halves, "_run_rows", run)
    return found


def run_step(model: nn.Module, recipe: str, pieces: list[int]) -> None:
    engine = ng.Engine(
        model, torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.0), recipe, fused=True
    )
    set_tiles(model, ROWS)
    pieces.clear()  # of the comparison with the model's own code
    ids = make_batch(0, rows=4, length=32)
    with engine.forward():
        loss = engine.model(input_ids=ids, labels=ids).loss
    engine.backward(loss)


def test_one_tile_exists_at_a_time(monkeypatch):
    pieces = count_pieces(monkeypatch)
    run_step(make_model("llama"), f"fp8[{FULL}]", pieces)
    assert pieces == [48, 48, 32] * 4  # forward and backward of two blocks


def test_blocks_that_keep_their_activations_have_no_tiles(monkeypatch):
    pieces = count_pieces(monkeypatch)
    run_step(make_model("llama"), "fp8[products=all,activations=bf16]", pieces)
    assert pieces == [128, 128]


def test_dropout_inside_the_mlp_is_drawn_in_one_piece(monkeypatch):
    pieces = count_pieces(monkeypatch)
    model = LANGUAGE["torch-pre"](dropout=0.1)
    run_step(model, f"fp8[{FULL}]", pieces)
    assert pieces == [128] * 4


def test_evaluation_has_tiles(monkeypatch):
    model = make_model("llama")
    engine = ng.Engine(model, torch.optim.SGD(model.parameters(), 0.0), "bf16", fused=True)
    ids = make_batch(0, rows=4, length=32)
    outputs = []
    for rows in (0, ROWS):
        set_tiles(model, rows)
        pieces = count_pieces(monkeypatch)
        with torch.no_grad(), engine.forward():
            outputs.append(engine.model(input_ids=ids).logits)
        assert pieces == ([128, 128] if not rows else [48, 48, 32] * 2)
    assert torch.equal(*outputs)


@pytest.mark.parametrize("recipe", ["bf16[checkpoint=full]", f"fp8[{FULL}]"])
def test_adapters(recipe):
    peft = pytest.importorskip("peft")

    def make() -> nn.Module:
        torch.manual_seed(0)
        model = peft.get_peft_model(make_model("llama"), peft.LoraConfig(r=4, target_modules="all-linear"))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    parameter.normal_(0, 0.05)
        return model

    whole, wanted, _ = train(make, recipe, 0)
    tiled, got, _ = train(make, recipe, ROWS)
    assert any("mlp" in name for name in wanted)
    assert tiled == whole
    assert_close(got, wanted, 2e-6)


def test_adapters_with_dropout_run_in_one_piece(monkeypatch):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, lora_dropout=0.1, target_modules="all-linear")
    pieces = count_pieces(monkeypatch)
    run_step(peft.get_peft_model(make_model("llama"), config).train(), f"fp8[{FULL}]", pieces)
    assert pieces == [128] * 4


def test_accumulated_gradients():
    def run(rows: int) -> dict[str, Tensor]:
        model = make_model("llama")
        engine = ng.Engine(model, torch.optim.SGD(model.parameters(), 0.0), f"fp8[{FULL}]", accumulate=2)
        set_tiles(model, 0)
        for number in range(4):
            ids = make_batch(number % 2, rows=4, length=32)
            with engine.forward():
                loss = engine.model(input_ids=ids, labels=ids).loss
            engine.backward(loss)
            if number == 1:
                set_tiles(model, rows)
            if number % 2:
                grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
                engine.step()
        return grads

    assert_close(run(ROWS), run(0), 2e-6)


def test_watched_statistics_are_those_of_all_rows():
    """A listener gets each tile; gauges add them up."""

    class Sums(events.Listener):
        def __init__(self) -> None:
            self.sums: dict[tuple[str, str], tuple[int, float]] = {}

        def report_tensor(self, kind: str, path: str, tensor: Tensor, inv_scale: Tensor | None) -> None:
            scale = 1.0 if inv_scale is None else float(inv_scale)
            count, total = self.sums.get((kind, path), (0, 0.0))
            self.sums[kind, path] = count + tensor.numel(), total + float(tensor.float().square().sum()) * scale**2

    found = []
    for rows in (0, ROWS):
        model = make_model("llama")
        engine = ng.Engine(model, torch.optim.SGD(model.parameters(), 0.0), "bf16[checkpoint=full]", fused=True)
        set_tiles(model, rows)
        ids = make_batch(0, rows=4, length=32)
        listener = Sums()
        with events.listening(listener):
            with engine.forward():
                loss = engine.model(input_ids=ids, labels=ids).loss
            engine.backward(loss)
        found.append(listener.sums)
    whole, tiled = found
    assert ("activation", "model.layers.0.act") in whole and whole.keys() == tiled.keys()
    for key, (count, total) in whole.items():
        assert tiled[key] == (count, pytest.approx(total, rel=1e-6)), key


@pytest.mark.parametrize(
    ("rows", "width", "expected"),
    [
        (8192, 28672, 0),
        (32768, 28672, 0),  # two tiles
        (65536, 28672, 16384),
        (131072, 28672, 16384),
        (100000, 28672, 16768),  # six tiles of almost the same size
        (65536, 3072, 0),  # GPT-2 124M with 65,536 tokens
        (4096, 1 << 23, 128),
    ],
)
def test_rows_of_a_tile(rows, width, expected):
    assert tiles.choose_tile_rows(rows, width) == expected
    assert expected % 16 == 0 and 2 * expected * width <= max(tiles.TILE_BYTES, 2 * 128 * width)


def test_tiles_are_chosen_by_size(monkeypatch):
    monkeypatch.setattr(tiles, "TILE_BYTES", 2 * 192 * 40)
    monkeypatch.setattr(tiles, "TILE_MULTIPLE", 16)
    pieces = count_pieces(monkeypatch)
    model = make_model("llama")
    engine = ng.Engine(model, torch.optim.SGD(model.parameters(), 0.0), f"fp8[{FULL}]")
    ids = make_batch(0, rows=4, length=32)
    with engine.forward():
        loss = engine.model(input_ids=ids, labels=ids).loss
    engine.backward(loss)
    assert pieces == [32] * 16
