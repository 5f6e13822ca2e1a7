"""Experts on a GPU: grouped products in the recipe's 16-bit format, within its error, also compiled and recomputed."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from narrowgauge import Engine

pytestmark = [
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores"),  # from Inductor, about FP32 products
    pytest.mark.filterwarnings("ignore:\\s*Online softmax is disabled"),  # from Inductor
]
NARROW = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8": torch.bfloat16,
    "bf16-lean": torch.bfloat16,
    "fp8-lean": torch.bfloat16,
    "bf16[checkpoint=full]": torch.bfloat16,
    "bf16[checkpoint=selective]": torch.bfloat16,
}


class Experts(nn.Module):
    """Equal numbers of tokens through two stacks of matrices: routing could differ between formats."""

    def __init__(self, width=64, hidden=96, experts=4):
        super().__init__()
        self.up = nn.Parameter(torch.randn(experts, width, hidden) * width**-0.5)
        self.down = nn.Parameter(torch.randn(experts, width, hidden) * hidden**-0.5)
        self.mix = nn.Linear(width, width)

    def forward(self, x):
        x = self.mix(F.layer_norm(x, x.shape[-1:])).float()
        ends = torch.arange(1, len(self.up) + 1, device=x.device, dtype=torch.int32) * (len(x) // len(self.up))
        hidden = F.gelu(F.grouped_mm(x, self.up, offs=ends))
        return F.grouped_mm(hidden, self.down.transpose(1, 2), offs=ends)


class Model(nn.Module):
    def __init__(self, **sizes):
        super().__init__()
        self.blocks = nn.ModuleList([Experts(**sizes), Experts(**sizes)])

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x


class Spy(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._grouped_mm.default:
            self.seen += [x.dtype for x in args[:2]]
        return func(*args, **(kwargs or {}))


def train(recipe, spy=None, sizes=None, **options):
    """Train two steps; return the unscaled gradients of the first in FP64."""
    torch.manual_seed(0)
    model = Model(**(sizes or {})).cuda()
    x = torch.randn(256, model.blocks[0].up.shape[1], device="cuda")
    engine = Engine(model, torch.optim.AdamW(model.parameters(), fused=True), recipe, **options)
    found = {}
    for step in range(2):
        with spy or Spy(), engine.forward():
            loss = model(x).float().square().mean()
        engine.backward(loss)
        if step == 0:
            scale = 1.0 if engine.scaler is None else float(engine.scaler.get_scale_tensor("cuda"))
            found = {name: p.grad.double() / scale for name, p in model.named_parameters() if p.grad is not None}
        assert engine.step().applied
    return found


def largest_error(found, exact):
    names = [name for name in exact if name.endswith(("up", "down"))]
    return max(((found[name] - exact[name]).norm() / exact[name].norm()).item() for name in names)


@pytest.mark.parametrize("recipe", NARROW)
def test_operands_have_the_recipes_format(recipe):
    spy = Spy()
    train(recipe, spy)
    assert spy.seen and set(spy.seen) == {NARROW[recipe]}


@pytest.mark.parametrize("recipe", ["bf16", "fp16", "bf16[checkpoint=full]", "bf16[checkpoint=selective]"])
@pytest.mark.parametrize("sizes", [(64, 96), (36, 44)])
def test_gradients_match_fp32_within_the_formats_error(recipe, sizes):
    sizes = dict(zip(("width", "hidden"), sizes, strict=True))
    assert largest_error(train(recipe, sizes=sizes), train("fp32", sizes=sizes)) < 0.03


@pytest.mark.parametrize("recipe", ["bf16", "fp8"])
def test_compiled_experts_match_eager_ones(recipe):
    assert largest_error(train(recipe, compile=True), train(recipe)) < 0.05


def test_autocast_outside_of_an_engine_is_unchanged():
    model, x = Model().cuda(), torch.randn(256, 64, device="cuda")
    train("bf16")
    with torch.autocast("cuda", dtype=torch.bfloat16):
        ends = torch.tensor([64, 128, 192, 256], dtype=torch.int32, device="cuda")
        assert F.grouped_mm(x, model.blocks[0].up, offs=ends).dtype is torch.float32


@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("recipe", ["bf16", "fp8", "fp8-lean"])
def test_mixtral_losses_are_close_to_fp32(recipe, compile):
    transformers = pytest.importorskip("transformers", minversion="5.0")
    losses = {}
    for name, options in (("fp32", {}), (recipe, {"compile": compile})):
        torch.manual_seed(0)
        config = transformers.MixtralConfig(
            vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, use_cache=False,
        )  # fmt: skip
        model = transformers.MixtralForCausalLM(config).cuda()
        engine = Engine(model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True), name, **options)
        ids = torch.randint(128, (4, 32), generator=torch.Generator().manual_seed(1)).cuda()
        losses[name] = []
        for _ in range(4):
            with engine.forward():
                loss = model(input_ids=ids, labels=ids).loss
            engine.backward(loss)
            assert engine.step().applied
            losses[name].append(loss.item())
    assert losses[recipe] == pytest.approx(losses["fp32"], rel=0.02)
