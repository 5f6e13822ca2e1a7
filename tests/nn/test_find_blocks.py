"""Blocks are recognized by what they compute: families as they are, traps, and everything that must be respected."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from model_families import LANGUAGE, OTHERS, NanoBlock
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from narrowgauge.models.gpt import GPT, GPTConfig
from narrowgauge.models.llama import Llama, LlamaConfig
from narrowgauge.nn.blocks import find as find_module
from narrowgauge.nn.blocks.find import FoundBlocks, find_blocks
from narrowgauge.nn.convert import convert
from narrowgauge.nn.fused.modules import FusedBlock, mark_parts
from narrowgauge.nn.fused.verify import find_difference, make_fp32_plan
from narrowgauge.nn.module_changes import apply_change

EXPECTED = {
    "llama": ("pre", "rotary"), "llama-bias": ("pre", "rotary"), "mistral": ("pre", "rotary"),
    "qwen2": ("pre", "rotary"), "qwen3": ("pre", "rotary"), "gemma2": ("pre", "own"), "gemma3": ("pre", "rotary"),
    "phi3": ("pre", "rotary"), "phi": ("parallel", "rotary"), "starcoder2": ("pre", "rotary"),
    "cohere": ("parallel", "rotary"), "gpt2": ("pre", "plain"), "gpt-neox": ("parallel", "own"),
    "bert": ("post", "plain"), "roberta": ("post", "plain"), "distilbert": ("post", "plain"), "nano": ("pre", "plain"),
    "vit": ("pre", "plain"), "clip": ("pre", "plain"), "siglip": ("pre", "plain"),
    "olmo2": ("pre", "rotary"), "gpt-j": ("parallel", "own"), "bloom": ("pre", "own"), "opt": ("pre", "plain"),
    "torch-post": ("post", "own"), "torch-pre": ("pre", "plain"), "timm-style": ("pre", "plain"),
    "litgpt-style": ("pre", "rotary"), "deepseek-dense": ("pre", "own"), "dinov2": ("pre", "plain"),
    "timm-style-all": ("pre", "own"), "t5-gated": ("pre", "own"),
}  # fmt: skip


def find(model: nn.Module) -> FoundBlocks:
    return find_blocks(model, torch.device("cpu"), find_difference)


@pytest.mark.parametrize("family", EXPECTED)
def test_families_are_recognized(family: str) -> None:
    found = find((LANGUAGE | OTHERS)[family]())
    assert not found.reasons and len(found.specs) == 2
    assert {(spec.order, spec.attention.kind) for spec in found.specs.values()} == {EXPECTED[family]}


def test_nothing_of_the_model_changes() -> None:
    model = LANGUAGE["qwen3"]()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    find(model)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


class Trap(NanoBlock):
    """The names of a block that is fused, and one thing that is different."""

    def __init__(self, what: str) -> None:
        super().__init__(64, 4, True)
        self.what = what
        self.scale = nn.Parameter(torch.full((64,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        first = self.ln_1(x)
        parts = self.c_attn(first).split(width, 2)
        q, k, v = (part.view(batch, length, self.n_head, -1).transpose(1, 2) for part in parts)
        if self.what == "attention to the future":
            mixed = nn.functional.scaled_dot_product_attention(q, k, v)
        else:
            mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        branch = self.c_proj(mixed.transpose(1, 2).reshape(batch, length, width))
        if self.what == "scaled branch":
            branch = branch * self.scale.square()
        x = (x if self.what != "scaled stream" else 0.9 * x) + branch
        u = self.c_fc(self.ln_1(x) if self.what == "norm used twice" else self.ln_2(x))
        if self.what == "another activation":
            u = nn.functional.gelu(u) + 0.01 * u
        elif self.what == "clamped":
            u = nn.functional.gelu(u).clamp(max=1.0)
        else:
            u = nn.functional.gelu(u)
        return x + self.c_out(u)


REFUSED = {
    "scaled branch": "no norm reads the sum",
    "scaled stream": "no norm reads the sum",
    "norm used twice": "",
    "another activation": "activation is none of",
    "clamped": "activation is none of",
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_block_with_familiar_names_that_computes_something_else_is_not_fused(what: str) -> None:
    found = find(nn.ModuleList([Trap(what), Trap(what)]))
    assert not found.specs
    assert all(REFUSED[what] in reason for reason in found.reasons.values()) and len(found.reasons) == 2


def test_the_mask_of_attention_is_observed() -> None:
    spec = find(nn.ModuleList([Trap("attention to the future")])).specs["0"]
    assert spec.attention.kind == "plain" and not spec.attention.causal


class Positioned(NanoBlock):
    """Attention that depends on position ids, which are optional."""

    def forward(self, x: Tensor, position_ids: Tensor | None = None) -> Tensor:
        batch, length, width = x.shape
        parts = self.c_attn(self.ln_1(x)).split(width, 2)
        q, k, v = (part.view(batch, length, self.n_head, -1).transpose(1, 2) for part in parts)
        if position_ids is not None:
            q = q * (1 + 0.1 * position_ids[:, None, :, None])
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.c_out(nn.functional.gelu(self.c_fc(self.ln_2(x))))


def test_attention_that_reads_positions_stays_the_models_own() -> None:
    assert find(nn.ModuleList([Positioned(64, 4, True)])).specs["0"].attention.kind == "own"


class Subclass(NanoBlock):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


class Wrapped(nn.Module):
    """A linear layer with a low-rank addition that has a bias."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base
        self.down, self.up = nn.Linear(base.in_features, 4, bias=False), nn.Linear(4, base.out_features)

    def forward(self, x: Tensor) -> Tensor:
        added: Tensor = self.base_layer(x) + self.up(self.down(x))
        return added


def hooked() -> nn.Module:
    block = NanoBlock(64, 4, True)
    block.c_fc.register_forward_hook(lambda module, args, output: None)
    return block


def replaced() -> nn.Module:
    block = NanoBlock(64, 4, True)
    own = block.c_fc.forward
    block.c_fc.forward = lambda x: own(x)  # type: ignore[method-assign]
    return block


def parametrized() -> nn.Module:
    block = NanoBlock(64, 4, True)
    parametrizations.weight_norm(block.c_fc)
    return block


def adapted() -> nn.Module:
    block = NanoBlock(64, 4, True)
    block.c_attn = Wrapped(block.c_attn)  # type: ignore[assignment]
    return block


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (lambda: Subclass(64, 4, True), "its output is not the sum"),
        (hooked, "c_fc has hooks"),
        (replaced, "the forward of c_fc was replaced"),
        (parametrized, ""),
        (adapted, "c_attn.up reads the output of c_attn.down, but they are not a low-rank adapter"),
    ],
    ids=["subclass", "hooks", "replaced", "parametrized", "adapter"],
)
def test_what_a_user_changed_in_a_block_is_respected(build: Any, reason: str) -> None:
    found = find(nn.ModuleList([build()]))
    assert not found.specs and reason in found.reasons["0"]


def test_blocks_that_differ_by_their_number_are_not_treated_alike() -> None:
    class Numbered(NanoBlock):
        def __init__(self, number: int) -> None:
            super().__init__(64, 4, True)
            self.layer_idx = number

        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            return y if self.layer_idx == 0 else y + 1.0

    found = find(nn.ModuleList([Numbered(0), Numbered(1)]))
    assert list(found.specs) == ["0"] and list(found.reasons) == ["1"]


@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_a_large_built_in_block_is_described_by_a_small_one(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As for forecasts of models that fit no machine: nothing large may be run, or even made."""
    with torch.device("meta"):
        if name == "gpt":
            model: nn.Module = GPT(GPTConfig(layers=2, width=4096, heads=32, context=64, vocab=128))
        else:
            sizes = {"layers": 2, "width": 16384, "heads": 128, "kv_heads": 8, "hidden": 53248}
            model = Llama(LlamaConfig(**sizes, context=64, vocab=128))
    monkeypatch.setattr("narrowgauge.nn.blocks.find._known", {})
    spec = find(model).specs["blocks.0"]
    form = ("plain", 32, 32) if name == "gpt" else ("rotary", 128, 8)
    assert (spec.attention.kind, spec.attention.heads, spec.attention.kv_heads) == form


def test_a_large_block_of_another_family_is_not_compared_on_a_cpu() -> None:
    with torch.device("meta"):
        found = find(nn.ModuleList([NanoBlock(2048, 16, True)]))
    assert not found.specs and "too many to compare" in found.reasons["0"]


@pytest.mark.parametrize("count", [1, 2, 4])
def test_blocks_in_lists_of_lists_are_found(count: int) -> None:
    """Stages, each with its own blocks, as in models of images; also in a Sequential."""
    stages = [nn.ModuleList(NanoBlock(64, 4, False) for _ in range(count)) for _ in range(2)]
    for model in (nn.ModuleList(stages), nn.Sequential(nn.Linear(64, 64), *stages)):
        found = find(model)
        assert len(found.specs) == 2 * count and not found.reasons


def test_a_list_that_the_model_calls_one_by_one_is_no_block() -> None:
    """Attention and MLP of a layer in a list, without a module around both."""
    parts = [nn.Linear(64, 192), nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 64)]
    found = find(nn.ModuleList([nn.ModuleList(parts)]))
    assert found.reasons == {"0": "it is a list of modules, which the model calls one by one"} and not found.specs


def test_one_norm_without_weight_may_serve_twice() -> None:
    blocks = [NanoBlock(64, 4, False) for _ in range(2)]
    for block in blocks:
        block.ln_1 = block.ln_2 = nn.LayerNorm(64, elementwise_affine=False)
    found = find(nn.ModuleList(blocks))
    assert list(found.specs) == ["0", "1"] and not found.reasons
    experts = nn.ModuleDict(
        {"experts": nn.ModuleList(nn.Sequential(*(nn.Linear(8, 8, bias=False),) * 3) for _ in "ab")}
    )
    assert not find(experts).reasons


def test_convolutional_nets_have_no_blocks() -> None:
    net = nn.Sequential(*[nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()) for _ in range(3)])
    found = find(net)
    assert not found.specs and not found.reasons


class AddsPositions(nn.Module):
    """A block with positions that are added, to queries and keys or to the hidden state, and may be missing."""

    def __init__(self, to_stream: bool) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(64), nn.LayerNorm(64)
        self.q, self.k, self.v, self.out = (nn.Linear(64, 64) for _ in range(4))
        self.up, self.down = nn.Linear(64, 96), nn.Linear(96, 64)
        self.heads, self.to_stream = 4, to_stream

    def forward(self, x: Tensor, position_embeddings: Tensor | None = None) -> Tensor:
        added = 0.0 if position_embeddings is None else position_embeddings
        if self.to_stream:
            x, added = x + added, 0.0
        h = self.norm1(x)
        parts = (self.q(h) + added, self.k(h) + added, self.v(h))
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


@pytest.mark.parametrize("to_stream", [False, True])
def test_positions_that_were_not_verified_are_not_ignored(to_stream: bool) -> None:
    torch.manual_seed(0)
    block, x, positions = AddsPositions(to_stream), *torch.randn(2, 2, 12, 64)
    model = nn.Sequential(block, AddsPositions(to_stream))
    found = find_blocks(model, torch.device("cpu"), find_difference)
    assert list(found.specs) == ["0", "1"]
    expected = block(x), block(x, positions)
    mark_parts(block, found.specs["0"])
    apply_change(block, FusedBlock(make_fp32_plan(block, found.specs["0"])))
    for got, wanted in zip((block(x), block(x, positions)), expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


def test_a_user_who_wants_determinism_gets_fused_blocks_as_well(monkeypatch):
    def forbid(*args, **kwargs):
        assert not torch.are_deterministic_algorithms_enabled()
        return original(*args, **kwargs)

    original = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", forbid)
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        model = LANGUAGE["llama"]()
        assert len(convert(model, "fp8[products=all]").blocks) == 2
        assert torch.are_deterministic_algorithms_enabled()
        assert torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


SHRUNK = ["llama", "qwen3", "gemma2", "gemma3", "phi3", "gpt2", "gpt-neox", "bert", "opt", "t5", "bart"]


@pytest.mark.parametrize("family", SHRUNK)
def test_a_block_that_is_too_large_for_a_cpu_is_described_from_a_small_one(family, monkeypatch):
    """Forecasts describe blocks of any size, without a GPU."""
    whole = find(LANGUAGE[family]())
    monkeypatch.setattr(find_module, "_known", {})
    monkeypatch.setattr(find_module, "LARGEST_ON_CPU", 100)
    with torch.device("meta"):
        large = LANGUAGE[family]()
    found = find(large)
    assert found.specs == whole.specs and found.specs
