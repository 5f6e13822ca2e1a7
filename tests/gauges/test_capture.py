"""The recorder captures the step in which a number is inf or NaN: once, completely, and safely for the training."""

from __future__ import annotations

import errno
import json
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn

from narrowgauge import Engine, UsageError
from narrowgauge.gauges import capture
from narrowgauge.gauges.capture import Recorder
from narrowgauge.gauges.replay import capture_files

Pair = namedtuple("Pair", ["x", "factor"])


class Net(nn.Module):
    """Has batch norm, dropout and a tied weight."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.outer = nn.Linear(8, 8)
        self.outer.weight = self.inner.weight
        self.norm = nn.BatchNorm1d(8)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(self.dropout(self.norm(self.inner(x))))


class Loop:
    """A training loop as a user would write it around an engine."""

    def __init__(self, folder: Path, recipe: str = "fp32", accumulate: int = 1, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = Net()
        self.engine = Engine(
            self.model, torch.optim.AdamW(self.model.parameters(), lr=1e-2), recipe, accumulate=accumulate
        )
        self.lines: list[str] = []
        self.recorder = Recorder(self.engine, folder, tell=self.lines.append, **options)
        self.number = 0

    def loss(self, batch: Pair) -> Tensor:
        return self.model(batch.x).float().square().mean() * batch.factor

    def step(self, factor: float = 1.0) -> Path | None:
        """Train on one microbatch; a factor of NaN makes its loss NaN."""
        self.number += 1
        batch = Pair(torch.randn(4, 8, generator=torch.Generator().manual_seed(self.number)), torch.tensor(factor))
        self.recorder.record_batch(batch)
        with self.engine.forward():
            loss = self.loss(batch)
        self.engine.backward(loss)
        return self.recorder.record_step(self.engine.step(), loss)


def copied(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_a_healthy_loop_writes_no_capture(tmp_path: Path) -> None:
    loop = Loop(tmp_path / "captures")
    assert [loop.step() for _ in range(3)] == [None] * 3
    assert loop.recorder.finish() is None and not (tmp_path / "captures").exists() and loop.lines == []


def test_a_capture_has_the_state_at_the_start_of_the_step(tmp_path: Path) -> None:
    loop = Loop(tmp_path, accumulate=2)
    for _ in range(2):
        loop.step()
    before = copied(loop.model)
    random = torch.get_rng_state()
    assert loop.step() is None
    path = loop.step(torch.nan)
    assert path == tmp_path / "step-00000002" and sorted(f.name for f in path.iterdir()) == [
        "capture.json",
        capture_files.STATE,
    ]
    held = capture_files.read(path)
    assert same(held.state["model"], before), "weights and buffers from before the step, batch statistics included"
    assert torch.isfinite(held.state["model"]["norm.running_mean"]).all()
    assert held.state["model"]["inner.weight"] is not None and held.step == 2
    facts = held.facts
    assert (facts["recipe"], facts["accumulate"], facts["loss_scale"], facts["loss"]) == ("fp32", 2, None, "nan")
    assert facts["exact"] is True and facts["weights_of_step"] == 2 and facts["applied"] is False
    first, second = held.state["microbatches"]
    assert torch.equal(first["random"]["torch"], random) and not torch.equal(second["random"]["torch"], random)
    batch = capture_files.unpack(second["batch"])
    assert type(batch).__name__ == "Pair" and batch.x.shape == (4, 8) and batch.factor.isnan()
    assert loop.lines == [f"captured step 2 because the loss is nan; to replay it: narrowgauge replay {path}"]


def test_a_capture_contains_no_code(tmp_path: Path) -> None:
    path = Loop(tmp_path).step(torch.nan)
    assert path is not None
    with safe_open(path / capture_files.STATE, "pt") as file:
        assert set(json.loads(file.metadata()["tree"])["dict"]) == {"model", "buffers", "tensor_scales", "microbatches"}
    assert json.loads((path / "capture.json").read_text())["format"] == capture_files.FORMAT


def test_shared_weights_are_written_once(tmp_path: Path) -> None:
    path = Loop(tmp_path).step(torch.nan)
    assert path is not None
    model = capture_files.read(path).state["model"]
    assert model["inner.weight"].data_ptr() == model["outer.weight"].data_ptr()


def test_captures_are_limited_per_series_and_per_folder(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    for factor in (1.0, torch.nan, torch.nan, 1.0, torch.inf, 1.0, torch.nan):
        loop.step(factor)
    assert [path.name for path in capture_files.list_captures(tmp_path)] == ["step-00000002", "step-00000005"]
    assert Loop(tmp_path).step(torch.nan) is None, "captures of earlier recorders count"


def test_a_model_that_is_too_large_is_not_captured(tmp_path: Path) -> None:
    loop = Loop(tmp_path, max_bytes=100)
    assert loop.step(torch.nan) is None and loop.step() is None
    assert loop.lines == ["step 1 is not captured: the model has 384 bytes of weights, more than max_bytes=100"]


def test_a_full_disk_is_reported_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    loop = Loop(tmp_path)
    monkeypatch.setattr(capture_files, "write_tensors", full)
    assert loop.step(torch.nan) is None and loop.step() is None
    assert loop.lines == ["step 1 is not captured: [Errno 28] No space left on device"]
    assert list(tmp_path.iterdir()) == []


def test_a_batch_that_cannot_be_saved_is_reported_in_one_line(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    loop.recorder.record_batch({"what": object()})
    loop.step(torch.nan)
    assert loop.lines == ["step 1 is not captured: the batch contains a object, which cannot be saved without code"]


def test_overflows_under_a_dynamic_loss_scale_are_captured_only_after_patience(tmp_path: Path) -> None:
    loop = Loop(tmp_path, "fp16", patience=3)
    overflowing = 1e3  # exceeds FP16 when multiplied by the initial loss scale
    assert [loop.step(overflowing) for _ in range(2)] == [None, None] and loop.engine.skipped == 2
    assert loop.step(overflowing) is not None, "the third consecutive one"
    assert "3 consecutive updates were skipped" in loop.lines[0]
    assert capture_files.read(tmp_path).facts["loss_scale"] == 2.0**14, "the scale used in that step"


def test_an_overflow_under_a_fixed_loss_scale_is_captured(tmp_path: Path) -> None:
    assert Loop(tmp_path, "fp16[loss_scale=65536.0]").step(1e3) is not None


@pytest.mark.parametrize("ahead", [None, 3])
def test_a_step_can_be_requested(tmp_path: Path, ahead: int | None) -> None:
    loop = Loop(tmp_path)
    loop.step()
    loop.recorder.request(ahead)
    if ahead is not None:
        assert loop.step() is None
    before = copied(loop.model)
    path = loop.step()
    assert path is not None and not same(copied(loop.model), before)
    held = capture_files.read(path)
    assert held.step == (ahead or 2) and same(held.state["model"], before)
    assert held.facts["exact"] and held.facts["why"] == "it was requested" and held.facts["applied"]


def test_a_past_step_cannot_be_requested(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    loop.step()
    with pytest.raises(UsageError, match="step 1 is over; the next one is 2"):
        loop.recorder.request(1)


def test_a_requested_step_that_cannot_be_captured_is_reported(tmp_path: Path) -> None:
    loop = Loop(tmp_path, max_bytes=100)
    loop.recorder.request()
    assert loop.step() is None and len(loop.lines) == 1 and "more than max_bytes=100" in loop.lines[0]
    full = Loop(tmp_path, max_captures=0)
    full.recorder.request()
    assert full.step() is None and "already holds 0 captures" in full.lines[0]


def test_a_late_capture_says_which_step_its_weights_are_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: the numbers of step 2 arrive after steps 3 (also skipped) and 4."""
    loop = Loop(tmp_path)
    monkeypatch.setattr(loop.recorder._readback, "ready", list)
    loop.step()
    before = copied(loop.model)
    loop.step(torch.nan)
    loop.step(torch.nan)
    loop.step()
    path = loop.recorder.finish()
    assert path == tmp_path / "step-00000002"
    held = capture_files.read(path)
    assert held.facts["weights_of_step"] == 3 and held.facts["exact"] is False, "one update was applied in between"
    parameters = dict(loop.model.named_parameters())
    assert torch.equal(held.state["model"]["inner.weight"], parameters["inner.weight"])
    assert torch.equal(held.state["model"]["norm.running_mean"], before["norm.running_mean"]), (
        "buffers are copied at the start of the step"
    )


def test_a_late_capture_is_exact_if_all_updates_were_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop(tmp_path)
    monkeypatch.setattr(loop.recorder._readback, "ready", list)
    for factor in (1.0, torch.nan, torch.nan):
        loop.step(factor)
    path = loop.recorder.finish()
    assert path is not None and capture_files.read(path).facts["exact"] is True


def test_a_step_outside_the_window_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop(tmp_path, window=2)
    monkeypatch.setattr(loop.recorder._readback, "ready", list)
    for factor in (torch.nan, 1.0, 1.0, 1.0):
        loop.step(factor)
    assert loop.recorder.finish() is None
    assert loop.lines == ["step 1 is not captured (the loss is nan): its numbers arrived after 2 later steps"]


def test_memory_for_kept_batches_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture, "WINDOW_BYTES", 300)  # a batch has 132 bytes
    loop = Loop(tmp_path)
    monkeypatch.setattr(loop.recorder._readback, "ready", list)
    for _ in range(6):
        loop.step()
    assert len(loop.recorder._starts) == 3


def test_an_overwritten_batch_is_recorded_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop(tmp_path)
    monkeypatch.setattr(loop.recorder._readback, "ready", list)
    loop.step(torch.nan)
    loop.recorder._starts[0].microbatches[0].batch.x.zero_()
    path = loop.recorder.finish()
    assert path is not None
    facts = capture_files.read(path).facts
    assert facts["batches_unchanged"] is False and facts["exact"] is False


def test_fp8_scales_are_those_of_the_step(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16))
    engine = Engine(model, torch.optim.AdamW(model.parameters()), "fp8[products=all]")
    recorder = Recorder(engine, tmp_path, tell=lambda line: None)
    assert engine.conversion.scales is not None
    for factor in (1.0, 30.0, torch.nan):
        batch = torch.randn(16, 16) * factor
        recorder.record_batch(batch)
        before = engine.conversion.scales.scale.clone()
        with engine.forward():
            loss = model(batch).float().square().mean()
        engine.backward(loss)
        recorder.record_step(engine.step(), loss)
    scales = capture_files.read(tmp_path).state["tensor_scales"]
    assert torch.equal(scales["scale"], before) and scales["sites"] == list(engine.conversion.scales.sites)


def test_packing_a_slice_does_not_keep_the_whole_dataset() -> None:
    data = torch.zeros(1_000_000)
    packed = capture_files.pack({"x": data[:10], "names": ["a", None, 1.5]})
    assert packed["x"].untyped_storage().nbytes() == 40 and packed["names"] == ["a", None, 1.5]
    assert [place for place, _ in capture_files.list_tensors(packed)] == ["['x']"]


def test_invalid_arguments_raise(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="window=0"):
        Loop(tmp_path, window=0)


def damage(path: Path, how: str) -> Path:
    facts, state = path / "capture.json", path / capture_files.STATE
    if how == "missing":
        return path / "nowhere"
    if how == "empty folder":
        (path / "empty").mkdir()
        return path / "empty"
    if how == "not json":
        facts.write_text("{")
    elif how == "other json":
        facts.write_text("[]")
    elif how == "other version":
        facts.write_text(facts.read_text().replace('"format": 2', '"format": 7'))
    elif how == "old version":
        facts.write_text(facts.read_text().replace('"format": 2', '"format": 1'))
    elif how == "cut short":
        state.write_bytes(state.read_bytes()[:100])
    elif how == "changed":
        data = bytearray(state.read_bytes())
        data[len(data) // 2] ^= 255
        state.write_bytes(bytes(data))
    elif how == "no state":
        state.unlink()
    return path


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("missing", "there is no capture"),
        ("empty folder", "has no capture"),
        ("not json", "is not JSON"),
        ("other json", "was not written by narrowgauge"),
        ("other version", "has format 7, this version reads 2"),
        ("old version", "old pickle format, which is no longer supported"),
        ("cut short", "has 100 bytes"),
        ("changed", "does not match its SHA-256"),
        ("no state", "No such file"),
    ],
)
def test_damaged_captures_raise_one_line_errors(tmp_path: Path, how: str, message: str) -> None:
    path = Loop(tmp_path).step(torch.nan)
    assert path is not None
    with pytest.raises(UsageError, match=message) as caught:
        capture_files.read(damage(path, how))
    assert "\n" not in str(caught.value)


def test_a_batch_of_unusual_tensors_is_captured_exactly(tmp_path: Path) -> None:
    sparse = torch.sparse_coo_tensor(
        torch.tensor([[0, 1], [2, 0]]), torch.tensor([1.5, -2.0]), (2, 3), check_invariants=True
    )
    wave = torch.randn(3, dtype=torch.complex128)
    batch = {"graph": sparse, "wave": wave.conj(), 7: (torch.tensor(True), float("inf"))}
    capture_files.write(tmp_path / "one", {"step": 1}, {"microbatches": [capture_files.pack(batch)]})
    (back,) = capture_files.read(tmp_path / "one").state["microbatches"]
    assert torch.equal(back["graph"].to_dense(), sparse.to_dense()) and back["graph"].layout == torch.sparse_coo
    assert torch.equal(back["wave"], wave.conj().resolve_conj()) and back[7] == (torch.tensor(True), float("inf"))


def test_former_method_names_still_work(tmp_path: Path) -> None:
    """Existing scripts call saw, after and settle."""
    loop = Loop(tmp_path)
    recorder, batch = loop.recorder, Pair(torch.ones(4, 8), torch.tensor(torch.nan))
    recorder.saw(batch)
    with loop.engine.forward():
        loss = loop.loss(batch)
    loop.engine.backward(loss)
    assert recorder.after(loop.engine.step(), loss) == tmp_path / "step-00000001"
    assert recorder.settle() is None
