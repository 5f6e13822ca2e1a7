"""Choosing FP8 per product: it must save more than its casts cost. Without a GPU the costs are predicted."""

import pytest

from narrowgauge.hardware import Device, find_gpu
from narrowgauge.nn.products import choose_formats
from narrowgauge.nn.products.choose_formats import Costs
from narrowgauge.nn.products.gemm import ALL_BF16, ALL_FP8, GemmChoice


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
    monkeypatch.setattr(choose_formats, "measure_costs", lambda *_: None)


def test_large_layers_gain_in_all_three_products():
    decision = choose_formats.decide(16384, 4096, 16384, device(), fused=False)
    assert decision.choice == ALL_FP8
    assert decision.reason.startswith("predicted: ")
    assert decision.chosen_ms < decision.bf16_ms


def test_small_layers_do_not_gain():
    decision = choose_formats.decide(65536, 64, 64, device(), fused=False)
    assert decision.choice == ALL_BF16


def test_fused_operands_make_smaller_layers_gain():
    for width in (128, 192, 256, 320, 384, 512):
        alone = choose_formats.decide(65536, width, width, device(), fused=False)
        fused = choose_formats.decide(65536, width, width, device(), fused=True)
        assert alone.choice.count("fp8") <= fused.choice.count("fp8")
    assert "fp8" in choose_formats.decide(65536, 320, 320, device(), fused=True).choice
    assert choose_formats.decide(65536, 320, 320, device(), fused=False).choice == ALL_BF16


def test_a_prediction_has_the_same_operations_for_each_product_and_casts_by_size():
    costs = choose_formats.predict_costs(1024, 512, 2048, find_gpu("h200"))
    assert len(set(costs.bf16)) == len(set(costs.fp8)) == 1
    assert costs.cast_grad == 4 * costs.cast_input  # the gradient of a wide output is the larger tensor
    assert costs.cast_input == 3 * costs.turn_input


COSTS = Costs((3.0, 3.0, 3.0), (1.0, 1.0, 1.0), cast_input=0.5, cast_grad=0.6, turn_input=0.2, turn_grad=0.3)


def test_shared_casts_are_counted_once():
    assert COSTS.of(ALL_BF16, fused=False) == COSTS.of(ALL_BF16, fused=True) == 9
    assert COSTS.of(ALL_FP8, fused=False) == pytest.approx(3 + 0.5 + 0.6 + 0.2 + 0.3)
    assert COSTS.of(ALL_FP8, fused=True) == pytest.approx(3 + 0.2 + 0.3)
    assert COSTS.of(GemmChoice("fp8", "bf16", "bf16"), fused=False) == pytest.approx(7 + 0.5)
    # A producer that writes one format needs a cast for the other.
    assert COSTS.of(GemmChoice("fp8", "fp8", "bf16"), fused=True) == pytest.approx(5 + 0.5 + 0.6)


def test_the_cheapest_combination_is_chosen(monkeypatch):
    dear = Costs((3.0, 3.0, 1.2), (1.0, 1.0, 1.0), cast_input=0.1, cast_grad=0.1, turn_input=0.5, turn_grad=0.5)
    monkeypatch.setattr(choose_formats, "measure_costs", lambda *_: dear)
    decision = choose_formats.decide(1024, 512, 512, device(), fused=False)
    assert decision.choice == GemmChoice("fp8", "fp8", "bf16")
    assert decision.reason == "measured: 7.200 ms in BF16, 3.400 ms as chosen, of which casts 0.200"


def test_reasons_for_an_unknown_gpu_and_a_cpu():
    assert "not in the table" in choose_formats.decide(1024, 512, 512, device(None), fused=False).reason
    cpu = Device(
        kind="cpu", name="A CPU", torch_device="cpu", capability=None, memory_bytes=1, native=("fp32",), gpu=None,
        features=(),
    )  # fmt: skip
    assert "emulated" in choose_formats.decide(1024, 512, 512, cpu, fused=False).reason
