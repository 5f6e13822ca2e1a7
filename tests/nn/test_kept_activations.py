"""What fused blocks keep for backward: less by default in FP8, and gradients stay as accurate."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from model_families import LANGUAGE, make_batch, without_dropout
from torch import Tensor, nn

import narrowgauge as ng
from narrowgauge.nn.fused import make_plan, passes
from narrowgauge.nn.fused.modules import FusedBlock
from narrowgauge.nn.module_changes import find_change

PLAIN, SHORT = "fp8[products=all,activations=bf16]", "fp8[products=all,activations=8bit]"
RECOMPUTED = "fp8[products=all,activations=recompute]"
BATCHES = 3
FAMILIES = ["llama", "qwen3", "gpt2", "gemma2", "nano", "bert", "gpt-neox", "t5", "olmo2", "torch-pre"]


def build(family: str) -> nn.Module:
    return LANGUAGE[family]()  # type: ignore[no-any-return]


def train(
    family: str, recipe: str, change: Any = None, rate: float = 0.0, seed: int = 0
) -> tuple[list[float], dict[str, Tensor]]:
    """Return the losses of two steps, and the gradients of the second; with a rate of 0 the weights do not change."""
    model = without_dropout(build(family))
    if change is not None:
        change(model)
    trained = [p for p in model.parameters() if p.requires_grad]
    engine = ng.Engine(model, torch.optim.SGD(trained, rate), recipe, fused=None if recipe == "fp32" else True)
    losses, grads, ids = [], {}, make_batch(seed, rows=4, length=32)
    for _ in range(2):
        with engine.forward():
            loss = engine.model(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        engine.step()
        losses.append(loss.item())
    return losses, grads


def find_decibels(wanted: dict[str, Tensor], got: dict[str, Tensor]) -> dict[str, float]:
    """Return the accuracy of each gradient that is not negligible."""
    assert wanted.keys() == got.keys()
    largest = max(float(value.abs().max()) for value in wanted.values())
    large = [name for name, value in wanted.items() if value.abs().max() > 1e-3 * largest]
    return {
        name: float(10 * torch.log10(wanted[name].square().sum() / (wanted[name] - got[name]).square().sum()))
        for name in large
    }


@pytest.mark.parametrize(
    ("family", "way"), [(family, "8bit") for family in FAMILIES] + [("llama", "normalized"), ("gpt2", "normalized")]
)
def test_losses_are_equal_and_gradients_as_accurate(family, way):
    """Roundings to FP8 differ, either way: hence the mean over batches, and more for 64 numbers of a norm or a bias."""
    lost: dict[str, list[float]] = {}
    for seed in range(BATCHES):
        _, exact = train(family, "fp32", seed=seed)
        plain, wanted = train(family, PLAIN, seed=seed)
        short, got = train(family, f"fp8[products=all,activations={way}]", seed=seed)
        assert short == plain  # the first step recomputes its blocks, and forward is the same
        before, after = find_decibels(exact, wanted), find_decibels(exact, got)
        assert min(before.values()) > 5
        for name in before:
            lost.setdefault(name, []).append(before[name] - after[name])
    means = {name: sum(found) / len(found) for name, found in lost.items() if len(found) == BATCHES}
    assert abs(sum(means.values()) / len(means)) < 0.2, means
    assert max(loss for name, loss in means.items() if exact[name].dim() > 1) < 0.5, means
    assert max(means.values()) < 1.5, means


@pytest.mark.parametrize(
    ("recipe", "narrow", "wide"),
    [
        ("fp8[products=all]", "normalized", "8bit"),
        ("fp8[products=all,scaling=current]", "normalized", "8bit"),
        ("fp8[products=all,activations=bf16]", "bf16", "bf16"),
        ("fp8[products=all,checkpoint=selective]", "bf16", "bf16"),
        ("fp8-lean[products=all]", "bf16", "bf16"),
        ("bf16", "bf16", "bf16"),
    ],
)
def test_the_default_depends_on_the_width(recipe, narrow, wide, monkeypatch):
    for most, wanted in ((65, narrow), (64, wide)):
        monkeypatch.setattr(make_plan, "SHORT_FROM", most)
        model = build("llama")
        ng.Engine(model, torch.optim.AdamW(model.parameters(), 0.1), recipe, fused=True)
        plans = [change.plan for module in model.modules() if (change := find_change(module, FusedBlock))]
        assert plans and {plan.activations for plan in plans} == {wanted}


def test_normalized_rows_take_less(monkeypatch):
    sizes = [
        measure_kept("llama", f"fp8[products=all,activations={way}]", monkeypatch)
        for way in ("bf16", "normalized", "8bit")
    ]
    assert sizes == sorted(sizes, reverse=True) and len(set(sizes)) == 3, sizes


def freeze(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        parameter.requires_grad = "mlp" not in name


def freeze_all_but_norms(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        parameter.requires_grad = "norm" in name


@pytest.mark.parametrize("checkpoint", ["selective", "full"])
def test_recomputation(checkpoint):
    """With recomputation of whole blocks nothing else is kept, so there is no difference."""
    plain, wanted = train("llama", f"fp8[products=all,checkpoint={checkpoint}]")
    short, got = train("llama", f"fp8[products=all,activations=8bit,checkpoint={checkpoint}]")
    assert short == plain
    if checkpoint == "full":
        assert all(torch.equal(wanted[name], got[name]) for name in wanted)
    else:
        assert min(find_decibels(wanted, got).values()) > 18


@pytest.mark.parametrize("change", [freeze, freeze_all_but_norms])
def test_frozen_parts(change):
    _, exact = train("llama", "fp32", change)
    plain, wanted = train("llama", PLAIN, change)
    short, got = train("llama", SHORT, change)
    assert short == plain
    before, after = find_decibels(exact, wanted), find_decibels(exact, got)
    assert all(after[name] > before[name] - 1.5 for name in before)


def test_training_goes_on_from_the_same_losses():
    plain, _ = train("llama", PLAIN, rate=0.1)
    short, _ = train("llama", SHORT, rate=0.1)
    assert short == plain  # the second loss follows a first step that is the same


def measure_kept(family: str, recipe: str, monkeypatch: pytest.MonkeyPatch) -> int:
    """Return the bytes that the blocks of a model keep after the forward of a second step."""
    found: list[Any] = []
    original = passes.run_forward

    def run(given: Any) -> Any:
        outputs, left = original(given)
        found.append((left, outputs))
        return outputs, left

    model = build(family)
    engine = ng.Engine(model, torch.optim.AdamW(model.parameters(), 1e-3), recipe, fused=True)
    ids = make_batch(0, rows=4, length=64)
    for _ in range(2):
        found.clear()
        with monkeypatch.context() as patch:
            patch.setattr("narrowgauge.nn.fused.blocks.run_forward", run)
            with engine.forward():
                loss = engine.model(input_ids=ids, labels=ids).loss
        kept = sum(nbytes for left, _ in found for nbytes in list_storages(left).values())
        engine.backward(loss)
        engine.step()
    return kept // ids.numel()


def list_storages(value: Any, seen: dict[int, int] | None = None) -> dict[int, int]:
    """Return the sizes of all storages that an object holds, besides parameters and the call's arguments."""
    found: dict[int, int] = {} if seen is None else seen
    if isinstance(value, nn.Parameter | nn.Module):
        return found
    if isinstance(value, Tensor):
        storage = value.untyped_storage()
        found[storage._cdata] = storage.nbytes()
    elif isinstance(value, list | tuple):
        for part in value:
            list_storages(part, found)
    elif isinstance(value, passes.Forwarded):
        list_storages([value.x0, value.kept], found)
    elif hasattr(value, "__dataclass_fields__") and not isinstance(value, type):
        list_storages([getattr(value, name) for name in value.__dataclass_fields__], found)
    return found


@pytest.mark.parametrize(("family", "share"), [("nano", 0.68), ("llama", 0.71)])
def test_blocks_keep_less(family, share, monkeypatch):
    """Llama's MLP has 96 columns here, which are stored as 128."""
    plain, short = (measure_kept(family, recipe, monkeypatch) for recipe in (PLAIN, SHORT))
    assert short < share * plain, (short, plain)


@pytest.mark.parametrize("recipe", ["bf16", "fp8[products=all]", "fp8[products=all,scaling=current]"])
@pytest.mark.parametrize("family", FAMILIES)
def test_recomputed_inputs_of_activations_change_no_bit(family, recipe):
    plain, wanted = train(family, add(recipe, "activations=bf16"), rate=0.1)
    again, got = train(family, add(recipe, "activations=recompute"), rate=0.1)
    assert again == plain
    assert wanted.keys() == got.keys() and all(torch.equal(wanted[name], got[name]) for name in wanted)


def add(recipe: str, field: str) -> str:
    return f"{recipe.removesuffix(']')}{',' if '[' in recipe else '['}{field}]"


@pytest.mark.parametrize("change", [freeze, freeze_all_but_norms])
def test_recomputed_inputs_beside_frozen_parts(change):
    plain, wanted = train("llama", PLAIN, change)
    again, got = train("llama", RECOMPUTED, change)
    assert again == plain and all(torch.equal(wanted[name], got[name]) for name in wanted)


@pytest.mark.parametrize("recipe", ["bf16", "fp8[products=all]"])
@pytest.mark.parametrize("family", ["nano", "llama"])
def test_inputs_of_activations_are_not_kept(family, recipe, monkeypatch):
    """Of 27 bytes per token and column, 8 are the input of an activation with four times the columns."""
    ways = (add(recipe, f"activations={way}") for way in ("bf16", "recompute"))
    plain, less = (measure_kept(family, one, monkeypatch) for one in ways)
    model = build(family)
    width = model.get_input_embeddings().weight.shape[1] if family == "llama" else 64
    assert plain - less > 2 * 2 * 2 * width, (plain, less)  # at least two blocks, two times the columns, BF16


def test_recomputation_with_dropout_inside_of_the_mlp():
    """What was dropped would have to be drawn again: then the input is kept, and nothing changes."""
    losses = []
    for recipe in (PLAIN, RECOMPUTED):
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.1, batch_first=True, norm_first=True)
        model = nn.Sequential(layer, nn.Linear(64, 32))
        engine = ng.Engine(model, torch.optim.SGD(model.parameters(), 0.1), recipe)
        for _ in range(3):
            with engine.forward():
                loss = engine.model(torch.ones(2, 16, 64)).square().mean()
            engine.backward(loss)
            engine.step()
        losses.append(loss.item())
    assert losses[0] == losses[1]


@pytest.mark.parametrize("recipe", [SHORT, RECOMPUTED])
def test_evaluation_and_retained_graphs(recipe):
    model = build("llama")
    engine = ng.Engine(model, torch.optim.AdamW(model.parameters(), 1e-3), recipe)
    ids = make_batch(0, rows=2, length=32)
    for _ in range(2):
        with engine.forward():
            loss = engine.model(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
    before = copy.deepcopy(model.state_dict())
    with torch.no_grad():
        engine.model(input_ids=ids, labels=ids)
    with engine.forward():
        loss = engine.model(input_ids=ids, labels=ids).loss
    first = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True, allow_unused=True)
    second = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    assert all((a is None and b is None) or torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
