"""Families train fused as they train plain: step by step in FP32, BF16 and FP8, with masks, caches and frozen parts."""

from __future__ import annotations

import copy
from dataclasses import fields, is_dataclass, replace
from typing import Any

import pytest
import torch
from model_families import LANGUAGE, OTHERS, VOCAB, make_batch, without_dropout
from torch import Tensor, nn

from narrowgauge import Engine
from narrowgauge.nn.blocks.examples import make_examples
from narrowgauge.nn.blocks.find import find_blocks
from narrowgauge.nn.fused import attention, blocks, passes
from narrowgauge.nn.fused.modules import FusedBlock, mark_parts
from narrowgauge.nn.fused.verify import find_difference, make_fp32_plan
from narrowgauge.nn.module_changes import apply_change, find_change

STEPS = 10
FEW_STEPS = 4
LONG = ("llama", "gpt2", "bert", "gpt-neox")
"""Families that train for more steps."""


def fuse_in_fp32(model: nn.Module) -> nn.Module:
    """Fuse a model's blocks with FP32 products."""
    found = find_blocks(model, torch.device("cpu"), find_difference)
    assert len(found.specs) in (2, 4) and not found.reasons
    for path, spec in found.specs.items():
        block = model.get_submodule(path)
        mark_parts(block, spec)
        apply_change(block, FusedBlock(make_fp32_plan(block, spec)))
    return model


def train_plainly(model: nn.Module, steps: int = STEPS, **inputs: Any) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step in range(steps):
        tokens = make_batch(step % 3)
        loss = model(input_ids=tokens, labels=tokens, **inputs).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def train_by_engine(model: nn.Module, recipe: str, fused: bool, steps: int = STEPS, **inputs: Any) -> list[float]:
    engine = Engine(model, torch.optim.AdamW(model.parameters(), lr=1e-3), recipe, fused=fused)
    assert len(engine.conversion.blocks) in ((2, 4) if fused else (0,)), engine.conversion.unfused
    assert not fused or not engine.conversion.unfused
    losses = []
    for step in range(steps):
        tokens = make_batch(step % 3)
        with engine.forward():
            loss = model(input_ids=tokens, labels=tokens, **inputs).loss
        engine.backward(loss)
        assert engine.step().applied
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("family", LANGUAGE)
def test_fp32_losses_agree_step_by_step(family: str) -> None:
    model, steps = without_dropout(LANGUAGE[family]()).train(), STEPS if family in LONG else FEW_STEPS
    expected = train_plainly(copy.deepcopy(model), steps)
    assert train_plainly(fuse_in_fp32(model), steps) == pytest.approx(expected, rel=1e-5)
    assert expected[(steps - 1) // 3 * 3] < expected[0]  # of the same batch


@pytest.mark.parametrize("family", LANGUAGE)
def test_bf16_and_fp8_losses_agree_step_by_step(family: str) -> None:
    model, steps = without_dropout(LANGUAGE[family]()).train(), STEPS if family in LONG else FEW_STEPS
    expected = train_by_engine(copy.deepcopy(model), "bf16", False, steps)
    assert train_by_engine(copy.deepcopy(model), "bf16", True, steps) == pytest.approx(expected, rel=1e-2)
    assert train_by_engine(model, "fp8", True, 3) == pytest.approx(expected[:3], rel=2e-2)


@pytest.mark.parametrize(
    "family", ["llama", "qwen3", "gemma2", "gpt2", "bert", "gpt-neox", "t5", "bloom", "gpt-j", "olmo2"]
)
def test_padding_masks_and_positions_reach_attention(family: str) -> None:
    model = without_dropout(LANGUAGE[family]()).train()
    mask = torch.ones(2, 19, dtype=torch.long)
    mask[0, :5] = 0
    inputs = {"attention_mask": mask}
    if family in ("llama", "qwen3"):
        inputs["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)
    expected = train_plainly(copy.deepcopy(model), 4, **inputs)
    assert expected != train_plainly(copy.deepcopy(model), 4)
    assert train_plainly(fuse_in_fp32(model), 4, **inputs) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("family", ["gpt2", "bert", "phi3", "opt", "t5", "bart", "bloom", "torch-post"])
def test_dropout_draws_the_same_numbers(family: str) -> None:
    options = {"resid_pdrop": 0.1} if family == "phi3" else {}
    model = LANGUAGE[family](**options).train()
    torch.manual_seed(3)
    expected = train_plainly(copy.deepcopy(model), 5)
    torch.manual_seed(3)
    found = train_plainly(fuse_in_fp32(model), 5)
    assert found == pytest.approx(expected, rel=1e-5)


def test_packed_documents_do_not_see_each_other() -> None:
    """Positions that start again mark documents; transformers makes a mask from them, which attention must get."""
    model = without_dropout(LANGUAGE["llama"]()).eval()
    one, two = make_batch(1, 1, 9), make_batch(2, 1, 10)
    positions = torch.cat([torch.arange(9), torch.arange(10)])[None]
    packed = torch.cat([one, two], 1)
    expected = [model(input_ids=part).logits for part in (one, two)]
    fused = fuse_in_fp32(model)
    found = fused(input_ids=packed, position_ids=positions, use_cache=False).logits
    torch.testing.assert_close(found, torch.cat(expected, 1), rtol=1e-4, atol=1e-5)


def gradients(model: nn.Module, **inputs: Any) -> dict[str, Tensor | None]:
    tokens = make_batch()
    model(input_ids=tokens, labels=tokens, **inputs).loss.backward()
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("family", ["llama", "gpt2", "bert", "gpt-neox", "gemma2"])
def test_frozen_parameters_get_no_gradient(family: str) -> None:
    model = without_dropout(LANGUAGE[family]()).train()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("mlp" in name or "intermediate" in name or "norm" in name or "embed" in name)
    expected = gradients(copy.deepcopy(model))
    found = gradients(fuse_in_fp32(model))
    for name, value in expected.items():
        if value is None:
            assert found[name] is None, name
        else:
            torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6)


def test_caches_are_filled_and_generation_is_the_same() -> None:
    model = without_dropout(LANGUAGE["qwen3"]()).train()
    tokens = make_batch()
    expected = model(input_ids=tokens)
    wanted = copy.deepcopy(model).eval().generate(tokens, max_new_tokens=6, do_sample=False)
    fused = fuse_in_fp32(model)
    found = fused(input_ids=tokens)
    for layer in range(2):
        one, two = (answer.past_key_values.layers[layer] for answer in (expected, found))
        torch.testing.assert_close(two.keys, one.keys, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(two.values, one.values, rtol=1e-4, atol=1e-5)
    assert torch.equal(fused.eval().generate(tokens, max_new_tokens=6, do_sample=False), wanted)


def test_hidden_states_and_attention_weights_are_still_there() -> None:
    model = without_dropout(LANGUAGE["llama"](attn_implementation="eager")).train()
    tokens = make_batch()
    asked = {"output_hidden_states": True, "output_attentions": True}
    expected = copy.deepcopy(model)(input_ids=tokens, **asked)
    found = fuse_in_fp32(model)(input_ids=tokens, **asked)
    for kind in ("hidden_states", "attentions"):
        for one, two in zip(getattr(expected, kind), getattr(found, kind), strict=True):
            torch.testing.assert_close(two, one, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("change", ["hook", "forward", "adapter"])
def test_changes_made_after_conversion_are_respected(change: str) -> None:
    model = without_dropout(LANGUAGE["llama"]()).train()
    fused = fuse_in_fp32(copy.deepcopy(model))
    calls = []
    for one in (model, fused):
        part: Any = one.model.layers[1].mlp.up_proj  # type: ignore[union-attr]
        if change == "hook":
            part.register_forward_hook(lambda module, args, output: calls.append(1) or output * 2)
        elif change == "forward":
            part.forward = lambda x, part=part: nn.functional.linear(x, 2 * part.weight)
        else:
            one.model.layers[1].mlp.up_proj = nn.Sequential(part, nn.Linear(96, 96))  # type: ignore[union-attr]
            torch.manual_seed(0)
            nn.init.normal_(one.model.layers[1].mlp.up_proj[1].weight)  # type: ignore[union-attr]
            nn.init.zeros_(one.model.layers[1].mlp.up_proj[1].bias)  # type: ignore[union-attr]
    tokens = make_batch()
    expected, found = (one(input_ids=tokens, labels=tokens).loss for one in (model, fused))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "family", ["llama", "gpt2", "bert", "gpt-neox", "torch-pre", "timm-style", "olmo2", "t5", "bart"]
)
def test_recomputation_changes_no_bit(family: str) -> None:
    curves = []
    for recipe in ("fp8[activations=bf16]", "fp8[checkpoint=selective]", "fp8[checkpoint=full]"):
        torch.manual_seed(0)
        options = {"drop": 0.1, "drop_path": 0.2} if family == "timm-style" else {}
        model = LANGUAGE[family](**options).train()  # with dropout
        torch.manual_seed(1)
        curves.append(train_by_engine(model, recipe, True, 3))
    assert curves[0] == curves[1] == curves[2]


def test_state_dict_and_copies() -> None:
    model = LANGUAGE["llama"]()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    engine = Engine(model, torch.optim.AdamW(model.parameters()), "fp8")
    after = model.state_dict()
    assert list(after) == list(before) and all(torch.equal(after[name], value) for name, value in before.items())
    twin = copy.deepcopy(model)
    assert find_change(twin.model.layers[0], FusedBlock) is not None  # type: ignore[union-attr,arg-type]
    with torch.no_grad():
        twin.model.layers[0].mlp.up_proj.weight.zero_()  # type: ignore[union-attr,operator]
    tokens = make_batch()
    with engine.forward():
        loss, other = model(input_ids=tokens, labels=tokens).loss, twin(input_ids=tokens, labels=tokens).loss
    assert loss != other and loss.item() == pytest.approx(float(torch.log(torch.tensor(float(VOCAB)))), rel=0.1)


def fail_in_own_code(*_: Any) -> None:
    raise AssertionError("the model's own attention ran")


@pytest.mark.parametrize("family", ["llama", "qwen3", "phi", "phi3", "starcoder2", "gpt2", "opt", "bert", "distilbert"])
@pytest.mark.parametrize("padded", [False, True])
def test_a_models_own_calls_use_the_fast_attention(family: str, padded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = fuse_in_fp32(without_dropout(LANGUAGE[family]()).train())
    monkeypatch.setattr(attention, "_attend_by_own_code", fail_in_own_code)
    mask = torch.ones(2, 19, dtype=torch.long)
    mask[0, 14:] = 0
    train_plainly(model, 1, **({"attention_mask": mask} if padded else {}))


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2", "bert", "vit"])
@pytest.mark.parametrize("mode", ["none", "full"])
def test_boolean_masks_keep_the_fast_attention(family: str, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a token sees nothing: transformers makes such masks of padding on the left."""
    model = without_dropout({**LANGUAGE, **OTHERS}[family]()).train()
    found = find_blocks(model, torch.device("cpu"), find_difference)
    path, spec = next(iter(found.specs.items()))
    block, fused = (copy.deepcopy(model.get_submodule(path)) for _ in range(2))
    mark_parts(fused, spec)
    apply_change(fused, FusedBlock(replace(make_fp32_plan(fused, spec), checkpoint=mode)))
    x, *rest = make_examples(block, torch.device("cpu"))[0].args
    kwargs = make_examples(block, torch.device("cpu"))[0].kwargs
    mask = torch.rand(len(x), 1, x.shape[1], x.shape[1], generator=torch.Generator().manual_seed(0)) < 0.5
    mask[0, :, 2] = False
    monkeypatch.setattr(attention, "_attend_by_own_code", fail_in_own_code)
    results = []
    for one in (block, fused):
        source = x.clone().requires_grad_()
        result = one(source, *rest, **{**kwargs, "attention_mask": mask})
        result = result[0] if isinstance(result, tuple) else result
        (result * torch.linspace(-1, 1, x.shape[-1])).sum().backward()
        results.append([result, source.grad, *(p.grad for p in one.parameters())])
    for expected, got in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    with pytest.raises(AssertionError, match="own attention ran"):  # a mask of numbers is the model's own affair
        fused(x, *rest, **{**kwargs, "attention_mask": torch.zeros(mask.shape).masked_fill_(~mask, -1e4)})


def test_a_mask_with_another_meaning_is_left_to_the_model() -> None:
    """transformers' eager attention adds its mask: True would mean 1."""
    model = LANGUAGE["llama"](attn_implementation="eager")
    found = find_blocks(model, torch.device("cpu"), find_difference)
    assert {(spec.attention.kind, spec.attention.mask) for spec in found.specs.values()} == {("rotary", None)}


def count_saved_bytes(value: Any, seen: set[int]) -> int:
    """Return the bytes of all tensors that an object holds, in tuples, lists and dataclasses too."""
    if isinstance(value, Tensor):
        storage = value.untyped_storage()
        if storage._cdata in seen:
            return 0
        seen.add(storage._cdata)
        return storage.nbytes()
    if is_dataclass(value):
        value = [getattr(value, one.name) for one in fields(value)]
    return sum(count_saved_bytes(one, seen) for one in value) if isinstance(value, list | tuple) else 0


@pytest.mark.parametrize("family", ["llama", "bert", "gpt-neox"])
def test_selective_checkpointing_saves_less_in_every_order(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    totals = {}
    run_forward = passes.run_forward
    for mode in ("none", "selective"):
        sizes, seen = [], set()

        def run(given: Any, sizes: list[int] = sizes, seen: set[int] = seen) -> Any:
            made, left = run_forward(given)
            sizes.append(count_saved_bytes(left.kept, seen))  # now: backward frees it
            return made, left

        monkeypatch.setattr(blocks, "run_forward", run)
        train_by_engine(without_dropout(LANGUAGE[family]()).train(), f"bf16[checkpoint={mode}]", True, 1)
        totals[mode] = sum(sizes)
    assert 0 < totals["selective"] < 0.8 * totals["none"], totals
