"""Engine: one training step under a recipe, with any module and any torch optimizer."""

import copy
import functools
import math

import pytest
import torch
import torch.nn.functional as F

from narrowgauge import Engine, TrainingStalled, UsageError

RECIPES = ["fp32", "bf16", "fp16", "fp8"]


class Block(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = (
            torch.nn.LayerNorm(width),
            torch.nn.Linear(width, 2 * width),
            torch.nn.Linear(2 * width, width),
        )
        self.drop = torch.nn.Dropout(0.1)

    def forward(self, x):
        return x + self.drop(self.down(F.gelu(self.up(self.norm(x)))))


class Net(torch.nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.inner = torch.nn.Linear(8, width)
        self.blocks = torch.nn.ModuleList(Block(width) for _ in range(3))
        self.head = torch.nn.Linear(width, 4)

    def forward(self, x):
        x = self.inner(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def make(recipe="fp32", optimizer=None, **options):
    torch.manual_seed(0)
    model = Net()
    optimizer = (optimizer or (lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True)))(model.parameters())
    return Engine(model, optimizer, recipe, **options)


def batch(seed, rows=8):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 8, generator=generator), torch.randint(0, 4, (rows,), generator=generator)


def run_step(engine, seed=0, poison=False):
    inputs, targets = batch(seed)
    with engine.forward():
        loss = F.cross_entropy(engine.model(inputs), targets)
    engine.backward(loss * math.nan if poison else loss)
    return loss, engine.step()


def weights(engine):
    return copy.deepcopy(engine.model.state_dict())


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a.values(), b.values(), strict=True))


@pytest.mark.parametrize("recipe", RECIPES)
def test_learns_under_every_recipe(recipe):
    engine = make(recipe, clip_norm=1.0)
    losses = []
    for step in range(40):
        loss, report = run_step(engine, step % 4)
        losses.append(loss.item())
        assert report.complete
        assert math.isfinite(report.grad_norm) or not report.applied
    assert losses[-1] < 0.5 * losses[0]
    assert all(p.dtype is torch.float32 for p in engine.model.parameters())


@pytest.mark.parametrize("optimizer", ["fused", "foreach", "sgd"])
def test_fp32_without_clipping_equals_plain_torch_bit_for_bit(optimizer):
    makers = {
        "fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
        "foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
        "sgd": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
    }
    engine = make("fp32", makers[optimizer])
    plain = copy.deepcopy(engine.model)
    other = makers[optimizer](plain.parameters())
    for step in range(5):
        torch.manual_seed(step)
        run_step(engine, step)
        torch.manual_seed(step)
        inputs, targets = batch(step)
        F.cross_entropy(plain(inputs), targets).backward()
        other.step()
        other.zero_grad()
    assert same(engine.model.state_dict(), plain.state_dict())


@pytest.mark.parametrize("optimizer", [None, lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True)])
@pytest.mark.parametrize("recipe", RECIPES)
def test_clipping_sees_unscaled_gradients(recipe, optimizer):
    """The engine's clipping gives the norm of clipping in FP32, whatever the loss scale."""
    sgd = optimizer or (lambda p: torch.optim.SGD(p, lr=1.0, fused=True))
    engine = make(recipe, sgd, clip_norm=1e-3)
    engine.model.eval()
    before = weights(engine)
    _, report = run_step(engine)
    assert report.applied
    if optimizer is None:
        moved = math.sqrt(sum((before[k] - v).double().square().sum() for k, v in engine.model.state_dict().items()))
        assert moved == pytest.approx(1e-3, rel=1e-3)
    reference = make("fp32", sgd)
    reference.model.eval()
    _, plain = run_step(reference)
    assert report.grad_norm == pytest.approx(plain.grad_norm, rel=2e-2)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(
    "optimizer",
    [None, lambda p: torch.optim.Adam(p, lr=1e-2), lambda p: torch.optim.RMSprop(p, lr=1e-2, momentum=0.9)],
)
def test_a_skipped_update_changes_neither_weights_nor_optimizer(recipe, optimizer):
    engine = make(recipe, optimizer, clip_norm=1.0)
    for step in range(3):
        run_step(engine, step)
    before, states = weights(engine), copy.deepcopy(engine.optimizers[0].state_dict())
    skipped_before = engine.skipped
    _, report = run_step(engine, 3, poison=True)
    assert not report.applied
    assert not math.isfinite(report.grad_norm)
    assert engine.skipped == skipped_before + 1
    assert same(before, engine.model.state_dict())
    for key, state in engine.optimizers[0].state_dict()["state"].items():
        assert same(states["state"][key], state)
    assert run_step(engine, 4)[1].applied
    assert not same(before, engine.model.state_dict())


@pytest.mark.parametrize("recipe", RECIPES)
def test_forced_skips_never_change_a_weight_and_name_the_parameter(recipe):
    skips = 50 if recipe.startswith("fp16") else 20  # a loss scale needs as many to reach its lower bound
    engine = make(recipe, max_consecutive_skips=skips)
    before = weights(engine)
    engine.model.blocks[1].down.weight.register_hook(lambda grad: grad * math.inf)
    with pytest.raises(TrainingStalled, match=rf"{skips} consecutive updates.*first in blocks\.1\.down\.weight\."):
        for step in range(skips + 1):
            run_step(engine, step)
    assert same(before, engine.model.state_dict())
    if engine.scaler:
        assert engine.scaler.get_scale() == engine.scaler.floor


def test_fp16_backs_off_and_grows():
    engine = make("fp16")
    assert run_step(engine)[1].loss_scale == 2.0**16
    run_step(engine, 1, poison=True)
    assert run_step(engine, 2)[1].loss_scale == 2.0**15
    engine.scaler.set_growth_interval(1)
    run_step(engine, 3)
    assert run_step(engine, 4)[1].loss_scale == 2.0**16


def test_static_loss_scale_by_recipe():
    engine = make("fp16[loss_scale=256]")
    run_step(engine, 0, poison=True)
    assert run_step(engine, 1)[1].loss_scale == 256.0


@pytest.mark.parametrize("recipe", RECIPES)
def test_accumulated_microbatches_equal_one_large_batch(recipe):
    whole, parts = make(recipe, clip_norm=0.1), make(recipe, clip_norm=0.1, accumulate=4)
    for engine in (whole, parts):
        engine.model.eval()
    inputs, targets = batch(0, 16)
    with whole.forward():
        loss = F.cross_entropy(whole.model(inputs), targets)
    whole.backward(loss)
    large = whole.step()
    for index, (x, y) in enumerate(zip(inputs.chunk(4), targets.chunk(4), strict=True)):
        with parts.forward():
            loss = F.cross_entropy(parts.model(x), y)
        parts.backward(loss)
        report = parts.step()
        assert report.complete == (index == 3)
        assert report.applied == (index == 3)
    assert report.grad_norm == pytest.approx(large.grad_norm, rel=1e-5 if recipe == "fp32" else 1e-2)
    assert (large.index, report.index) == (1, 1)


def test_flush_updates_with_the_mean_of_the_microbatches():
    sgd = lambda p: torch.optim.SGD(p, lr=0.1)  # noqa: E731
    partial, plain = make("fp32", sgd, accumulate=4), make("fp32", sgd)
    assert partial.flush() is None
    for engine in (partial, plain):
        engine.model.eval()
        run_step(engine)
    report = partial.flush()
    assert report.applied
    for a, b in zip(partial.model.state_dict().values(), plain.model.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("mode", ["selective", "full"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_recomputation_saves_memory_and_changes_no_bit(recipe, mode):
    plain, recomputed = make(recipe), make(f"{recipe}[checkpoint={mode}]")
    assert recomputed.checkpointed == ["blocks.0", "blocks.1", "blocks.2"]
    assert list(recomputed.model.state_dict()) == list(plain.model.state_dict())
    saved = []
    for engine in (plain, recomputed):
        kept = set()
        with torch.autograd.graph.saved_tensors_hooks(lambda t, kept=kept: kept.add(id(t)) or t, lambda t: t):
            for step in range(3):
                torch.manual_seed(step)
                run_step(engine, step)
        saved.append(len(kept))
    assert same(plain.model.state_dict(), recomputed.model.state_dict())
    assert saved[1] < saved[0]


def test_a_second_engine_starts_from_the_original_model():
    torch.manual_seed(0)
    model = Net()
    user_forward = model.head.forward
    model.head.forward = lambda x: user_forward(x) * 2  # a user's patch must survive all engines
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    x = batch(0)[0]
    model.eval()
    plain = model(x)
    for recipe in (
        "fp8[checkpoint=full]",
        "bf16[keep=blocks.0+head,checkpoint=selective]",
        "fp16[keep=Linear]",
        "fp32",
    ):
        engine = Engine(model, optimizer, recipe)
        with engine.evaluating():
            output = model(x)
        assert output.dtype is (
            torch.float32 if recipe[:4] == "fp32" or "head" in recipe or "Linear" in recipe else torch.bfloat16
        )
    assert torch.equal(output, plain)
    assert [name for name, module in model.named_modules() if "forward" in vars(module)] == ["head"]


def test_several_optimizers_skip_together():
    torch.manual_seed(0)
    model = Net()
    fused = torch.optim.AdamW(model.blocks.parameters(), lr=1e-2, fused=True)
    plain = torch.optim.SGD([*model.inner.parameters(), *model.head.parameters()], lr=1e-2)
    engine = Engine(model, [fused, plain], "fp16", clip_norm=1.0)
    run_step(engine)
    before = weights(engine)
    hook = model.head.weight.register_hook(lambda grad: grad * math.nan)
    assert not run_step(engine, 1)[1].applied
    assert same(before, engine.model.state_dict())
    hook.remove()
    assert run_step(engine, 2)[1].applied


def test_parameter_groups_and_schedulers_work_as_in_torch():
    torch.manual_seed(0)
    model = Net()
    groups = [{"params": model.blocks.parameters(), "lr": 0.0}, {"params": model.head.parameters(), "lr": 0.1}]
    optimizer = torch.optim.SGD(groups)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    engine = Engine(model, optimizer, "fp16")
    before = weights(engine)
    run_step(engine, 0, poison=True)  # a first skip must not make the scheduler warn
    scheduler.step()
    run_step(engine, 1)
    scheduler.step()
    after = engine.model.state_dict()
    assert torch.equal(before["blocks.0.up.weight"], after["blocks.0.up.weight"])
    assert torch.equal(before["inner.weight"], after["inner.weight"])  # in no group: not trained
    assert not torch.equal(before["head.weight"], after["head.weight"])
    assert optimizer.param_groups[1]["lr"] == pytest.approx(0.025)


@pytest.mark.parametrize("recipe", RECIPES)
def test_resume_continues_bit_exactly(recipe):
    straight, first = make(recipe, clip_norm=0.5), make(recipe, clip_norm=0.5)
    for engine in (straight, first):
        engine.model.eval()
        for step in range(4):
            run_step(engine, step, poison=step == 2)
    state = copy.deepcopy(first.state_dict())
    second = make(recipe, clip_norm=0.5)
    second.model.eval()
    torch.nn.init.ones_(second.model.head.weight)
    second.load_state_dict(state)
    assert second.state_dict()["guard"] == state["guard"]
    assert second.state_dict()["scaler"] == state["scaler"]
    for step in range(4, 7):
        run_step(straight, step)
        run_step(second, step)
    assert same(straight.model.state_dict(), second.model.state_dict())
    assert (
        (second.updates, second.skipped)
        == (straight.updates, straight.skipped)
        == (7, 1 if recipe != "fp16" else second.skipped)
    )


def test_a_state_loads_under_another_recipe():
    fp16 = make("fp16")
    run_step(fp16)
    bf16 = make("bf16")
    bf16.load_state_dict(fp16.state_dict())
    assert same(fp16.model.state_dict(), bf16.model.state_dict())
    run_step(bf16)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_step_restores_all_globals(recipe):
    def globals_now():
        cuda = torch.backends.cuda
        return (
            torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), torch.is_grad_enabled(),
            cuda.matmul.fp32_precision, torch.backends.cudnn.conv.fp32_precision, cuda.flash_sdp_enabled(),
            cuda.math_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.cudnn_sdp_enabled(),
            torch._C._len_torch_function_stack(), torch._C._len_torch_dispatch_stack(),
        )  # fmt: skip

    before = globals_now()
    engine = make(f"{recipe}[attention=math,checkpoint=full]")
    run_step(engine)
    with engine.evaluating():
        engine.model(batch(0)[0])
    with pytest.raises(ZeroDivisionError), engine.forward():
        raise ZeroDivisionError
    assert globals_now() == before


def test_evaluation_restores_training_mode_and_builds_no_graph():
    engine = make("bf16")
    engine.model.blocks[0].eval()
    with engine.evaluating():
        assert not any(m.training for m in engine.model.modules())
        output = engine.model(batch(0)[0])
    assert not output.requires_grad
    assert output.dtype is torch.bfloat16
    assert engine.model.training
    assert not engine.model.blocks[0].training


def test_compiled_engines_give_the_same_numbers_and_share_no_graph(monkeypatch):
    """The graphs run in plain torch, as C++ is slow to compile. tests/gauges/test_watch.py trains with inductor."""
    from torch._dynamo.utils import counters

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    torch._dynamo.reset()
    counters.clear()
    plain, compiled, other = make("fp32"), make("fp32", compile=True), make("fp32[attention=any]", compile="default")
    for engine in (plain, compiled, other):
        engine.model.eval()
        for step in range(2):
            run_step(engine, step)
    assert counters["stats"]["unique_graphs"] == 2
    assert not counters["graph_break"]
    for a, b in zip(plain.model.state_dict().values(), compiled.model.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert list(compiled.model.state_dict()) == list(plain.model.state_dict())


def test_sparse_gradients_are_checked_unscaled_and_clipped():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(10, 4, sparse=True), torch.nn.Linear(4, 1))
    engine = Engine(model, torch.optim.SGD(model.parameters(), lr=1.0), "fp16", clip_norm=1e-3)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    with engine.forward():
        loss = 1e-2 * model(torch.tensor([1, 1, 3])).float().square().sum()
    engine.backward(loss)
    assert engine.step().applied
    moved = math.sqrt(sum((before[k] - v).double().square().sum() for k, v in model.state_dict().items()))
    assert moved == pytest.approx(1e-3, rel=1e-2)


class TestErrors:
    def assert_refused(self, message, call, *args, **kwargs):
        with pytest.raises(UsageError, match=message) as caught:
            call(*args, **kwargs)
        assert "\n" not in str(caught.value)

    def test_step_before_backward(self):
        self.assert_refused("step before engine.backward", make().step)

    def test_closure(self):
        self.assert_refused("takes no closure", make().step, lambda: None)

    def test_loss_that_is_not_a_scalar(self):
        self.assert_refused(r"scalar loss, got shape \(3,\)", make().backward, torch.ones(3, requires_grad=True))
        self.assert_refused("scalar loss, got 'float'", make().backward, 1.0)

    def test_loss_without_graph(self):
        self.assert_refused("no graph", make().backward, torch.ones(()))

    def test_model_without_trainable_parameters(self):
        model = Net().requires_grad_(False)
        self.assert_refused("no trainable parameters", Engine, model, torch.optim.SGD(model.parameters(), lr=1.0))

    def test_optimizer_over_other_parameters(self):
        self.assert_refused("not the model's", Engine, Net(), torch.optim.SGD(Net().parameters(), lr=1.0))

    def test_no_optimizer(self):
        self.assert_refused("expected a torch optimizer", Engine, Net(), [])

    def test_parameters_that_are_not_fp32(self):
        model = Net().bfloat16()
        self.assert_refused("model.float", Engine, model, torch.optim.SGD(model.parameters(), lr=1.0), "bf16")

    def test_state_during_an_accumulation(self):
        engine = make(accumulate=2)
        run_step(engine)
        self.assert_refused("during an accumulation", engine.state_dict)

    @pytest.mark.parametrize("wrong", [{"clip_norm": 0}, {"clip_norm": -1.0}, {"accumulate": 0}, {"accumulate": 1.5}])
    def test_numbers_out_of_range(self, wrong):
        self.assert_refused("must be a positive", make, **wrong)

    def test_recipes_that_cannot_run(self):
        self.assert_refused("tensor cores", make, "tf32")
        self.assert_refused(
            "a lean recipe needs AdamW",
            make,
            "bf16[master=split,gradients=bf16]",
            optimizer=lambda p: torch.optim.Rprop(p, lr=0.1),
        )
        self.assert_refused("names no module", make, "bf16[keep=nowhere]")

    def test_checkpointing_without_blocks(self):
        model = torch.nn.Linear(2, 2)
        self.assert_refused(
            "no repeated blocks", Engine, model, torch.optim.SGD(model.parameters()), "fp32[checkpoint=full]"
        )

    def test_backward_that_reaches_no_parameter(self):
        engine = make()
        engine.backward(torch.ones((), requires_grad=True) * 2)
        self.assert_refused("no gradient on any", engine.step)
