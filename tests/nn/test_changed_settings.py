"""Settings of fused blocks that change after the engine was made have their effect, as in the model as written."""

from __future__ import annotations

import argparse
import copy
import gc
import io
import itertools
import warnings
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from model_families import LANGUAGE, make_batch, without_dropout
from test_experts import mixtral
from torch import Tensor, nn

import narrowgauge as ng
from narrowgauge.errors import SlowRecipeWarning
from narrowgauge.nn import fusable_blocks
from narrowgauge.nn.blocks import find
from narrowgauge.nn.blocks.settings import OwnSettings, WatchedSettings, read_settings
from narrowgauge.nn.blocks.spec import BranchSpec
from narrowgauge.nn.experts.find import find_experts
from narrowgauge.nn.experts.modules import FusedExperts, WideExperts
from narrowgauge.nn.fused import blocks, follow_settings, norm, verify
from narrowgauge.nn.fused.head_modules import can_chain
from narrowgauge.nn.fused.plan import BlockParts
from narrowgauge.nn.module_changes import apply_change, find_change

WIDTH = 64
RECIPES = ["bf16", "fp8[products=all]", "fp8-lean[products=all]"]
Changer = Callable[[nn.Module], Any]


class Attention(nn.Module):
    dilution = 1.0

    def __init__(self, shared: Any) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.heads, self.causal, self.sharpness, self.shared = 4, True, 1.0, shared
        self.window: list[int] = [64, 0]
        self.register_buffer("bias", torch.zeros(1, 64), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.qkv(x).split(width, 2)
        q, k, v = (part.view(batch, length, self.heads, -1).transpose(1, 2) for part in parts)
        mask = None
        if self.causal and self.window[0] < length:
            mask = torch.ones(length, length, dtype=torch.bool, device=x.device).tril().triu(1 - self.window[0])
        v = v + self.bias[:, : v.shape[-1]].to(v.dtype)
        mixed = F.scaled_dot_product_attention(q * self.sharpness, k, v, mask, is_causal=self.causal and mask is None)
        return self.proj(mixed.transpose(1, 2).reshape(batch, length, width) * self.dilution)  # type: ignore[no-any-return]


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.act = nn.Linear(WIDTH, 128), nn.Linear(128, WIDTH), F.gelu

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.up(x)))  # type: ignore[no-any-return]


class Block(nn.Module):
    def __init__(self, shared: Any) -> None:
        super().__init__()
        self.norm1, self.attn, self.norm2, self.mlp = nn.LayerNorm(WIDTH), Attention(shared), nn.LayerNorm(WIDTH), MLP()
        self.factor, self.skip, self.shared, self.dropout = 1.0, False, shared, 0.0

    def forward(self, x: Tensor) -> Tensor:
        if self.skip:
            return x
        x = x + self.factor * F.dropout(self.attn(self.norm1(x)), self.dropout, self.training)
        return x + self.shared.inner.branch * self.mlp(self.norm2(x))  # type: ignore[no-any-return]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.shared = argparse.Namespace(inner=argparse.Namespace(branch=1.0), note="")
        self.blocks = nn.ModuleList(Block(self.shared) for _ in range(3))
        with torch.no_grad():
            for block in self.blocks:
                block.attn.qkv.weight.mul_(2)  # type: ignore[union-attr, operator]

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def each(change: Callable[[Any], Any]) -> Changer:
    return lambda model: [change(block) for block in model.blocks]  # type: ignore[union-attr]


def set_in(path: str, name: str, value: Any) -> Changer:
    return each(lambda block: setattr(block.get_submodule(path), name, value))


FUSED: dict[str, Changer] = {
    "causal": set_in("attn", "causal", False),
    "scale of scores": set_in("attn", "sharpness", 3.0),
    "epsilon": set_in("norm1", "eps", 0.5),
    "activation": set_in("mlp", "act", F.relu),
    "heads": set_in("attn", "heads", 8),
    "window": each(lambda block: block.attn.window.__setitem__(0, 5)),
    "buffer": each(lambda block: setattr(block.attn, "bias", torch.ones(1, 64))),
    "default of the class": set_in("attn", "dilution", 0.2),
    "factor": set_in("", "factor", 0.3),
    "one block": lambda model: setattr(model.blocks[1].attn, "causal", False),  # type: ignore[union-attr, index]
}
"""Changes after which a block has another fused form, perhaps with attention by its own code."""
WRITTEN: dict[str, Changer] = {
    "another activation": set_in("mlp", "act", torch.tanh),
    "skipped": lambda model: setattr(model.blocks[1], "skip", True),  # type: ignore[union-attr, index]
    "configuration": lambda model: setattr(model.shared.inner, "branch", 0.2),  # type: ignore[union-attr]
}
"""Changes after which it has none."""


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The paths of blocks that ran fused, in recipes: not those that are compared."""
    found: list[str] = []
    run_block = blocks.run_block

    def run(plan: Any, *args: Any) -> Any:
        found.extend([plan.path] if plan.path else [])
        return run_block(plan, *args)

    monkeypatch.setattr(blocks, "run_block", run)
    return found


@pytest.fixture
def described(monkeypatch: pytest.MonkeyPatch) -> list[nn.Module]:
    """The blocks that were described again."""
    found: list[nn.Module] = []
    describe = fusable_blocks.describe_block
    monkeypatch.setattr(fusable_blocks, "describe_block", lambda block, *a: found.append(block) or describe(block, *a))
    return found


def make(recipe: str) -> tuple[Any, ng.Engine]:
    model = Model()
    engine = ng.Engine(model, torch.optim.AdamW(model.parameters(), 1e-3), recipe, fused=True)
    assert len(engine.conversion.blocks) == 3
    return model, engine


def compute(model: nn.Module, engine: ng.Engine | None, x: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Return the output, and the gradients."""
    if engine is None:
        output = model(x)
        output.square().mean().backward()
    else:
        with engine.forward():
            output = model(x)
            loss = output.float().square().mean()
        engine.backward(loss)
    grads = [torch.zeros_like(p) if p.grad is None else p.grad.float().clone() for p in model.parameters()]
    model.zero_grad()
    return output.detach().float(), grads


def differ(one: Tensor, other: Tensor) -> float:
    return ((one.double() - other).norm() / other.double().norm().clamp(min=1e-30)).item()


def expect_equal(model: nn.Module, engine: ng.Engine, written: nn.Module) -> None:
    """Expect output and gradients of the model as written, up to rounding: much closer than without its changes."""
    x = torch.randn(2, 16, WIDTH, generator=torch.Generator().manual_seed(3))
    (output, grads), (wanted, exact) = compute(model, engine, x), compute(written, None, x)
    (before, old), rough = compute(Model(), None, x), "fp8" in str(engine.recipe)
    for found, right, other in ((output, wanted, before), *[(map(join, (grads, exact, old)))]):
        change = differ(other, right)
        assert differ(found, right) < min(0.25 if rough else 0.02, 0.5 * change if change > 0.01 else 1.0)


def join(grads: list[Tensor]) -> Tensor:
    return torch.cat([grad.flatten() for grad in grads])


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", [*FUSED, *WRITTEN])
def test_a_change_has_its_effect(name: str, recipe: str, fused: list[str]) -> None:
    change = (FUSED | WRITTEN)[name]
    model, engine = make(recipe)
    written = copy.deepcopy(Model())
    expect_equal(model, engine, written)
    change(model)
    change(written)
    x = torch.randn(2, 16, WIDTH, generator=torch.Generator().manual_seed(3))
    assert differ(compute(Model(), None, x)[0], compute(written, None, x)[0]) > 0.05  # or the test shows nothing
    fused.clear()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        expect_equal(model, engine, written)
    slow = [str(one.message) for one in told if issubclass(one.category, SlowRecipeWarning)]
    if name in FUSED:
        assert len(fused) == 3 and not slow
    else:
        attribute = {"another activation": "mlp.act", "skipped": "skip", "configuration": "shared.inner.branch"}[name]
        assert len(fused) == (2 if name == "skipped" else 0) and len(slow) == 1 and attribute in slow[0]


@pytest.mark.parametrize("recipe", RECIPES)
def test_before_the_first_step_too(recipe: str) -> None:
    model, engine = make(recipe)
    written = Model()
    for one in (model, written):
        FUSED["causal"](one)
    expect_equal(model, engine, written)


def test_what_goes_back_and_forth_is_described_once(described: list[nn.Module], fused: list[str]) -> None:
    model, engine = make("bf16")
    written = Model()
    for causal in (False, True, False, True, False):
        for one in (model, written):
            set_in("attn", "causal", causal)(one)
        expect_equal(model, engine, written)
    assert len(described) == 3 and len(fused) == 15


def test_a_count_is_ignored_after_a_while(described: list[nn.Module], fused: list[str]) -> None:
    model, engine = make("bf16")
    written = Model()
    for number in range(8):
        set_in("attn", "calls", number)(model)  # new: it hides nothing
        model.shared.note = f"step {number}"
        expect_equal(model, engine, written)
    assert len(described) == 3 * (follow_settings.HARMLESS + 1) and len(fused) == 24  # calls were not there at first
    for one in (model, written):
        FUSED["causal"](one)
    expect_equal(model, engine, written)
    assert len(fused) == 27


def test_a_number_that_changes_in_each_step_ends_as_written(described: list[nn.Module], fused: list[str]) -> None:
    model, engine = make("bf16")
    written = Model()
    with pytest.warns(SlowRecipeWarning, match=r"norm1\.eps was changed: it changes too often"):
        for number in range(12):
            for one in (model, written):
                set_in("norm1", "eps", 0.1 * number)(one)
            expect_equal(model, engine, written)
    assert len(described) == len(fused) == 3 * (follow_settings.MOST_FORMS - 1)


def test_dropout_that_is_switched_on_later() -> None:
    """Probabilities are read by every call, and are no settings."""
    model, engine = make("bf16")
    set_in("", "dropout", 0.9)(model)
    x = torch.randn(2, 16, WIDTH)
    one, other = (compute(model, engine, x)[0] for _ in range(2))
    assert differ(one, other) > 0.05
    model.eval()
    assert differ(*(compute(model, engine, x)[0] for _ in range(2))) == 0


def test_no_warning_in_evaluations_and_none_twice() -> None:
    model, engine = make("bf16")
    WRITTEN["another activation"](model)
    x = torch.randn(2, 16, WIDTH)
    with warnings.catch_warnings():
        warnings.simplefilter("error", SlowRecipeWarning)
        with torch.no_grad(), engine.forward():
            model(x)
    with pytest.warns(SlowRecipeWarning):
        compute(model, engine, x)
    with warnings.catch_warnings():
        warnings.simplefilter("error", SlowRecipeWarning)
        compute(model, engine, x)


@pytest.mark.parametrize("how", ["copy", "file"])
def test_copies_have_their_own_settings(how: str) -> None:
    model, engine = make("fp8[products=all]")
    x = torch.randn(2, 16, WIDTH)
    before, _ = compute(model, engine, x)
    if how == "copy":
        other = copy.deepcopy(model)
    else:
        file = io.BytesIO()
        torch.save(model, file)
        other = torch.load(io.BytesIO(file.getvalue()), weights_only=False)
    other.shared.inner.branch = 0.2
    FUSED["causal"](other)
    written = Model()
    written.shared.inner.branch = 0.2
    FUSED["causal"](written)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SlowRecipeWarning)
        with engine.forward():
            found = other(x).detach().float()
    assert differ(found, written(x).detach()) < 0.05
    assert differ(compute(model, engine, x)[0], before) < 0.05


def test_checkpointing_that_is_switched_on_later(described: list[nn.Module]) -> None:
    """transformers' flag on every block is no setting: the blocks compute the same."""
    model = without_dropout(LANGUAGE["llama"]())
    engine = ng.Engine(model, torch.optim.AdamW(model.parameters(), 1e-3), "bf16", fused=True)
    ids = make_batch(0, rows=2, length=16)
    losses = []
    for _ in range(2):
        with engine.forward():
            losses.append(model(input_ids=ids, labels=ids).loss)
        engine.backward(losses[-1])
        model.zero_grad()
        model.gradient_checkpointing_enable()
    assert losses[0].item() == losses[1].item() and not described


def test_saving_a_model_of_transformers_changes_nothing(described: list[nn.Module], tmp_path: Any) -> None:
    """It notes classes and dtypes in the configuration."""
    model = without_dropout(LANGUAGE["llama"]())
    engine = ng.Engine(model, torch.optim.AdamW(model.parameters(), 1e-3), "bf16", fused=True)
    ids = make_batch(0, rows=2, length=16)
    for _ in range(2):
        with engine.forward():
            loss = model(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        model.save_pretrained(tmp_path)
    assert not described and not engine.conversion.as_written.reasons


@pytest.mark.parametrize("setting", [("_attn_implementation", "eager"), ("use_cache", False)])
def test_settings_of_transformers(setting: tuple[str, Any], fused: list[str]) -> None:
    model = without_dropout(LANGUAGE["qwen3"]())
    written = copy.deepcopy(model)
    engine = ng.Engine(model, torch.optim.AdamW(model.parameters(), 1e-3), "bf16", fused=True)
    ids = make_batch(0, rows=2, length=16)
    for one in (model, written):
        setattr(one.config, *setting)
    with engine.forward():
        loss = model(input_ids=ids, labels=ids).loss
    assert loss.item() == pytest.approx(written(input_ids=ids, labels=ids).loss.item(), rel=2e-3)
    assert len(fused) == len(engine.conversion.blocks)


@pytest.mark.parametrize("recipe", ["bf16", "fp8[products=all]"])
@pytest.mark.parametrize("where", ["block", "last norm", "hook"])
def test_the_chain_of_built_in_models(recipe: str, where: str) -> None:
    torch.manual_seed(0)
    task = ng.tasks.find("gpt:2x64", seed=0)
    model = task.model()
    with torch.no_grad():
        model.tok.weight.mul_(0.1)  # so that epsilons count
    written = copy.deepcopy(model)
    engine = ng.Engine(model, torch.optim.AdamW(model.parameters(), 1e-3), recipe, fused=True)
    ids = torch.randint(0, 64, (2, 17), generator=torch.Generator().manual_seed(0))
    losses, called = [], []
    for one in (model, written):
        if where == "hook":
            one.blocks[1].down.register_forward_hook(lambda module, inputs, output: called.append(1) or output * 3)
        else:
            (one.blocks[1].norm2 if where == "block" else one.norm).eps = 30.0
    with engine.forward():
        losses.append(model(ids[:, :-1], ids[:, 1:]))
    losses.append(written(ids[:, :-1], ids[:, 1:]))
    losses.append(task.model()(ids[:, :-1], ids[:, 1:]))
    found, wanted = ((loss if isinstance(loss, Tensor) else loss[1]).item() for loss in losses[:2])
    assert found == pytest.approx(wanted, rel=1e-3)
    assert len(called) == (2 if where == "hook" else 0)


def test_norms_outside_of_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(norm, "is_on_gpu", lambda x: True)
    model = without_dropout(LANGUAGE["llama"]())
    engine = ng.Engine(model, torch.optim.AdamW(model.parameters(), 1e-3), "bf16", fused=True)
    assert find_change(model.model.norm, norm.ConvertedNorm) is not None
    x = torch.randn(2, 5, model.config.hidden_size)
    before = model.model.norm(x)
    model.model.norm.variance_epsilon = 4.0
    after = model.model.norm(x)
    assert differ(after, before) > 0.3
    engine.detach()
    torch.testing.assert_close(after, model.model.norm(x))


@pytest.mark.parametrize("kind", [FusedExperts, WideExperts])
def test_experts(kind: type[Any]) -> None:
    model = mixtral()
    written = copy.deepcopy(model)
    recipe = "fp8[products=all]" if kind is FusedExperts else "bf16"
    engine = ng.Engine(model, torch.optim.AdamW(model.parameters(), 1e-3), recipe, fused=True)
    changed = [module for module in model.modules() if hasattr(module, "act_fn") and hasattr(module, "gate_up_proj")]
    if kind is WideExperts:  # engines use it on GPUs only
        for path, module in model.named_modules():
            if module in changed:
                spec = find_experts(model).specs[path]
                apply_change(module, WideExperts(path, spec, OwnSettings.of(module)))
    assert changed and all(find_change(module, kind) is not None for module in changed)
    for module in itertools.chain(changed, written.modules()):
        if hasattr(module, "act_fn"):
            module.act_fn = nn.Tanh()
    ids = make_batch(0, rows=2, length=16)
    with engine.forward():
        loss = model(input_ids=ids, labels=ids).loss
    wanted = written(input_ids=ids, labels=ids).loss.item()
    assert loss.item() == pytest.approx(wanted, rel=2e-3)


def test_embeddings() -> None:
    """Options of the gradient that are set later leave it to torch."""
    from narrowgauge.nn.fused.embedding import fits

    embedding = nn.Embedding(16, 8)
    assert fits(embedding)
    embedding.scale_grad_by_freq = True
    assert not fits(embedding)


class Odd:
    """An object that cannot be copied, and one that is different from itself."""

    def __deepcopy__(self, memo: Any) -> Any:
        raise RuntimeError("not to be copied")

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("not to be compared")

    __hash__ = None  # type: ignore[assignment]

    def __call__(self) -> None: ...


def test_what_is_watched() -> None:
    block = Block(argparse.Namespace(inner=argparse.Namespace(branch=1.0)))
    block.odd, block.many, block.itself = Odd(), list(range(1000)), [block.attn]  # type: ignore[assignment]
    settings = read_settings(block, modules=["mlp"], places=[("", "dropout")], ignored=["attn.sharpness"])
    watched = WatchedSettings(block, settings)
    own = OwnSettings.of(block.attn)
    assert watched.are_same() and own.are_those_of(block.attn) and watched.list_changes() == []
    block.dropout, block.attn.sharpness, block.mlp.act, block.odd = 0.5, 2.0, F.relu, Odd()
    block.many.append(1)  # type: ignore[union-attr, operator]
    block.eval()
    block.extra = 3  # type: ignore[assignment]
    assert watched.are_same()
    block.attn.causal = True  # as it was
    block.norm1.eps = float("1e-5")  # another object
    assert watched.are_same()
    block.attn.dilution = 1.0
    assert watched.list_changes() == ["attn.dilution"]
    del block.attn.dilution
    block.shared.inner.branch, block.attn.window[1] = 2.0, 1
    assert not watched.are_same() and not own.are_those_of(block.attn)
    assert sorted(watched.list_changes()) == ["attn.window", "shared.inner.branch"]
    del block.factor
    assert "factor" in watched.list_changes()
    attention, again = copy.deepcopy((block.attn, OwnSettings.of(block.attn)))
    assert again.are_those_of(attention) and not own.are_those_of(attention)


def test_settings_keep_no_model_alive() -> None:
    """Not even one with attributes that refer to the block."""
    model, engine = make("bf16")
    for block in model.blocks:
        block.itself = block.mlp.forward
        block.attn.enclosed = lambda block=block: block
    compute(model, engine, torch.randn(2, 16, WIDTH))
    FUSED["causal"](model)
    compute(model, engine, torch.randn(2, 16, WIDTH))
    left = weakref.ref(model.blocks[0])
    del model, engine, block
    gc.collect()
    assert left() is None


def test_without_memory_a_block_is_compared_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the next engine looks again: a lack of memory says nothing about the block."""
    monkeypatch.setattr(find, "_known", {})
    tried = []

    def differ_without_memory(*arguments: Any, **options: Any) -> str | None:
        tried.append(1)
        if len(tried) == 1:
            raise torch.OutOfMemoryError("no memory")
        return verify.find_difference(*arguments, **options)

    monkeypatch.setattr(fusable_blocks, "find_difference", differ_without_memory)
    block = Model().blocks[0]
    assert not isinstance(fusable_blocks.describe_again(block), str) and len(tried) > 2
    tried.clear()
    find._known.clear()
    found = find.find_blocks(Model(), torch.device("cpu"), differ_without_memory)
    assert set(found.reasons.values()) == {find.NO_MEMORY} and not find._known
    assert len(find.find_blocks(Model(), torch.device("cpu"), differ_without_memory).specs) == 3


def test_a_block_is_not_compared_with_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """A form that did not run, but the block as it was written, shows nothing."""
    monkeypatch.setattr(find, "_known", {})
    monkeypatch.setattr(BlockParts, "are_intact", lambda parts: False)
    with pytest.warns(SlowRecipeWarning):
        found = find.find_blocks(Model(), torch.device("cpu"), verify.find_difference)
    assert set(found.reasons.values()) == {"its fused form did not run"} and not found.specs


def test_only_branches_that_are_added_as_they_are_form_a_chain() -> None:
    spec = next(iter(find.find_blocks(Model(), torch.device("cpu"), verify.find_difference).specs.values()))
    plain = replace(spec, branch1=BranchSpec())
    assert can_chain(plain) and not can_chain(spec)  # its first branch has dropout
    for branch in (BranchSpec(factor=0.5), BranchSpec(scale="gamma"), BranchSpec(dropout=("", "dropout"))):
        assert not can_chain(replace(plain, branch2=branch))
    assert can_chain(replace(plain, branch1=BranchSpec(factor=0.5)))
    assert not can_chain(replace(plain, order="post"))
