"""Muon: torch's bits, exact masters, states, groups, and one optimizer for all parameters of a model."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import narrowgauge as ng
from narrowgauge.errors import UsageError
from narrowgauge.models.gpt import GPT, GPTConfig
from narrowgauge.optim import newton_schulz
from narrowgauge.optim.masters import join_fp32
from narrowgauge.optim.newton_schulz import orthogonalize

pytestmark = pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # a CPU without BF16 products
SHAPES = [(32, 48), (48, 32), (40, 40)]


def make(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]


def set_grads(parameters: list[nn.Parameter], step: int, dtype: torch.dtype | None = None) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for parameter in parameters:
        parameter.grad = (0.1 * torch.randn(parameter.shape, generator=generator)).to(dtype or parameter.dtype)


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
@pytest.mark.parametrize(
    "options",
    [
        {}, {"nesterov": False}, {"adjust_lr_fn": "match_rms_adamw", "weight_decay": 0.0},
        {"momentum": 0.8, "ns_steps": 3},
        {"ns_coefficients": (2.0, -1.5, 0.5), "eps": 1e-5},
    ],
)  # fmt: skip
def test_the_bits_are_those_of_torch(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """With products in BF16, as torch's Muon computes them on any CPU."""
    monkeypatch.setattr(newton_schulz, "_cpu_multiplies_bf16", lambda: True)
    ours, theirs = make(), make()
    mine, others = ng.optim.Muon(ours, lr=0.02, **options), torch.optim.Muon(theirs, lr=0.02, **options)
    for step in range(5):
        set_grads(ours, step)
        set_grads(theirs, step)
        mine.step()
        others.step()
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("native", [True, False])
def test_products_are_in_bf16_where_the_cpu_has_them(native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Elsewhere they take a hundred times as long as in FP32. The results are the same up to the order of sums."""
    seen = set()

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
                seen.add(args[-1].dtype)
            return func(*args, **(kwargs or {}))

    matrix = torch.randn(24, 60, generator=torch.Generator().manual_seed(0))
    expected = orthogonalize(matrix)
    monkeypatch.setattr(newton_schulz, "_cpu_multiplies_bf16", lambda: native)
    with Recorder():
        found = orthogonalize(matrix)
    assert seen == {torch.bfloat16 if native else torch.float32} and found.dtype is torch.bfloat16
    assert (found - expected).norm() < 0.02 * expected.norm()


def test_orthogonalized_matrices_have_singular_values_near_one() -> None:
    stack = torch.randn(3, 24, 60, generator=torch.Generator().manual_seed(0))
    made = orthogonalize(stack)
    values = torch.linalg.svdvals(made.float())
    assert values.min() > 0.6 and values.max() < 1.3
    for one, whole in zip(stack, made, strict=True):
        assert (orthogonalize(one) - whole).norm() < 0.02 * whole.norm()
        assert (orthogonalize(one.T.contiguous()).T - whole).norm() < 0.02 * whole.norm()


def test_split_masters_are_exact_for_500_steps() -> None:
    """Weights in BF16 with 16 more bits have the bits of FP32 weights, given the same gradients."""
    wide = [nn.Parameter(p.detach().bfloat16().float()) for p in make()]
    narrow = [nn.Parameter(p.detach().bfloat16()) for p in wide]
    plain = ng.optim.Muon(wide, lr=0.02)
    lean = ng.optim.Muon(narrow, lr=0.02, master="split", gradients="fp32")
    for step in range(500):
        set_grads(wide, step)
        set_grads(narrow, step, torch.float32)
        plain.step()
        lean.step()
        if step % 50 == 0 or step == 499:
            assert all(torch.equal(join_fp32(b), a) for a, b in zip(wide, narrow, strict=True)), step
    assert all(b.dtype is torch.bfloat16 and not torch.equal(b.float(), a) for a, b in zip(wide, narrow, strict=True))


@pytest.mark.parametrize("moments", ["bf16", "8bit"])
def test_short_momentum_moves_weights_nearly_as_far(moments: str) -> None:
    exact, short = make(), make()
    plain, other = ng.optim.Muon(exact, lr=0.02), ng.optim.Muon(short, lr=0.02, moments=moments)
    begin = [p.detach().clone() for p in exact]
    for step in range(20):
        for parameters in (exact, short):
            set_grads(parameters, step % 3)
        plain.step()
        other.step()
    for a, b, before in zip(exact, short, begin, strict=True):
        assert (a - b).norm() < 0.05 * (a - before).norm()
    state = other.state[short[0]]
    assert state["momentum_buffer"].dtype is (torch.int8 if moments == "8bit" else torch.bfloat16)


def test_bytes_per_parameter() -> None:
    weight = nn.Parameter(torch.randn(256, 512).bfloat16())
    optimizer = ng.optim.Muon([weight], master="split", moments="8bit")
    weight.grad = torch.randn_like(weight)
    optimizer.step()
    tensors = [weight, *(value for value in optimizer.state[weight].values() if isinstance(value, Tensor))]
    assert sum(t.numel() * t.element_size() for t in tensors) / weight.numel() < 5.1


def test_a_skipped_step_changes_nothing_and_gradients_are_divided() -> None:
    ours, same = make(), make()
    mine, plain = ng.optim.Muon(ours, lr=0.02), ng.optim.Muon(same, lr=0.02)
    for step in range(2):
        set_grads(same, step)
        plain.step()
        set_grads(ours, step)
        for parameter in ours:
            parameter.grad.mul_(8.0)  # type: ignore[union-attr]
        mine.grad_scale, mine.found_inf = torch.tensor(8.0), torch.tensor(0.0)
        mine.step()
        saved = copy.deepcopy(mine.state_dict())
        mine.found_inf = torch.tensor(1.0)
        ours[0].grad.fill_(float("nan"))  # type: ignore[union-attr]
        mine.step()
        after = mine.state_dict()["state"][0]
        assert all(
            torch.equal(torch.as_tensor(after[key]), torch.as_tensor(value)) for key, value in saved["state"][0].items()
        )
    assert all(torch.equal(a, b) for a, b in zip(ours, same, strict=True))


@pytest.mark.parametrize("formats", [{}, {"master": "split", "moments": "8bit"}, {"master": "none", "moments": "bf16"}])
def test_a_loaded_state_continues_to_the_bit(formats: dict[str, str]) -> None:
    dtype = torch.bfloat16 if formats else torch.float32
    parameters = [*make(dtype), nn.Parameter(torch.randn(16, generator=torch.Generator().manual_seed(1)).to(dtype))]
    optimizer = ng.optim.Muon(parameters, lr=0.02, adamw_lr=0.02, **formats)  # type: ignore[arg-type]
    for step in range(3):
        set_grads(parameters, step)
        optimizer.step()
    others = [nn.Parameter(p.detach().clone()) for p in parameters]
    resumed = ng.optim.Muon(others, lr=1.0, adamw_lr=1.0, **formats)  # type: ignore[arg-type]
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for step in range(3, 6):
        for some, one in ((parameters, optimizer), (others, resumed)):
            set_grads(some, step)
            one.step()
    assert all(torch.equal(a, b) for a, b in zip(parameters, others, strict=True))
    assert all(torch.equal(join_fp32(a), join_fp32(b)) for a, b in zip(parameters, others, strict=True))


def test_other_parameters_have_the_bits_of_adamw() -> None:
    vector = nn.Parameter(torch.randn(64, generator=torch.Generator().manual_seed(2)))
    twin = nn.Parameter(vector.detach().clone())
    one = ng.optim.Muon([*make(), vector], lr=0.02, adamw_lr=1e-3, adamw_betas=(0.8, 0.9), weight_decay=0.3)
    other = torch.optim.AdamW([twin], lr=1e-3, betas=(0.8, 0.9), weight_decay=0.3)
    assert [group["rule"] for group in one.param_groups] == ["muon", "adamw"]
    for step in range(4):
        set_grads([vector], step)
        set_grads([twin], step)
        one.step()
        other.step()
    assert torch.equal(vector, twin)


def test_groups_of_a_model() -> None:
    model = GPT(GPTConfig(layers=2, width=256, heads=4, context=256, vocab=256))  # as many words as columns
    groups = {group["rule"] + str(len(group)): group for group in ng.optim.split_for_muon(model)}
    names = {id(p): name for name, p in model.named_parameters()}
    found = [sorted(names[id(p)] for p in group["params"]) for group in groups.values()]
    assert found[0] == sorted(
        n for n in names.values() if n.startswith("blocks.") and model.get_parameter(n).dim() == 2
    )
    assert all("blocks." not in name or model.get_parameter(name).dim() < 2 for name in found[1] + found[2])
    assert sum(map(len, found)) == len(list(model.parameters()))
    chosen = ng.optim.split_for_muon(model, adamw=["*.0.*"])
    assert all(not names[id(p)].startswith("blocks.0.") for p in chosen[0]["params"])
    for pattern in ("blocks.0", "*.mlp.gate.*", ""):  # misspelled, so that Muon would get the matrix
        with pytest.raises(UsageError, match=r"matches no parameter; names are tok.weight, .*needs \*"):
            ng.optim.split_for_muon(model, adamw=["*.0.*", pattern])
    tied = nn.ModuleDict({"words": nn.Embedding(10, 4), "head": nn.Linear(4, 10, bias=False)})
    tied["head"].weight = tied["words"].weight
    assert [group["rule"] for group in ng.optim.split_for_muon(tied)] == ["adamw"]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"momentum": 1.5}, "momentum=1.5 is out of range"),
        ({"ns_steps": 0}, "ns_steps=0 is out of range"),
        (
            {"adjust_lr_fn": "other"},
            "adjust_lr_fn='other' is unknown; expected one of None, 'original', 'match_rms_adamw'",
        ),
        ({"ns_coefficients": [(4.0, -6.8, 2.9)] * 3}, "expected three numbers, for all iterations"),
        ({"moments": "4bit"}, "moments='4bit' is unknown"),
        ({"lr": -1.0}, "lr=-1.0 is out of range"),
    ],
)
def test_wrong_options_are_one_line(options: dict[str, Any], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        ng.optim.Muon(make(), **options)


def test_rules_are_checked() -> None:
    vector = nn.Parameter(torch.zeros(3))
    with pytest.raises(UsageError, match=r"has the shape \(3,\); its rule is for matrices"):
        ng.optim.Muon([{"params": [vector], "rule": "muon"}])
    with pytest.raises(UsageError, match="rule=sgd is out of range"):
        ng.optim.Muon([{"params": [vector], "rule": "sgd"}])
    optimizer = ng.optim.Muon([{"params": make(), "rule": "adamw"}], adamw_lr=0.5)
    assert optimizer.param_groups[0]["lr"] == 0.5
    optimizer.add_param_group({"params": vector})
    assert [group["rule"] for group in optimizer.param_groups] == ["adamw", "adamw"]
    named = ng.optim.Muon(nn.Linear(4, 3).named_parameters())
    assert [(group["rule"], group["param_names"]) for group in named.param_groups] == [
        ("muon", ["weight"]), ("adamw", ["bias"]),
    ]  # fmt: skip


def make_gpt() -> GPT:
    torch.manual_seed(0)
    return GPT(GPTConfig(layers=2, width=64, heads=4, context=32, vocab=96))


def train(engine: ng.Engine, steps: int = 6) -> list[float]:
    losses = []
    for step in range(steps):
        tokens = torch.randint(0, 96, (4, 33), generator=torch.Generator().manual_seed(step % 2))
        with engine.forward():
            loss = engine.model(tokens[:, :-1], tokens[:, 1:])
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


RECIPES = ["fp32", "bf16", "bf16-lean", "bf16-lean[gradients=released]", "fp8[products=all]", "fp8-lean[products=all]"]


@pytest.mark.parametrize("recipe", RECIPES)
def test_engines_train_with_it(recipe: str) -> None:
    model = make_gpt()
    optimizer = ng.optim.Muon(ng.optim.split_for_muon(model), lr=0.01, adjust_lr_fn="match_rms_adamw")
    clip = None if "released" in recipe else 1.0
    engine = ng.Engine(model, optimizer, recipe, clip_norm=clip)
    losses = train(engine)
    assert losses[-1] < losses[0] - 0.5
    lean = "lean" in recipe
    matrix = model.blocks[0].qkv.weight
    assert matrix.dtype is (torch.bfloat16 if lean else torch.float32)
    assert ("remainder" in optimizer.state[matrix]) == lean
    assert optimizer.state[matrix]["momentum_buffer"].dtype is (torch.int8 if lean else torch.float32)
    twin = make_gpt()
    other = ng.optim.Muon(ng.optim.split_for_muon(twin), lr=0.01, adjust_lr_fn="match_rms_adamw")
    resumed = ng.Engine(twin, other, recipe, clip_norm=clip)
    resumed.load_state_dict(engine.state_dict())
    assert train(resumed, 2) == train(engine, 2)


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
def test_the_optimizers_of_torch_get_masters() -> None:
    """A user's Muon and AdamW, each for its own parameters, under a lean recipe."""
    model = make_gpt()
    inner, *others = ng.optim.split_for_muon(model)
    muon = torch.optim.Muon(inner["params"], lr=0.01, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW([{"params": group["params"]} for group in others], lr=0.01)
    engine = ng.Engine(model, [muon, adamw], "bf16-lean")
    losses = train(engine)
    assert losses[-1] < losses[0] - 0.5
    assert isinstance(muon, ng.optim.Muon) and isinstance(muon, torch.optim.Muon)
    assert muon.param_groups[0]["rule"] == "muon" and "remainder" in muon.state[inner["params"][0]]
    state = ng.optim.plain_state(muon.state_dict())
    assert set(state["state"][0]) == {"step", "momentum_buffer"}
    assert state["state"][0]["momentum_buffer"].dtype is torch.float32
