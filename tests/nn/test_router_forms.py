"""Routers with other forms than one row for each expert: choices that are no experts, several layers, stacks apart."""

import pytest
import torch
from torch import nn

import narrowgauge as ng
from narrowgauge.nn.experts.routers import find_routers

transformers = pytest.importorskip("transformers")
SIZES = {
    "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2, "vocab_size": 64,
    "num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 64,
}  # fmt: skip


class Stacked(nn.Module):
    def __init__(self, experts, inner=64, extra=0):
        super().__init__()
        self.up = nn.Parameter(torch.randn(experts + extra, 2 * inner, 64) / 8)
        self.down = nn.Parameter(torch.randn(experts, 64, inner) / 8)

    def forward(self, x, index, weights):
        gate, up = torch.einsum("nd,nkfd->nkf", x, self.up[index].to(x.dtype)).chunk(2, -1)
        made = torch.einsum("nkf,nkdf->nkd", nn.functional.silu(gate) * up, self.down[index].to(x.dtype))
        return (made * weights[..., None]).sum(1)


class SkippingMixture(nn.Module):
    """Tokens may choose no expert: the router has a row for that, and the first stack in some models too."""

    def __init__(self, name="router", layers=1, extra=0, rows=9):
        super().__init__()
        self.experts = Stacked(8, extra=extra)
        parts = [part for _ in range(layers - 1) for part in (nn.Linear(64, 64), nn.GELU())]
        self.add_module(name, nn.Sequential(*parts, nn.Linear(64, rows, bias=False)))
        self.name = name
        self.shared_experts = nn.Sequential(nn.Linear(64, 16), nn.SiLU(), nn.Linear(16, 64))

    def forward(self, x):
        scores = self.get_submodule(self.name)(x).softmax(-1)
        assert scores.dtype is torch.float32
        weights, index = scores.topk(2)
        skips = index >= 8
        return self.shared_experts(x) + self.experts(x, index.masked_fill(skips, 0), weights.masked_fill(skips, 0.0))


@pytest.mark.parametrize("recipe", ["bf16", "fp8[products=all]", "fp8-lean[products=all]"])
@pytest.mark.parametrize("changes", [{}, {"extra": 2}, {"layers": 2}, {"name": "gate", "layers": 2, "rows": 8}])
def test_all_of_a_router_stays_in_fp32(changes, recipe):
    model = nn.Sequential(nn.Linear(64, 64), SkippingMixture(**changes), nn.Linear(64, 16))
    router = f"1.{changes.get('name', 'router')}"
    linears = [f"{router}.{2 * i}" for i in range(changes.get("layers", 1))]
    assert list(find_routers(model)) == [router, *linears]
    engine = ng.Engine(model, torch.optim.AdamW(model.parameters()), recipe=recipe)
    formats = {m.path: m.formats for m in engine.conversion.matrices}
    assert all(formats[path] == ("fp32",) * 3 for path in linears)
    assert all(model.get_submodule(path).weight.dtype is torch.float32 for path in linears)
    with engine.forward():
        loss = model(torch.randn(32, 64)).float().square().mean()
    engine.backward(loss)
    assert engine.step().applied


@pytest.mark.parametrize("changes", [{"name": "scores"}, {"rows": 17}])
def test_other_matrices_with_more_rows_than_experts_are_no_routers(changes):
    assert not find_routers(SkippingMixture(**changes))


def test_routers_of_experts_in_two_modules_are_found():
    """JetMoE has mixtures in attention, too, and a module for each stack."""
    model = transformers.JetMoeForCausalLM(transformers.JetMoeConfig(**SIZES, kv_channels=16))
    found = find_routers(model)
    assert [path for path in found if path.endswith(".layer")] == [
        f"model.layers.{i}.{mixture}.router.layer" for i in (0, 1) for mixture in ("mlp", "self_attention.experts")
    ]
    tokens, logits = torch.randint(0, 64, (2, 16)), []
    model.model.layers[0].mlp.router.layer.register_forward_hook(lambda _, __, made: logits.append(made))
    engine = ng.Engine(model, torch.optim.AdamW(model.parameters()), recipe="bf16")
    with engine.forward():
        loss = model(input_ids=tokens, labels=tokens).loss
    engine.backward(loss)
    assert logits[0].dtype is torch.float32


def test_kernels_of_convolutions_are_no_experts():
    parts = {"one": nn.Conv1d(64, 64, 3), "two": nn.Conv1d(64, 64, 3), "gate": nn.Linear(64, 64)}
    assert not find_routers(nn.ModuleDict(parts))


class OtherwiseNamed(nn.Module):
    """Experts in a list whose name says nothing, beside a router whose name does."""

    def __init__(self, rows=8, name="gate", modules="ffns"):
        super().__init__()
        self.names = name, modules
        self.add_module(modules, nn.ModuleList(nn.Linear(64, 64) for _ in range(8)))
        self.add_module(name, nn.Linear(64, rows, bias=False))

    def forward(self, x):
        router, modules = (self.get_submodule(name) for name in self.names)
        scores = router(x).softmax(-1)
        return sum(scores[:, i, None] * part(x) for i, part in enumerate(modules))


@pytest.mark.parametrize("recipe", ["bf16", "fp8[products=all]", "fp8-lean[products=all]"])
def test_lists_of_experts_may_have_any_name_beside_a_router(recipe):
    model = nn.Sequential(nn.Linear(64, 64), OtherwiseNamed())
    assert list(find_routers(model)) == ["1.gate"]
    engine = ng.Engine(model, torch.optim.AdamW(model.parameters()), recipe=recipe)
    with engine.forward():
        assert model[1].gate(torch.randn(8, 64)).dtype is torch.float32
    assert model[1].gate.weight.dtype is torch.float32


class AroundExperts(nn.Module):
    """A module around the list of experts, as in DeepSpeed and st-moe-pytorch; the router is beside that module."""

    def __init__(self, name="gate", around="experts"):
        super().__init__()
        self.name, self.around = name, around
        self.add_module(around, nn.ModuleDict({"experts": nn.ModuleList(nn.Linear(64, 64) for _ in range(8))}))
        self.add_module(name, nn.ModuleDict({"to_gates": nn.Linear(64, 8, bias=False)}))

    def forward(self, x):
        scores = self.get_submodule(self.name)["to_gates"](x).softmax(-1)
        assert scores.dtype is torch.float32
        return sum(scores[:, i, None] * part(x) for i, part in enumerate(self.get_submodule(self.around)["experts"]))


@pytest.mark.parametrize("recipe", ["bf16", "fp8[products=all]", "fp8-lean[products=all]"])
def test_routers_beside_a_module_around_the_experts_stay_in_fp32(recipe):
    model = nn.Sequential(nn.Linear(64, 64), AroundExperts(), nn.Linear(64, 8))
    assert list(find_routers(model)) == ["1.gate", "1.gate.to_gates"]
    engine = ng.Engine(model, torch.optim.AdamW(model.parameters()), recipe=recipe)
    with engine.forward():
        loss = model(torch.randn(32, 64)).float().square().mean()
    engine.backward(loss)
    assert engine.step().applied
    assert model[1].gate["to_gates"].weight.dtype is torch.float32


@pytest.mark.parametrize("changes", [{"name": "scores"}, {"around": "parts"}])
def test_what_is_beside_a_module_around_experts_is_a_router_by_its_name(changes):
    assert not find_routers(nn.Sequential(AroundExperts(**changes)))


@pytest.mark.parametrize("changes", [{"rows": 16}, {"name": "head"}, {"modules": "shared_parts"}])
def test_other_lists_beside_other_matrices_are_no_experts(changes):
    assert not find_routers(nn.Sequential(OtherwiseNamed(**changes)))
    deeper = nn.ModuleDict({"layers": OtherwiseNamed().ffns, "decoder": nn.ModuleDict({"gate": nn.Linear(64, 8)})})
    assert not find_routers(deeper)


@pytest.mark.parametrize("family", ["Mixtral", "JetMoe"])
@pytest.mark.parametrize("recipe", ["bf16", "fp8[products=all]", "fp8-lean[products=all]"])
def test_routers_beside_experts_with_adapters_stay_in_fp32(family, recipe):
    """PEFT wraps the module with the stacks, once for each stack."""
    peft = pytest.importorskip("peft")
    sizes = SIZES if family == "Mixtral" else SIZES | {"kv_channels": 16}
    model = getattr(transformers, f"{family}ForCausalLM")(getattr(transformers, f"{family}Config")(**sizes)).train()
    before = find_routers(model)
    stacks = sorted({".".join(name.split(".")[-2:]) for name, p in model.named_parameters() if p.dim() == 3})
    peft.inject_adapter_in_model(peft.LoraConfig(r=4, target_modules=[], target_parameters=stacks), model)
    assert find_routers(model) == before and before
    engine = ng.Engine(model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad]), recipe=recipe)
    formats = {m.path: m.formats for m in engine.conversion.matrices}
    routers = [path for path in formats if any(path.startswith(name) for name in before)]
    assert routers and all(formats[path] == ("fp32",) * 3 for path in routers)
