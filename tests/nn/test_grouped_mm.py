"""Experts multiply in the recipe's 16-bit format inside an engine, in FP32 if kept, and unchanged outside of it."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from narrowgauge import Engine
from narrowgauge.errors import UsageError
from narrowgauge.nn.autocast_rules import autocast_rules, separate_compile_cache
from narrowgauge.nn.step_context import explain_error
from narrowgauge.recipe import parse

# Outside of an engine, BF16 is not emulated on a CPU without BF16 support.
pytestmark = pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
NARROW = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16, "bf16-lean": torch.bfloat16,
          "fp8-lean": torch.bfloat16, "bf16[checkpoint=selective]": torch.bfloat16}  # fmt: skip
CALLS = {"private": torch._grouped_mm, "public": F.grouped_mm, "operator": torch.ops.aten._grouped_mm}


class Experts(nn.Module):
    """Applies two stacks of matrices to tokens sorted by expert, as a user would write it."""

    def __init__(self, call=torch._grouped_mm, width=32, hidden=48, experts=4):
        super().__init__()
        torch.manual_seed(0)
        self.call = call
        self.up = nn.Parameter(torch.randn(experts, width, hidden) * width**-0.5)
        self.down = nn.Parameter(torch.randn(experts, hidden, width) * hidden**-0.5)
        self.router = nn.Parameter(torch.randn(width, experts))

    def forward(self, x):
        share, chosen = (x @ self.router).float().softmax(-1).max(-1)
        order = chosen.argsort()
        ends = F.one_hot(chosen, len(self.up)).sum(0).cumsum(0).to(torch.int32)
        hidden = self.call(x[order], self.up, offs=ends)
        made = self.call(F.gelu(hidden), self.down, offs=ends)
        return torch.zeros_like(x).index_add(0, order, (made * share[order, None]).to(x.dtype))


class Batched(Experts):
    """Applies every expert to every token, with torch.bmm and then einsum."""

    def forward(self, x):
        share = (x @ self.router).float().softmax(-1)
        hidden = F.gelu(torch.bmm(x.expand(len(self.up), *x.shape), self.up))
        return torch.einsum("esh,ehw,se->sw", hidden, self.down, share.to(hidden.dtype)).to(x.dtype)


class Stack(nn.Module):
    def __init__(self, make):
        super().__init__()
        self.blocks = nn.ModuleList([make(), make()])

    def forward(self, x):
        for block in self.blocks:
            x = x + block(F.layer_norm(x, x.shape[-1:]))
        return x


class OperandRecorder(TorchDispatchMode):
    """Records operands of grouped products. Entered outside of emulation, where they are FP32."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._grouped_mm.default:
            self.seen.append([x.detach().clone() for x in args[:2]])  # a step changes BF16 weights in place
        return func(*args, **(kwargs or {}))

    def fit(self, dtype):
        return [torch.equal(x.float(), x.to(dtype).float()) for operands in self.seen for x in operands]


def tokens(width=32):
    return torch.randn(40, width, generator=torch.Generator().manual_seed(1))


def gradients(model, recipe, x, recorder=None):
    """Return the loss and the unscaled FP64 gradients of one microbatch."""
    engine = Engine(model, torch.optim.AdamW(model.parameters()), recipe)
    with recorder or OperandRecorder(), engine.forward():
        loss = model(x).float().square().mean()
    engine.backward(loss)
    scale = 1.0 if engine.scaler is None else float(engine.scaler.get_scale_tensor("cpu"))
    found = {name: p.grad.double() / scale for name, p in model.named_parameters() if p.grad is not None}
    assert engine.step().applied
    return loss.item(), found


def relative_error(found, exact):
    return max(((found[name] - exact[name]).norm() / exact[name].norm()).item() for name in exact)


@pytest.mark.parametrize("recipe", NARROW)
@pytest.mark.parametrize("call", CALLS)
def test_grouped_products_read_operands_of_the_recipes_format(recipe, call):
    model, recorder = Stack(lambda: Experts(CALLS[call])), OperandRecorder()
    engine = Engine(model, torch.optim.AdamW(model.parameters()), recipe)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for step in range(2):
        with recorder, engine.forward():
            loss = model(tokens().requires_grad_()).square().mean()
        with recorder:
            engine.backward(loss)
        assert engine.step().applied, step
    forward_and_two_gradients = 2 * 2 * 2 * 3
    assert len(recorder.seen) >= forward_and_two_gradients
    assert all(recorder.fit(NARROW[recipe]))
    assert all(not torch.equal(p, before[name]) for name, p in model.named_parameters())


@pytest.mark.parametrize("recipe", ["bf16", "fp16", "bf16[checkpoint=full]", "bf16[checkpoint=selective]"])
@pytest.mark.parametrize("kind", [Experts, Batched])
def test_gradients_are_those_of_fp32_within_the_format(recipe, kind):
    exact_loss, exact = gradients(Stack(kind), "fp32", tokens())
    loss, found = gradients(Stack(kind), recipe, tokens())
    assert loss == pytest.approx(exact_loss, rel=1e-2)
    assert relative_error(found, exact) < 0.03
    assert all(gradient.isfinite().all() for gradient in found.values())


@pytest.mark.parametrize("sizes", [(36, 44), (20, 12), (4, 4), (36, 40)])
def test_sizes_that_16_bit_kernels_do_not_support_are_padded(sizes):
    def make():
        return Stack(lambda: Experts(width=sizes[0], hidden=sizes[1]))

    x = tokens(sizes[0])
    _, exact = gradients(make(), "fp32", x)
    _, found = gradients(make(), "bf16", x)
    assert relative_error(found, exact) < 0.04


@pytest.mark.parametrize("kept", ["blocks.0", "Experts"])
def test_kept_experts_compute_in_fp32(kept):
    recorder = OperandRecorder()
    gradients(Stack(Experts), f"bf16[keep={kept}]", tokens(), recorder)
    fits = recorder.fit(torch.bfloat16)
    assert not all(fits[:4])
    assert all(fits[4:]) == (kept == "blocks.0")


def test_plain_autocast_outside_of_an_engine_computes_as_before():
    model, x = Experts(), tokens()
    offs = torch.tensor([10, 10, 30, 40], dtype=torch.int32)

    def plain():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return torch._grouped_mm(x, model.up, offs=offs)

    before = plain()
    gradients(Stack(Experts), "bf16", x)
    after = plain()
    assert before.dtype is after.dtype is torch.float32 and torch.equal(before, after)
    with autocast_rules():
        assert torch._grouped_mm(x, model.up, offs=offs).dtype is torch.float32  # no autocast, no cast
        assert plain().dtype is torch.bfloat16
    with pytest.raises(ZeroDivisionError), autocast_rules():
        raise ZeroDivisionError
    assert plain().dtype is torch.float32


def test_fp64_and_other_layouts_go_to_torch():
    a, b = torch.randn(4, 8, 16), torch.randn(4, 16, 24)
    with autocast_rules(), torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch._grouped_mm(a, b).dtype is torch.bfloat16  # one product per pair
        with pytest.raises(RuntimeError):
            torch._grouped_mm(a.double(), b.double())  # as without autocast


def test_compiled_code_computes_in_bf16_too():
    model, x = Experts(), tokens()
    exact = model(x)

    def run(x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return model(x)

    with autocast_rules():
        eager = run(x)
        compiled = torch.compile(run, backend="aot_eager", fullgraph=True)(x)
        compiled.square().mean().backward()
    assert torch.equal(eager, compiled)
    assert not torch.equal(exact, compiled)
    torch.testing.assert_close(compiled, exact, rtol=0.05, atol=0.05)
    assert model.up.grad.dtype is torch.float32 and model.up.grad.norm() > 0


def test_the_loop_that_transformers_compiles_becomes_a_grouped_product():
    moe = pytest.importorskip("transformers.integrations.moe")
    x, weight = tokens().requires_grad_(), Experts().up
    offs = torch.tensor([10, 10, 30, 40], dtype=torch.int32)

    def run(x, weight):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return moe._grouped_mm(x, weight, offs)

    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    with autocast_rules():
        made = compiled(x, weight)
        made.float().square().sum().backward()  # the loop's own backward needs more than one graph
    assert made.dtype is torch.bfloat16 and weight.grad.dtype is torch.float32
    torch.testing.assert_close(made.float(), torch._grouped_mm(x, weight, offs=offs), rtol=0.05, atol=0.05)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.ops.transformers.grouped_mm_fallback(x, weight, offs).dtype is torch.float32  # no engine


def test_an_engines_graphs_have_a_separate_disk_cache():
    before = torch.compiler.config.cache_key_tag
    with separate_compile_cache():
        assert torch.compiler.config.cache_key_tag not in ("", before)
    assert torch.compiler.config.cache_key_tag == before


def test_unsupported_compilation_raises_one_clear_line():
    model, x = Experts(), tokens()

    def run(x):
        with torch.autocast("cpu", dtype=torch.float16):
            return model(x)

    with autocast_rules(), pytest.raises(RuntimeError) as caught:
        torch.compile(run, backend="aot_eager", fullgraph=True)(x)
    said = explain_error(caught.value, parse("fp16"), model)
    assert isinstance(said, UsageError) and "only in BF16" in str(said) and "\n" not in str(said)


def test_selective_checkpointing_names_a_product_changed_in_place():
    class InPlace(Experts):
        def forward(self, x):
            return torch.bmm(x.expand(len(self.up), *x.shape), self.up).add_(1.0).mean(0) @ self.down[0].to(x.dtype)

    model = Stack(InPlace)
    engine = Engine(model, torch.optim.AdamW(model.parameters()), "bf16[checkpoint=selective]")
    with engine.forward():
        loss = model(tokens()).float().square().mean()
    with pytest.raises(UsageError, match="checkpoint=full"):
        engine.backward(loss)
