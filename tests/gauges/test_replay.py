"""Replay names the op that produced the first inf or NaN, for every planted cause."""

from __future__ import annotations

import functools
import json
import logging
import random
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from replay_cases import CASES, WIDTH, Case, Net, act, draw
from replay_steps import mean_square, step_until_captured
from torch import Tensor, nn

import narrowgauge
from narrowgauge import Engine, UsageError
from narrowgauge.cli import main
from narrowgauge.gauges.capture import Recorder
from narrowgauge.gauges.replay.replay import replay
from narrowgauge.gauges.replay.result import Replay
from narrowgauge.models.gpt import GPT, GPTConfig
from narrowgauge.runs.batches import to_device

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
GPT_CONFIG = GPTConfig(layers=2, width=32, heads=2, context=16, vocab=256)


def capture(case: Case, folder: Path) -> Path:
    """Train the case's model until its step is captured."""
    torch.manual_seed(0)
    model = Net(case.culprit())
    if case.prepare is not None:
        case.prepare(model)
    model = model.to(DEVICE)
    engine = Engine(model, torch.optim.AdamW(model.parameters(), lr=1e-3), case.recipe, **case.engine)
    recorder = Recorder(engine, folder, patience=1, tell=logging.getLogger("test").info)
    written = None
    for batch in to_device(case.batches(), torch.device(DEVICE)):
        recorder.record_batch(batch)
        with engine.forward():
            loss = case.loss(engine.model, batch)
        engine.backward(loss)
        written = recorder.record_step(engine.step(), loss) or written
    assert written is not None, "nothing was captured"
    return written


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name.replace(" ", "-"))
def test_planted_cause(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))  # no C++ compiler
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # from torch.compile and reentrant checkpointing
        path = capture(case, tmp_path)
        torch.manual_seed(99)  # other initial weights: the captured ones must replace them
        found: Replay = replay(path, lambda: Net(case.culprit()), case.loss)
    result = (found.module, found.op, found.phase, found.kind, found.microbatch, found.survives_fp32)
    assert result == (case.module, case.op, case.phase, case.kind, case.microbatch, case.survives), found.message
    if case.kernel is not None:
        assert found.kernel == case.kernel
    assert found.step == 1 and found.found and found.exact == case.exact and found.advice
    assert all(entry.get("nan", 0) == 0 for entry in found.inputs) or found.op in ("input", "parameter")


def of_tokens(model: nn.Module, batch: Tensor) -> Tensor:
    loss: Tensor = model(batch, batch)
    return loss


def broken_gpt(path: str, value: float) -> GPT:
    torch.manual_seed(0)
    model = GPT(GPT_CONFIG)
    with torch.no_grad():
        model.get_parameter(path).fill_(value)
    return model


@pytest.mark.parametrize(
    ("recipe", "fused"), [("bf16", True), ("bf16[checkpoint=full]", True), ("fp32", False), ("bf16-lean", True)]
)
def test_the_module_inside_a_fused_block_is_named(tmp_path: Path, recipe: str, fused: bool) -> None:
    model = broken_gpt("blocks.1.norm2.weight", 3e38)
    path = step_until_captured(model, of_tokens, [torch.arange(16)[None]], tmp_path, recipe, fused=fused)
    found = replay(path, lambda: GPT(GPT_CONFIG), of_tokens)
    assert (found.module, found.op, found.kind) == ("blocks.1.norm2", "aten.native_layer_norm", "inf")
    assert found.source is not None and "models/gpt.py:" in found.source and found.survives_fp32 is False


@pytest.mark.parametrize(
    "recipe",
    [
        "fp8[products=all]",
        "fp8[products=all,checkpoint=full]",
        "fp8-lean",
        "fp8[granularity=row]",
        "fp8[granularity=block]",
    ],
)
def test_fp8_blocks(tmp_path: Path, recipe: str) -> None:
    model = broken_gpt("blocks.1.up.weight", torch.nan)
    path = step_until_captured(model, of_tokens, [torch.arange(16)[None]], tmp_path, recipe)
    found = replay(path, lambda: GPT(GPT_CONFIG), of_tokens)
    assert (found.module, found.op, found.kind, found.phase) == ("blocks.1.up", "parameter", "nan", "forward")
    assert "parameter blocks.1.up.weight contains NaN before the step" in found.message


def test_fp8_blocks_from_finite_weights(tmp_path: Path) -> None:
    model = broken_gpt("tok.weight", 3e38)
    path = step_until_captured(model, of_tokens, [torch.arange(16)[None]], tmp_path, "fp8[products=all]")
    found = replay(path, lambda: GPT(GPT_CONFIG), of_tokens)
    assert (found.module, found.op, found.phase) == ("blocks.0.norm1", "aten.native_layer_norm", "forward")


def test_finite_gradients_with_an_overflowing_norm(tmp_path: Path) -> None:
    """Gradients near the FP32 maximum: each is finite, their norm is not."""
    model = nn.Sequential(nn.Linear(WIDTH, 1, bias=False))
    batch = torch.ones(4, WIDTH)
    path = step_until_captured(model, lambda m, b: m(b).mean() * 3.4e38, [batch], tmp_path)
    found = replay(path, lambda: nn.Sequential(nn.Linear(WIDTH, 1, bias=False)), lambda m, b: m(b).mean() * 3.4e38)
    assert (found.module, found.op, found.phase, found.kind) == ("0", "gradient norm", "backward", "inf")
    assert "every gradient is finite, but their norm overflows FP32: 0.weight" in found.message


def test_gradients_that_overflow_when_summed(tmp_path: Path) -> None:
    """A tensor is used twice; each gradient fits in FP16, but their sum does not."""

    class Twice(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            z = x * 1
            change = z - z.detach()
            return change * 4e4 + change * 4e4

    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), Twice())

    path = step_until_captured(make(), lambda m, b: m(b).sum(), [draw(0)], tmp_path, "fp16[loss_scale=1.0]")
    found = replay(path, make, lambda m, b: m(b).sum())
    assert (found.module, found.op, found.kernel, found.phase) == ("1", "gradient sum", "aten.add", "backward")
    assert found.kind == "inf" and found.survives_fp32 and [entry["amax"] for entry in found.inputs[:2]] == [4e4, 4e4]


def test_numbers_read_with_item_are_followed(tmp_path: Path) -> None:
    def shift(model: nn.Module, batch: Tensor) -> Tensor:
        largest = (batch - batch).log().amin().item()
        return (model(batch) * largest).mean()

    path = step_until_captured(Net(nn.Tanh()), shift, [draw(0)], tmp_path)
    found = replay(path, Net(nn.Tanh()), shift)
    assert (found.op, found.kind) == ("aten.log", "inf")


def test_sparse_gradients(tmp_path: Path) -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Embedding(9, 4, sparse=True), act(lambda x: (x - x).sqrt())())

    model = make()
    engine = Engine(model, torch.optim.SparseAdam(model.parameters()), "fp32")
    recorder = Recorder(engine, tmp_path, tell=lambda line: None)
    recorder.record_batch(torch.arange(5))
    with engine.forward():
        loss = model(torch.arange(5)).sum()
    engine.backward(loss)
    path = recorder.record_step(engine.step(), loss)
    assert path is not None
    found = replay(path, make, lambda m, b: m(b).sum())
    assert (found.module, found.op, found.phase, found.kind) == ("1", "SqrtBackward0", "backward", "inf")


def test_progress_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("narrowgauge.gauges.replay.nonfinite_flow.PROGRESS_S", 0.0)
    path = step_until_captured(Net(act(lambda x: (x - x).sqrt())()), mean_square, [draw(0)], tmp_path)
    lines: list[str] = []
    replay(path, Net(act(lambda x: (x - x).sqrt())()), mean_square, progress=lines.append)
    assert lines[0].startswith("microbatch 1 of 1, forward: ") and "backward: " in lines[-1]


class Unlucky(nn.Module):
    """Divides by zero if all three generators give a small number, about once in 64 steps."""

    def forward(self, x: Tensor) -> Tensor:
        draws = [torch.rand(()).item(), random.random(), np.random.rand()]
        return x / (0.0 if all(value < 0.25 for value in draws) else 1.0)


def test_random_states_are_restored(tmp_path: Path) -> None:
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    path = step_until_captured(Net(Unlucky()), mean_square, [draw(n) for n in range(500)], tmp_path)
    model = Net(Unlucky())
    before = torch.get_rng_state()
    found = replay(path, model, mean_square)
    assert (found.module, found.op) == ("blocks.1.act", "aten.div") and found.step > 1
    assert torch.equal(torch.get_rng_state(), before), "the caller's state is restored"


def test_a_model_compiled_by_the_user(tmp_path: Path) -> None:
    torch.manual_seed(0)

    def make() -> nn.Module:
        return Net(act(lambda x: (x - x).log())())

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled: Any = torch.compile(make(), backend="eager")
        path = step_until_captured(compiled, mean_square, [draw(0)], tmp_path)
    assert replay(path, make, mean_square).module == "blocks.1.act"
    assert replay(path, compiled, mean_square).module == "blocks.1.act"


def test_a_healthy_step_replays_finite(tmp_path: Path) -> None:
    model = Net(nn.Tanh())
    engine = Engine(model, torch.optim.AdamW(model.parameters()), "fp32")
    recorder = Recorder(engine, tmp_path, tell=lambda line: None)
    recorder.request()
    recorder.record_batch(draw(0))
    with engine.forward():
        loss = mean_square(model, draw(0))
    engine.backward(loss)
    path = recorder.record_step(engine.step(), loss)
    assert path is not None
    found = replay(path, Net(nn.Tanh()), mean_square)
    assert not found.found and found.module is None and found.operations > 20
    assert found.message.startswith("step 1 replays finite")


@pytest.mark.parametrize("recipe", ["tf32", "fp32[attention=flash]"])
def test_a_capture_of_a_gpu_replays_on_a_cpu(tmp_path: Path, recipe: str) -> None:
    path = step_until_captured(Net(act(lambda x: x / 0)()), mean_square, [draw(0)], tmp_path)
    facts = json.loads((path / "capture.json").read_text())
    (path / "capture.json").write_text(json.dumps({**facts, "recipe": recipe, "device": "cuda:0"}))
    found = replay(path, Net(act(lambda x: x / 0)()), mean_square)
    assert (found.module, found.op) == ("blocks.1.act", "aten.div")


def test_a_mask_that_reaches_the_loss_is_reported(tmp_path: Path) -> None:
    def masked(model: nn.Module, batch: Tensor) -> Tensor:
        scores = model(batch).masked_fill(torch.arange(4) == 2, -torch.inf)
        return nn.functional.cross_entropy(scores, torch.full((len(batch),), 2))

    path = step_until_captured(Net(nn.Tanh()), masked, [draw(0)], tmp_path)
    found = replay(path, Net(nn.Tanh()), masked)
    assert (found.module, found.op, found.kind) == ("(loss)", "aten.masked_fill", "inf")
    assert "check the mask" in str(found.advice)


def test_a_mask_in_the_batch_is_not_blamed(tmp_path: Path) -> None:
    def attend(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, mask = batch
        return (torch.softmax(model(x) + mask, -1).log().clamp(-9) * (x[:, :4] - x[:, :4]).log()).sum()

    mask = torch.tensor([0.0, 0.0, -torch.inf, 0.0])
    path = step_until_captured(Net(nn.Tanh()), attend, [(draw(0), mask)], tmp_path)
    found = replay(path, Net(nn.Tanh()), attend)
    assert (found.op, found.kind, found.module) == ("aten.log", "inf", "(loss)")
    assert found.inputs[0]["amax"] == 0, "the second log; clamp absorbs the inf of the first"


def test_hooks_and_modes_are_removed(tmp_path: Path) -> None:
    path = step_until_captured(Net(act(lambda x: x / 0)()), mean_square, [draw(0)], tmp_path)
    model = Net(act(lambda x: x / 0)())
    replay(path, model, mean_square)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert torch._C._len_torch_dispatch_stack() == 0 and torch._C._len_torch_function_stack() == 0


def test_bad_input_is_a_one_line_error(tmp_path: Path) -> None:
    path = step_until_captured(Net(act(lambda x: x / 0)()), mean_square, [draw(0)], tmp_path)
    with pytest.raises(UsageError, match="the model does not fit the weights of capture"):
        replay(path, nn.Linear(3, 3), mean_square)
    with pytest.raises(UsageError, match="replaying microbatch 1 raised TypeError"):
        replay(path, Net(nn.Tanh()), lambda model, batch: model())
    with pytest.raises(UsageError, match="there is no capture"):
        narrowgauge.replay(tmp_path / "nowhere", Net(nn.Tanh()), mean_square)


TASK = """
import torch
from narrowgauge import Task

def make(factor: float = 1.0):
    def loss(model, batch):
        x, bad = batch
        y = model(x)
        return (y / (y - y) if bool(bad) else y).square().mean()

    def batch(step, split):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
        return x, torch.tensor(step == 2 and split == "train")

    return Task(model=lambda: torch.nn.Sequential(torch.nn.Linear(8, 8)), batch=batch, loss=loss, steps=4)
"""


@pytest.fixture
def trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Path:
    """A run whose third step has a nonfinite loss and whose second step was requested."""
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(TASK)
    argv = ["train", "mine.py:make", "--device", "cpu", "--recipe", "fp32", "--out", "run", "--eval-every", "0"]
    assert main([*argv, "--capture", "2", "--json"]) in (0, 1)  # the exit code depends on the findings
    captured = capsys.readouterr()
    assert json.loads(captured.out)["captures"] == [f"run/captures/step-0000000{n}" for n in (2, 3)]
    assert "to replay it: narrowgauge replay run/captures/step-00000003" in captured.err
    return Path("run")


def test_command_line(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", "run/captures/step-00000003", "--json"]) == 1
    out = capsys.readouterr()
    data = json.loads(out.out)
    assert {"module": "(loss)", "op": "aten.div", "phase": "forward", "kind": "inf", "step": 3}.items() <= data.items()
    assert [entry["name"] for entry in data["inputs"]] == ["self", "other"] and data["inputs"][1]["amax"] == 0
    assert data["survives_fp32"] is False and "mine.py:9" in data["source"]
    assert "captured because the loss is inf" in out.err and "what to do" in out.err
    events = [json.loads(line) for line in (trained / "events.jsonl").read_text().splitlines()]
    assert [event["step"] for event in events if event["kind"] == "capture"] == [2, 3]


def test_command_line_of_a_healthy_step(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(trained)]) == 0, "for a run, the first capture is replayed"
    assert "step 2 replays finite" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["replay", "nowhere"], "there is no capture nowhere"),
        (["replay", "mine.py"], "has no capture"),
        (["replay", "run", "--task", "gpt-tony"], "there is no task 'gpt-tony'"),
        (["replay", "run", "--task", "digits"], "the model does not fit the weights"),
        (["replay", "run", "--device", "tpu"], "unknown device 'tpu'"),
        (["train", "mine.py:make", "--recipe", "fp32", "--device", "cpu", "--capture", "9"], "--capture 9: expected"),
    ],
)
def test_command_line_errors_are_one_line(
    trained: Path, capsys: pytest.CaptureFixture[str], argv: list[str], message: str
) -> None:
    assert main(argv) == 2
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert line.startswith("narrowgauge: ") and message in line


def test_a_capture_of_a_custom_loop_needs_a_task(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    facts = trained / "captures" / "step-00000003" / "capture.json"
    facts.write_text(json.dumps({**json.loads(facts.read_text()), "run": None}))
    assert main(["replay", str(facts.parent)]) == 2
    assert "--task file.py:function" in capsys.readouterr().err
    assert main(["replay", str(facts.parent), "--task", "mine.py:make"]) == 1
