"""Choosing FP8 per product: it must save more than its casts cost; predicted where no GPU is at hand."""

import pytest

from narrowgauge.hardware import Device, find_gpu
from narrowgauge.nn import choose
from narrowgauge.nn.gemm import ALL_BF16, ALL_FP8


def device(name="H200"):
    gpu = find_gpu(name) if name else None
    return Device(
        kind="cuda",
        name=name or "Some GPU",
        torch_device="cuda:0",
        capability=(9, 0),
        memory_bytes=1 << 37,
        native=("fp32", "tf32", "fp16", "bf16", "fp8"),
        gpu=gpu,
        features=(),
    )


@pytest.fixture(autouse=True)
def no_measurement(monkeypatch):
    monkeypatch.setattr(choose, "measured", lambda *_: None)


def test_large_layers_pay_in_all_three_products():
    decision = choose.decide(16384, 4096, 16384, device(), fused=False)
    assert decision.choice == ALL_FP8
    assert decision.reason.startswith("predicted: ")
    assert all(gain.fp8_ms < gain.bf16_ms for gain in decision.gains.values())


def test_small_layers_do_not():
    decision = choose.decide(65536, 64, 64, device(), fused=False)
    assert decision.choice == ALL_BF16


def test_operands_written_by_their_producers_make_smaller_layers_pay():
    for width in (128, 192, 256, 320, 384, 512):
        alone = choose.decide(65536, width, width, device(), fused=False)
        fused = choose.decide(65536, width, width, device(), fused=True)
        assert alone.choice.count("fp8") <= fused.choice.count("fp8")
    assert choose.decide(65536, 256, 256, device(), fused=True).choice.output == "fp8"
    assert choose.decide(65536, 256, 256, device(), fused=False).choice.output == "bf16"


def test_each_product_has_the_same_operations_and_its_own_casts():
    gains = choose.predicted(1024, 512, 2048, find_gpu("h200"), fused=False)
    assert len({gain.bf16_ms for gain in gains.values()}) == 1
    assert gains["output"].fp8_ms < gains["grad_input"].fp8_ms  # the gradient of a wide output is the larger tensor


def test_an_unknown_gpu_is_said_to_be_unknown_and_a_cpu_to_be_emulating():
    assert "not in the table" in choose.decide(1024, 512, 512, device(None), fused=False).reason
    cpu = Device(
        kind="cpu", name="A CPU", torch_device="cpu", capability=None, memory_bytes=1, native=("fp32",), gpu=None,
        features=(),
    )  # fmt: skip
    assert "emulated" in choose.decide(1024, 512, 512, cpu, fused=False).reason
