"""Steps as CUDA graphs: bit for bit what forward, backward and step compute, and eager where that could not be so."""

from __future__ import annotations

import contextlib
import copy
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import narrowgauge as ng
from narrowgauge import Engine, StepFunction, tasks
from narrowgauge.engine.step_function import MEASURED, WARM_UP
from narrowgauge.models.gpt import GPT, GPTConfig
from narrowgauge.runs.settings import make_settings
from narrowgauge.runs.train import train

DEVICE = torch.device("cuda")
EAGER = WARM_UP + MEASURED
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*defaults to a non-deterministic algorithm"),
    pytest.mark.usefixtures("deterministic"),
]
RECIPES = [
    "fp32",
    "tf32",
    "bf16",
    "bf16[master=split]",
    "fp8",
    "fp8[products=all]",
    "fp8[products=all,scaling=current]",
]
RECIPES += ["bf16-lean", "fp8-lean", "bf16[moments=8bit,master=split]", "fp8[products=all,checkpoint=selective]"]


class Net(nn.Module):
    """A small network with dropout and batch norm, which count and draw random numbers on the device."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 256), nn.BatchNorm1d(256), nn.GELU(), nn.Dropout(dropout))
        self.head = nn.Linear(256, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x))


def make_gpt() -> nn.Module:
    torch.manual_seed(0)
    return GPT(GPTConfig(layers=2, width=256, heads=4, context=128, vocab=512)).to(DEVICE)


def make_net(dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    return Net(dropout).to(DEVICE)


def text(seed: int, rows: int = 4, length: int = 128) -> tuple[Tensor, Tensor]:
    made = torch.randint(0, 512, (rows, length + 1), generator=torch.Generator().manual_seed(seed)).to(DEVICE)
    return made[:, :-1].contiguous(), made[:, 1:].contiguous()


def numbers(seed: int, rows: int = 32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randn(rows, 64, generator=generator), torch.randint(0, 16, (rows,), generator=generator)
    return x.to(DEVICE), y.to(DEVICE)


class Run:
    """A model in training: recorded, or by the engine's own methods."""

    def __init__(self, model: nn.Module, recipe: str, recorded: bool, **options: Any) -> None:
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        self.engine = Engine(model, self.optimizer, recipe, clip_norm=0.5, **options)
        [self.optimizer] = self.engine.optimizers  # lean recipes replace it
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1 / (1 + step / 10))
        self.function = StepFunction(self.engine, self.compute_loss, record=True) if recorded else None

    def compute_loss(self, x: Tensor, y: Tensor) -> Tensor:
        if isinstance(self.model, GPT):
            return self.model(x, y)
        return F.cross_entropy(self.model(x), y)

    def step(self, x: Tensor, y: Tensor) -> tuple[float, float, bool]:
        if self.function is not None:
            loss, report = self.function(x, y)
        else:
            with self.engine.forward():
                graph = self.compute_loss(x, y)
            self.engine.backward(graph)
            loss, report = graph.detach(), self.engine.step()
        self.schedule.step()
        return loss.item(), report.grad_norm or 0.0, report.applied


def make_pair(make: Any, recipe: str, **options: Any) -> tuple[Run, Run]:
    model = make()
    return Run(copy.deepcopy(model), recipe, True, **options), Run(model, recipe, False, **options)


def check_equal(one: Run, other: Run) -> None:
    saved = [{**run.model.state_dict(), **flatten(run.engine.state_dict())} for run in (one, other)]
    assert saved[0].keys() == saved[1].keys()
    for name, value in saved[0].items():
        same = torch.equal(value, saved[1][name]) if isinstance(value, Tensor) else value == saved[1][name]
        assert same, name


def flatten(tree: Any, path: str = "") -> dict[str, Any]:
    if isinstance(tree, dict):
        pairs = tree.items()
    elif isinstance(tree, list):
        pairs = enumerate(tree)
    else:
        return {path: tree}
    return {name: leaf for key, value in pairs for name, leaf in flatten(value, f"{path}/{key}").items()}


@pytest.mark.parametrize("recipe", RECIPES)
def test_equal_to_the_eager_step(recipe):
    recorded, eager = make_pair(make_gpt, recipe)
    for number in range(EAGER + 8):
        batch = text(number)
        assert recorded.step(*batch) == eager.step(*batch), f"step {number}"
    assert recorded.function.recorded == 1
    check_equal(recorded, eager)
    assert recorded.engine.updates == EAGER + 8


def make_transformers(kind: str) -> nn.Module:
    import transformers

    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 512}
    sizes |= {"num_key_value_heads": 2, "head_dim": 32} if kind == "qwen3" else {}
    config = transformers.AutoConfig.for_model(kind, **sizes, intermediate_size=256, use_cache=False)
    return transformers.AutoModelForCausalLM.from_config(config).to(DEVICE)


@pytest.mark.parametrize("recipe", ["bf16", "fp8[products=all]", "fp8-lean"])
@pytest.mark.parametrize("kind", ["llama", "gpt2", "qwen3", "olmoe"])
def test_models_of_transformers(kind, recipe):
    """With dropout (GPT-2), and with experts (OLMoE).

    Dropout in blocks whose forward backward runs again reads the state of the random numbers, which is not recorded.
    """
    results, can = [], (kind, recipe) != ("gpt2", "fp8-lean")
    for record in (True, False):
        model = make_transformers(kind)
        engine = Engine(model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True), recipe, clip_norm=1.0)
        step = StepFunction(engine, lambda ids, model=model: model(input_ids=ids, labels=ids).loss, record)
        torch.manual_seed(1)
        warns = pytest.warns(UserWarning, match="without a CUDA graph.*random numbers")
        with warns if record and not can else contextlib.nullcontext():  # one that has caught nothing yet is false
            results.append([step(text(number)[0])[0].item() for number in range(EAGER + 6)])
        results.append([value.clone() for value in model.state_dict().values()])
        assert step.recorded == (record and can), step.reason
    assert results[0] == results[2]
    assert all(map(torch.equal, results[1], results[3]))


def test_experts_of_the_built_in_mixture():
    losses = []
    for record in (True, False):
        task = tasks.find("moe-tiny", seed=0)
        torch.manual_seed(0)
        model = task.model().to(DEVICE)
        engine = Engine(model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True), "fp8")
        step = StepFunction(engine, lambda batch, task=task, model=model: task.loss(model, batch), record)
        batches = [[t.to(DEVICE) for t in task.synthetic(number)] for number in range(3)]
        losses.append([step(tuple(batches[number % 3]))[0].item() for number in range(EAGER + 6)])
        assert step.recorded == record, step.reason
    assert losses[0] == losses[1]


@pytest.mark.parametrize("recipe", ["bf16", "fp8[products=all]"])
def test_dropout_and_batch_norm(recipe):
    losses = []
    for recorded in (True, False):
        run = Run(make_net(0.2), recipe, recorded)
        torch.manual_seed(1)
        losses.append([run.step(*numbers(number)) for number in range(EAGER + 8)])
        losses.append([value.clone() for value in run.model.state_dict().values()])
    assert losses[0] == losses[2]
    assert all(map(torch.equal, losses[1], losses[3]))


@pytest.mark.parametrize("recipe", ["bf16", "fp8[products=all]", "bf16[master=split]"])
def test_skipped_updates(recipe):
    recorded, eager = make_pair(make_net, recipe)
    for number in range(EAGER + 9):
        x, y = numbers(number)
        if number in (EAGER + 3, EAGER + 4):
            x[0, 0] = torch.inf
        one, other = recorded.step(x, y), eager.step(x, y)
        assert one[2] is other[2] is (number not in (EAGER + 3, EAGER + 4))
        assert one == other or not one[2]
    assert recorded.function.recorded == 1
    torch.cuda.synchronize()
    assert recorded.engine.skipped == eager.engine.skipped == 2
    assert recorded.engine.guard.first_bad() == eager.engine.guard.first_bad() != []


def test_stalled_training_stops():
    run = Run(make_net(), "bf16", True, max_consecutive_skips=5)
    for number in range(EAGER + 3):
        run.step(*numbers(number))
    assert run.function.recorded == 1
    with pytest.raises(ng.TrainingStalled):
        for _ in range(20):
            x, y = numbers(0)
            run.step(x * torch.inf, y)


@pytest.mark.parametrize("recipe", ["bf16", "fp8[products=all]"])
def test_other_shapes_evaluation_and_loaded_states(recipe):
    """Everything that moves memory or changes a step: the results stay those of the eager step."""
    recorded, eager = make_pair(make_gpt, recipe)
    number, counts = 0, []

    def train_some(steps: int, rows: int = 4) -> None:
        nonlocal number
        for _ in range(steps):
            number += 1
            batch = text(number, rows)
            assert recorded.step(*batch) == eager.step(*batch), f"step {number}"
        counts.append(recorded.function.recorded)

    train_some(EAGER + 3)
    train_some(EAGER + 2, rows=6)
    train_some(2)
    for run in (recorded, eager):
        with run.engine.evaluating():
            run.compute_loss(*text(0, 16))
    train_some(2)
    state = copy.deepcopy(eager.engine.state_dict())
    for run in (recorded, eager):
        run.engine.load_state_dict(copy.deepcopy(state))  # torch's optimizers keep the tensors that they load
    train_some(EAGER + 3)
    for run in (recorded, eager):
        next(run.model.parameters()).requires_grad_(False)
    train_some(EAGER + 3)
    for run in (recorded, eager):
        run.optimizer.param_groups[0]["weight_decay"] = 0.3
    train_some(EAGER + 3)
    assert counts[:4] == [1, 2, 2, 2]
    assert all(count > 0 for count in counts)
    check_equal(recorded, eager)


@pytest.mark.parametrize("recipe", ["bf16", "fp8[products=all]"])
def test_settings_that_change_start_over(recipe):
    recorded, eager = make_pair(make_gpt, recipe)
    for number in range(20):
        if number == 9:
            assert recorded.function.recorded == 1
            for run in (recorded, eager):
                for block in run.model.blocks:
                    block.norm1.eps = 0.5
        assert recorded.step(*text(number % 3)) == eager.step(*text(number % 3)), number
        assert recorded.function.recorded == (0 if number in range(9, 14) else recorded.function.recorded)
    assert recorded.function.recorded == 1
    check_equal(recorded, eager)


def read_counts(watch: Any) -> dict[Any, Any]:
    """Return what was read and does not depend on the order of sums."""
    snapshots = watch.snapshots(wait=True)
    return {
        (snapshot.update, r.kind, r.module): (r.count, r.zeros, r.inf, r.nan, r.amax, r.exponents)
        for snapshot in snapshots for r in snapshot.readings
    }  # fmt: skip


def test_watched_steps_run_eagerly():
    recorded, eager = make_pair(make_gpt, "fp8[products=all]")
    watches = [ng.watch(run.engine, every=5) for run in (recorded, eager)]
    for number in range(EAGER + 15):
        batch = text(number)
        assert recorded.step(*batch) == eager.step(*batch)
    assert recorded.function.recorded == 1
    readings = [read_counts(one) for one in watches]
    assert readings[0] == readings[1]
    assert len({update for update, _, _ in readings[0]}) == 1 + (EAGER + 14) // 5
    scales = [[(r.update, r.scales, r.saturated) for r in one.fp8_readings(wait=True)] for one in watches]
    assert scales[0] == scales[1]


def test_weights_read_after_a_recorded_step_are_new():
    """What caches weights by their version sees that a graph has written them."""
    run = Run(make_net(), "bf16", True)
    for number in range(EAGER + 2):
        run.step(*numbers(number))
    weight = run.model.head.weight
    before, version = weight.detach().clone(), weight._version
    run.step(*numbers(99))
    assert weight._version > version
    assert not torch.equal(before, weight)


def test_code_that_waits_runs_eagerly():
    model = make_net(0.2)
    engine = Engine(model, torch.optim.AdamW(model.parameters(), fused=True), "bf16")

    def compute_loss(x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y)
        if loss.item() > 1e9:
            raise ValueError
        return loss

    step = StepFunction(engine, compute_loss, record=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        losses = [step(*numbers(number % 3))[0].item() for number in range(EAGER + 12)]
    assert sum("without a CUDA graph" in str(one.message) for one in caught) == 1
    assert step.recorded == 0
    assert "recording a step failed" in step.reason
    assert losses[-1] < losses[0]
    assert engine.updates == EAGER + 12
    torch.rand(3, device=DEVICE)


def test_a_held_graph_delays_recording():
    """Backward would accumulate on the stream of the step that somebody still holds."""
    run = Run(make_net(), "bf16", True)
    held = [run.compute_loss(*numbers(0))]
    for number in range(EAGER + 3):
        run.step(*numbers(number))
    assert run.function.recorded == 0
    held.clear()
    for number in range(3):
        run.step(*numbers(number))
    assert run.function.recorded == 1
    assert run.function.reason is None


def test_only_steps_that_wait_are_recorded():
    run = Run(make_net(), "bf16", False)
    small = StepFunction(run.engine, run.compute_loss)
    for number in range(EAGER + 2):
        small(*numbers(number))
    assert small.recorded == 1
    wide = nn.Sequential(*(nn.Linear(8192, 8192, bias=False) for _ in range(4))).to(DEVICE)
    engine = Engine(wide, torch.optim.AdamW(wide.parameters(), fused=True), "bf16")
    large = StepFunction(engine, lambda x: wide(x).float().square().mean())
    for _ in range(EAGER + 2):
        large(torch.randn(16384, 8192, device=DEVICE))
    assert large.recorded == 0
    assert large.reason == "the GPU does not wait for the host"


def test_inputs_on_the_host_and_plain_values():
    model = make_net()
    engine = Engine(model, torch.optim.AdamW(model.parameters(), fused=True), "bf16")
    step = StepFunction(engine, lambda batch, weight: weight * F.cross_entropy(model(batch["x"]), batch["y"]), True)
    for number in range(EAGER + 2):
        x, y = numbers(number)
        step({"x": x, "y": y}, 1.0)
    assert step.recorded == 1
    x, y = numbers(0)
    one, two = step({"x": x, "y": y}, 1.0)[0], step({"x": x, "y": y}, 2.0)[0]
    assert two > 1.5 * one  # a plain value is part of what is recorded
    on_host = StepFunction(engine, lambda x, y: F.cross_entropy(model(x.cuda()), y.cuda()), True)
    for number in range(EAGER + 2):
        x, y = numbers(number)
        on_host(x.cpu(), y.cpu())
    assert on_host.recorded == 0


@pytest.mark.parametrize(
    ("recipe", "options", "reason"),
    [
        ("fp16", {}, "scales the loss"),
        ("bf16", {"accumulate": 2}, "accumulate"),
        ("bf16", {"cuda_graphs": False}, "turned off"),
        ("bf16", {"compile": True}, "compiled"),
    ],
)
def test_reasons(recipe, options, reason):
    model = nn.Linear(64, 64).to(DEVICE)
    engine = Engine(model, torch.optim.AdamW(model.parameters(), fused=True), recipe, **options)
    step = StepFunction(engine, lambda x: model(x).square().mean())
    assert reason in step.reason
    for _ in range(EAGER + 2):
        step(torch.randn(8, 64, device=DEVICE))
    assert step.recorded == 0


@pytest.mark.parametrize("recipe", ["bf16", "fp8"])
def test_a_run_is_the_same(recipe, tmp_path):
    """``narrowgauge train`` records steps of built-in models: losses and weights are those without."""
    results = []
    for recordable in (True, False):
        task = tasks.find("gpt-tiny", seed=0)
        object.__setattr__(task, "recordable", recordable)
        settings = make_settings(task, recipe=recipe, device="cuda", steps=30, log="none")
        results.append(train(task, settings, tmp_path / str(recordable)))
    assert results[0].loss_last == results[1].loss_last
    assert results[0].loss_eval == results[1].loss_eval
