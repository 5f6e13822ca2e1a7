"""Muon on a GPU: as in plain torch, exact split masters, nothing waits for the device, engines train."""

import pytest
import torch

import narrowgauge as ng
from narrowgauge.gauges.rules.muon_rules import read_muon_updates
from narrowgauge.gauges.rules.tensor_rules import UpdateContext
from narrowgauge.gauges.watch.watch import Watch
from narrowgauge.models.gpt import GPT, GPTConfig
from narrowgauge.optim.masters import join_fp32

SHAPES = [(256, 512), (512, 256), (256, 512), (384, 384), (130, 70)]


def make(dtype=torch.float32, device="cuda"):
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator).to(device, dtype)) for shape in SHAPES]


def set_grads(parameters, step, dtype=None):
    generator = torch.Generator().manual_seed(100 + step)
    for parameter in parameters:
        grad = 0.1 * torch.randn(parameter.shape, generator=generator)
        parameter.grad = grad.to(parameter.device, dtype or parameter.dtype)


@pytest.mark.parametrize("moments", ["fp32", "bf16", "8bit"])
@pytest.mark.parametrize("master", ["fp32", "split", "none"])
def test_steps_are_those_of_a_cpu(master, moments):
    dtype = torch.float32 if master == "fp32" else torch.bfloat16
    ours, theirs = make(dtype), make(dtype, "cpu")
    begin = [p.detach().float().cpu().clone() for p in theirs]
    options = {"lr": 0.05, "master": master, "moments": moments, "weight_decay": 0.0}
    one, other = ng.optim.Muon(ours, **options), ng.optim.Muon(theirs, **options)
    for step in range(4):
        set_grads(ours, step)
        set_grads(theirs, step)
        one.step()
        other.step()
    for a, b, before in zip(ours, theirs, begin, strict=True):
        moved = (join_fp32(b) - before).norm()
        assert (join_fp32(a).cpu() - join_fp32(b)).norm() < (0.2 if master == "none" else 0.06) * moved


def test_split_masters_are_exact():
    wide = [torch.nn.Parameter(p.detach().bfloat16().float()) for p in make()]
    narrow = [torch.nn.Parameter(p.detach().bfloat16()) for p in wide]
    plain = ng.optim.Muon(wide, lr=0.02)
    lean = ng.optim.Muon(narrow, lr=0.02, master="split", gradients="fp32")
    for step in range(100):
        set_grads(wide, step)
        set_grads(narrow, step, torch.float32)
        plain.step()
        lean.step()
    assert all(torch.equal(join_fp32(b), a) for a, b in zip(wide, narrow, strict=True))


def make_engine(recipe, optimizer="muon"):
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = GPT(GPTConfig(layers=4, width=256, heads=4, vocab=1024, context=128))
    if optimizer == "muon":
        made = ng.optim.Muon(ng.optim.split_for_muon(model), lr=2e-3, adjust_lr_fn="match_rms_adamw")
    else:
        made = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    return ng.Engine(model, made, recipe, clip_norm=1.0)


def train(engine, steps, seed=0):
    losses = []
    for step in range(steps):
        generator = torch.Generator("cuda").manual_seed(seed + step % 4)
        tokens = torch.randint(0, 1024, (8, 129), device="cuda", generator=generator)
        with engine.forward():
            loss = engine.model(tokens[:, :-1], tokens[:, 1:])
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach())
    return losses


@pytest.mark.parametrize("recipe", ["fp32", "bf16", "bf16-lean", "fp8[products=all]", "fp8-lean[products=all]"])
def test_engines_train(recipe):
    found, wanted = train(make_engine(recipe), 24), train(make_engine("fp32"), 24)
    assert float(found[-1]) < float(found[0]) - 1
    assert float(found[-1]) == pytest.approx(float(wanted[-1]), rel=0.05)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")
@pytest.mark.parametrize("recipe", ["bf16", "bf16-lean", "fp8-lean[products=all]"])
def test_nothing_waits_for_the_device(recipe):
    engine = make_engine(recipe)
    train(engine, 4)
    torch.cuda.synchronize()
    tokens = torch.randint(0, 1024, (8, 129), device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            with engine.forward():
                loss = engine.model(tokens[:, :-1], tokens[:, 1:])
            engine.backward(loss)
            engine.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")
@pytest.mark.parametrize("recipe", ["fp32", "bf16-lean"])
def test_gauges_measure_updates_without_waiting(recipe):
    engine = make_engine(recipe)
    watch = Watch(engine, every=2)
    train(engine, 4)
    torch.cuda.synchronize()
    tokens = torch.randint(0, 1024, (8, 129), device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            with engine.forward():
                loss = engine.model(tokens[:, :-1], tokens[:, 1:])
            engine.backward(loss)
            engine.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    snapshots = watch.snapshots(wait=True)
    shares = [update.share for one in snapshots for update in read_muon_updates(UpdateContext(one))]
    assert len(shares) == 16 * len(snapshots) == 64 and all(0.2 < share < 1.5 for share in shares), shares


def test_a_bad_gradient_changes_nothing():
    parameters = make(torch.bfloat16)
    optimizer = ng.optim.Muon(parameters, lr=0.05, master="split", moments="8bit")
    set_grads(parameters, 0)
    optimizer.step()
    before = [p.detach().clone() for p in parameters]
    momenta = [optimizer.state[p]["momentum_buffer"].clone() for p in parameters]
    parameters[1].grad.fill_(float("nan"))
    optimizer.found_inf = torch.ones((), device="cuda")
    optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(parameters, before, strict=True))
    assert all(torch.equal(optimizer.state[p]["momentum_buffer"], m) for p, m in zip(parameters, momenta, strict=True))
    assert all(int(optimizer.state[p]["step"]) == 1 for p in parameters)
