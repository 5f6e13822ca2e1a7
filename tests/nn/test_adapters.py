"""Blocks whose layers have low-rank adapters run fused: exact, as PEFT computes, and as written where a user changed
something."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from model_families import LANGUAGE, NanoBlock, make_batch, without_dropout
from torch import Tensor, nn

from narrowgauge import Engine
from narrowgauge.nn.blocks import find, transformers_small
from narrowgauge.nn.blocks.find import find_blocks
from narrowgauge.nn.fused import blocks, sublayers
from narrowgauge.nn.fused.modules import FusedBlock, mark_parts
from narrowgauge.nn.fused.verify import find_difference, make_fp32_plan
from narrowgauge.nn.module_changes import apply_change, remove_changes
from narrowgauge.nn.products.gemm import add_product

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")
CPU = torch.device("cpu")
Q_AND_V = {
    "llama": ["q_proj", "v_proj"], "qwen3": ["q_proj", "v_proj"], "gpt2": ["c_attn"], "bert": ["query", "value"],
}  # fmt: skip
RANKS = {
    "llama": {"q_proj": 2, "v_proj": 6, "up_proj": 3}, "qwen3": {"k_proj": 2, "down_proj": 6}, "gpt2": {"c_attn": 7},
    "bert": {"query": 2, "dense": 5},
}  # fmt: skip


def adapt(family: str, targets: str = "all", dropout: float = 0.0, layers: int = 2, **options: Any) -> Any:
    """Return a small model with adapters that add something: PEFT's own start at zero."""
    model = LANGUAGE[family](**({"num_hidden_layers": layers} if layers != 2 else {}))
    model = model if dropout else without_dropout(model)
    config = peft.LoraConfig(
        r=4,
        lora_alpha=10,
        lora_dropout=dropout,
        target_modules="all-linear" if targets != "some" else Q_AND_V[family],
        fan_in_fan_out=family == "gpt2",
        rank_pattern=RANKS[family] if targets == "ranks" else {},
        **options,
    )
    return randomize(peft.get_peft_model(model, config)).train()


def randomize(model: Any) -> Any:
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.05)
    return model


def fuse(model: nn.Module, checkpoint: str = "none", count: int = 2) -> nn.Module:
    """Fuse all blocks with FP32 products."""
    found = find_blocks(model, CPU, find_difference)
    assert len(found.specs) == count and not found.reasons, found.reasons
    for path, spec in found.specs.items():
        assert spec.adapters
        block = model.get_submodule(path)
        mark_parts(block, spec)
        apply_change(block, FusedBlock(replace(make_fp32_plan(block, spec), checkpoint=checkpoint)))
    return model


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """For each call that ran fused, the number of its adapters."""
    found: list[int] = []
    run_forward = blocks.run_forward

    def run(given: Any) -> Any:
        found.append(len(given.plan.spec.adapters))
        return run_forward(given)

    monkeypatch.setattr(blocks, "run_forward", run)
    return found


def compute(model: nn.Module, seed: int = 0) -> dict[str, Tensor]:
    """Return the loss and all gradients, with the same random numbers each time."""
    torch.manual_seed(1)
    model.zero_grad()
    tokens = make_batch(seed)
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), **grads}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    largest = max(float(value.abs().max()) for name, value in expected.items() if name != "loss")
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-5 * largest, msg=name)


@pytest.mark.parametrize(
    ("family", "targets"),
    [
        ("llama", "all"), ("llama", "some"), ("llama", "ranks"), ("qwen3", "ranks"), ("gpt2", "all"), ("bert", "ranks"),
    ],
)  # fmt: skip
def test_losses_and_gradients_are_those_of_peft(family: str, targets: str, calls: list[int]) -> None:
    model = adapt(family, targets)
    expected = compute(copy.deepcopy(model))
    assert all("lora_" in name for name in expected if name != "loss")
    fused = fuse(model)
    calls.clear()
    assert_same(compute(fused), expected)
    assert len(calls) == 2 and all(calls)


@pytest.mark.filterwarnings("ignore:.*match:RuntimeWarning")  # PEFT looks for experts
@pytest.mark.parametrize("family", ["deepseek-dense", "t5"])
def test_other_orders_and_the_models_own_attention(family: str, calls: list[int]) -> None:
    model = adapt(family)
    expected = compute(copy.deepcopy(model))
    fused = fuse(model, count=4 if family == "t5" else 2)
    calls.clear()
    assert_same(compute(fused), expected)
    assert all(calls)


@pytest.mark.parametrize(
    ("family", "mode"),
    [
        ("llama", "none"), ("llama", "selective"), ("llama", "full"), ("gpt2", "full"), ("gpt-neox", "full"),
        ("bart", "selective"),
    ],
)  # fmt: skip
def test_dropout_draws_the_numbers_of_peft(family: str, mode: str, calls: list[int]) -> None:
    model = adapt(family, dropout=0.2)
    expected = compute(copy.deepcopy(model))
    fused = fuse(model, mode, 4 if family == "bart" else 2)
    calls.clear()
    assert_same(compute(fused), expected)
    assert all(calls)


@pytest.mark.parametrize(("family", "mode"), [("llama", "selective"), ("llama", "full"), ("gpt2", "full")])
def test_recomputation(family: str, mode: str) -> None:
    model = adapt(family)
    expected = compute(copy.deepcopy(model))
    assert_same(compute(fuse(model, mode, 4 if family == "bart" else 2)), expected)


@pytest.mark.parametrize("frozen", ["nothing", "base layers of attention", "adapters of the MLP", "a"])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_any_part_may_be_frozen_or_trained(family: str, frozen: str) -> None:
    model = adapt(family)
    for name, parameter in model.named_parameters():
        is_frozen = {
            "nothing": False,
            "base layers of attention": "attn" in name and "base_layer" in name,
            "adapters of the MLP": "mlp" in name and "lora" in name,
            "a": "lora_A" in name,
        }[frozen]
        parameter.requires_grad_(not is_frozen)
    expected = compute(copy.deepcopy(model))
    fused = fuse(model)
    assert_same(compute(fused), expected)
    for parameter in fused.parameters():  # also after conversion
        parameter.requires_grad_(True)
    assert set(compute(fused)) == {"loss", *(name for name, _ in fused.named_parameters())}


def test_frozen_layers_save_and_compute_nothing_for_their_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither their products, nor transposed copies, nor an FP8 copy of the input."""
    find_blocks(adapt("llama"), CPU, find_difference)  # compares gradients, unless an earlier test has
    multiplied, saved = [], []
    compute_grad_weight, forward = sublayers.compute_grad_weight, blocks.run_forward
    monkeypatch.setattr(sublayers, "compute_grad_weight", lambda *a: multiplied.append(1) or compute_grad_weight(*a))

    def keep(given: Any) -> Any:
        outputs, left = forward(given)
        kept = left.kept  # now: backward frees it
        saved.append(((kept.attention.h, kept.attention.o, kept.mlp.h), kept.mlp.activated.a))
        return outputs, left

    monkeypatch.setattr(blocks, "run_forward", keep)
    model = adapt("llama")
    train(model, "fp8[products=all]", True, 2)
    assert not multiplied
    for operands, activated in saved[-2:]:
        for operand in operands:
            assert operand.hp is not None and operand.lp is None and operand.lp_t is None
        assert activated.hp is None  # computed again


@pytest.mark.parametrize("checkpoint", ["none", "selective", "full"])
def test_frozen_layers_without_adapters_in_fp8(checkpoint: str) -> None:
    model = without_dropout(LANGUAGE["gpt2"]()).train()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("ln" in name or "wte" in name or "h.0.mlp.c_fc.bias" in name)
    plain = train(copy.deepcopy(model), "bf16", False)
    found = train(model, f"fp8[products=all,checkpoint={checkpoint}]", True)
    assert found == pytest.approx(plain, rel=1e-2) and found[2] < found[0]


def train(model: Any, recipe: str, fused: bool, steps: int = 4) -> list[float]:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    engine = Engine(model, torch.optim.AdamW(trained, lr=1e-2), recipe, fused=fused)
    assert len(engine.conversion.blocks) == (2 if fused else 0) and not engine.conversion.unfused
    losses = []
    for step in range(steps):
        tokens = make_batch(step % 2)
        with engine.forward():
            loss = model(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        assert engine.step().applied
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    ("family", "targets"), [("llama", "all"), ("llama", "some"), ("qwen3", "ranks"), ("gpt2", "all"), ("bert", "ranks")]
)
def test_bf16_and_fp8_losses_agree_with_layers_one_by_one(family: str, targets: str, calls: list[int]) -> None:
    model = adapt(family, targets)
    plain = train(copy.deepcopy(model), "bf16", False)
    calls.clear()
    assert train(copy.deepcopy(model), "bf16", True) == pytest.approx(plain, rel=1e-2)
    assert train(model, "fp8[products=all]", True) == pytest.approx(plain, rel=2e-2)
    assert plain[2] < plain[0] and calls.count(0) == 0 and calls


@pytest.mark.parametrize("recipe", ["bf16[{}]", "fp8[products=all,{}]", "fp8[products=all,frozen=fp8,{}]"])
@pytest.mark.parametrize(("family", "dropout"), [("llama", 0.0), ("gpt2", 0.0), ("llama", 0.1)])
def test_recomputed_inputs_of_activations_change_no_bit(family: str, dropout: float, recipe: str) -> None:
    model = adapt(family, dropout=dropout)
    losses = []
    for way in ("bf16", "recompute"):
        torch.manual_seed(0)
        losses.append(train(copy.deepcopy(model), recipe.format(f"activations={way}"), True))
    assert losses[0] == losses[1]


def change_scale(model: Any) -> None:
    for module in model.modules():
        if hasattr(module, "set_scale"):
            module.set_scale("default", 3.0)


def add_and_set(model: Any) -> None:
    torch.manual_seed(5)
    model.add_adapter("other", peft.LoraConfig(r=3, target_modules="all-linear", init_lora_weights=False))
    model.set_adapter("other")


def set_both(model: Any) -> None:
    add_and_set(model)
    model.base_model.set_adapter(["default", "other"])


CHANGES: dict[str, Any] = {
    "merged": lambda model: model.merge_adapter(),
    "disabled": lambda model: model.base_model.disable_adapter_layers(),
    "scale": change_scale,
    "another adapter": add_and_set,
    "two adapters": set_both,
}


def test_equal_blocks_are_described_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(find, "_known", {})
    model = adapt("llama", layers=5)
    found = find_blocks(model, CPU, lambda *args: None)
    assert len(found.specs) == 5 and len(find._known) == 1


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_after_conversion_is_respected(change: str, calls: list[int]) -> None:
    model = adapt("llama")
    plain, fused = copy.deepcopy(model), fuse(model)
    CHANGES[change](plain)
    CHANGES[change](fused)
    calls.clear()
    tokens = make_batch()
    torch.testing.assert_close(fused(input_ids=tokens).logits, plain(input_ids=tokens).logits)
    assert not calls


def test_blocks_run_fused_again_after_a_change_was_undone(calls: list[int]) -> None:
    model = adapt("llama")
    plain, fused, tokens = copy.deepcopy(model), fuse(model), make_batch()
    for one in (plain, fused):
        calls.clear()
        with one.disable_adapter():
            one(input_ids=tokens)
        one.merge_adapter()
        one(input_ids=tokens)
        assert not calls
        one.unmerge_adapter()
    torch.testing.assert_close(fused(input_ids=tokens).logits, plain(input_ids=tokens).logits, rtol=1e-4, atol=1e-5)
    assert len(calls) == 2


def test_the_current_probability_of_dropout_counts(calls: list[int]) -> None:
    model = adapt("llama", dropout=0.2)
    plain, fused = copy.deepcopy(model), fuse(model)
    calls.clear()
    for probability in (0.5, 0.0):
        for one in (plain, fused):
            for name, module in one.named_modules():
                if isinstance(module, nn.Dropout) and "lora" in name:
                    module.p = probability
        assert_same(compute(fused), compute(plain))
    assert len(calls) == 4


def test_an_inactive_adapter_does_not_matter(calls: list[int]) -> None:
    model = adapt("llama")
    add_and_set(model)
    expected = compute(copy.deepcopy(model))
    assert any("other" in name for name in expected) and not any("default" in name for name in expected)
    fused: Any = fuse(model)
    calls.clear()
    assert_same(compute(fused), expected)
    assert len(calls) == 2
    fused.set_adapter("default")
    assert any("default" in name for name in compute(fused)) and len(calls) == 2


@pytest.mark.parametrize("options", [{"use_dora": True}, {"lora_bias": True}, {"both": True}])
def test_other_adapters_are_refused_with_a_reason(options: dict[str, Any]) -> None:
    both = options.pop("both", False)
    model = adapt("gpt2" if "lora_bias" in options else "llama", **options)
    if both:
        set_both(model)
    found = find_blocks(model, CPU, find_difference)
    assert not found.specs
    assert all("adapter" in reason or "runs more than once" in reason for reason in found.reasons.values())


def test_rank_stabilized_scales_are_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(find, "_known", {})
    spec = next(iter(find_blocks(adapt("llama", "ranks", use_rslora=True), CPU, lambda *args: None).specs.values()))
    assert [one.scale for one in spec.adapters[:2]] == [10 / 2**0.5, 5.0]


class Own(nn.Module):
    """Somebody's own adapter: its scale is no attribute, so it has to be 1."""

    def __init__(self, base: nn.Linear, scale: float) -> None:
        super().__init__()
        self.base = base
        self.one, self.two = nn.Linear(base.in_features, 4, bias=False), nn.Linear(4, base.out_features, bias=False)
        self.get_scale = lambda: scale

    def forward(self, x: Tensor) -> Tensor:
        added: Tensor = self.base(x) + self.get_scale() * self.two(self.one(x))
        return added


@pytest.mark.parametrize("scale", [1.0, 0.7])
def test_ones_own_adapter(scale: float) -> None:
    block = NanoBlock(64, 4, True)
    block.c_fc = Own(block.c_fc, scale)  # type: ignore[assignment]
    found = find_blocks(nn.ModuleList([block]), CPU, find_difference)
    assert ("0" in found.specs) == (scale == 1.0)
    if found.specs:
        assert [adapter.path for adapter in found.specs["0"].adapters] == ["c_fc"]


def test_blocks_too_large_for_a_cpu_are_compared_by_a_small_one_with_the_same_adapters() -> None:
    model = adapt("llama", "ranks", use_rslora=True)
    block = model.base_model.model.model.layers[0]
    small: Any = transformers_small.make_small(block)
    assert [name for name, _ in small.named_parameters()] == [name for name, _ in block.named_parameters()]
    ranks = {path: part.r for path, part in small.named_modules() if hasattr(part, "lora_A")}
    assert ranks["self_attn.q_proj"] == {"default": 2} and ranks["mlp.down_proj"] == {"default": 4}
    assert small.mlp.up_proj.scaling == block.mlp.up_proj.scaling
    model.merge_adapter()
    assert transformers_small.make_small(block) is None
    dora = adapt("llama", use_dora=True).base_model.model.model.layers[0]
    assert transformers_small.make_small(dora) is None


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_of_the_library(reentrant: bool, calls: list[int]) -> None:
    model = adapt("llama")
    expected = compute(copy.deepcopy(model))
    fused: Any = fuse(model)
    fused.gradient_checkpointing_enable({"use_reentrant": reentrant})
    fused.enable_input_require_grads()
    calls.clear()
    assert_same(compute(fused), expected)
    assert calls and all(calls)


@pytest.mark.parametrize(
    "recipe", ["fp8[products=all,checkpoint=full]", "fp8[products=all,checkpoint=selective]", "fp8-lean", "bf16-lean"]
)
def test_recipes(recipe: str) -> None:
    model = adapt("llama", "ranks")
    plain = train(copy.deepcopy(model), "bf16", False)
    assert train(model, recipe, True) == pytest.approx(plain, rel=3e-2)


def test_a_base_in_bf16_with_adapters_in_fp32() -> None:
    def make() -> Any:
        base = without_dropout(LANGUAGE["llama"]()).bfloat16()
        config = peft.LoraConfig(r=4, lora_alpha=10, target_modules="all-linear")  # as in adapt, so blocks are known
        return randomize(peft.get_peft_model(base, config)).train()

    dtypes = {name.rpartition("lora_")[1]: p.dtype for name, p in make().named_parameters() if "layers" in name}
    assert dtypes == {"": torch.bfloat16, "lora_": torch.float32}
    plain = train(make(), "bf16-lean", False)
    assert train(make(), "fp8-lean[products=all]", True) == pytest.approx(plain, rel=1e-2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_product_is_added_to_columns(dtype: torch.dtype) -> None:
    a, b, whole = (torch.randn(shape).to(dtype) for shape in ((12, 4), (4, 6), (12, 16)))
    product = 0.5 * (a.double() @ b.double())
    for replace_values in (False, True):
        found = whole.clone()
        add_product(found[:, 5:11], a, b, 0.5, replace=replace_values)
        expected = whole.double()
        expected[:, 5:11] = product if replace_values else expected[:, 5:11] + product
        torch.testing.assert_close(found, expected.to(dtype))


def test_an_engine_reports_adapters_and_saves_what_peft_loads(tmp_path: Any) -> None:
    model, plain = adapt("llama"), without_dropout(LANGUAGE["llama"]())
    engine = Engine(model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2), "fp8")
    assert len(engine.conversion.blocks) == 2 and not engine.conversion.unfused
    adapters = [layer for layer in engine.conversion.layers if "lora_" in layer.path]
    assert len(adapters) == 28 and {layer.part_of for layer in adapters} == {"block"}
    assert {matrix.formats for matrix in engine.conversion.matrices if "lora_" in matrix.name} == {("bf16",) * 3}
    before = {name: p.clone() for name, p in model.named_parameters() if "lora_" not in name}
    for step in range(2):
        with engine.forward():
            loss = model(input_ids=make_batch(step), labels=make_batch(step)).loss
        engine.backward(loss)
        engine.step()
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters() if name in before)
    model.save_pretrained(tmp_path)
    assert {"adapter_config.json", "adapter_model.safetensors"} <= {path.name for path in tmp_path.iterdir()}
    loaded = peft.PeftModel.from_pretrained(plain, tmp_path).eval()
    remove_changes(model.eval())
    tokens = make_batch()
    with torch.no_grad():
        assert torch.equal(loaded(input_ids=tokens).logits, model(input_ids=tokens).logits)


def test_adapters_of_experts_are_reported_as_they_compute() -> None:
    """PEFT multiplies their weights itself, so that converted layers would never run."""
    config = transformers.MixtralConfig(
        hidden_size=128, intermediate_size=128, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
        num_local_experts=4, vocab_size=128,
    )  # fmt: skip
    stacks = ["experts.gate_up_proj", "experts.down_proj"]
    options = peft.LoraConfig(r=16, target_modules=["q_proj"], target_parameters=stacks, init_lora_weights=False)
    model = peft.get_peft_model(transformers.MixtralForCausalLM(config).train(), options)
    trained = [p for p in model.parameters() if p.requires_grad]
    engine = Engine(model, torch.optim.AdamW(trained), "fp8[products=all]")
    formats = {matrix.name: matrix.formats for matrix in engine.conversion.matrices}
    adapters = {name for name in formats if "experts" in name and "lora_" in name}
    assert len(adapters) == 4 and {formats[name] for name in adapters} == {("bf16",) * 3}
    assert {formats[name] for name in formats if name.endswith(("gate_up_proj", "down_proj"))} == {("fp8",) * 3}
    with engine.forward():
        loss = model(input_ids=make_batch() % 128, labels=make_batch() % 128).loss
    engine.backward(loss)
    assert all(p.grad is not None and p.grad.any() for p in trained)
