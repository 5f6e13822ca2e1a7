"""The table of fractions of peak: it is complete and plausible, and all code uses it."""

import re
from pathlib import Path

import pytest

import narrowgauge
from narrowgauge import hardware
from narrowgauge.forecast.time.reachable_rates import ReachableRates
from narrowgauge.lint import padding
from narrowgauge.nn.products import choose_formats
from narrowgauge.peak_fractions import get_fraction, load_fractions

H200 = hardware.find_gpu("h200")


@pytest.mark.parametrize("entry", load_fractions().values(), ids=lambda entry: entry.name)
def test_every_fraction_is_plausible_and_names_its_source(entry):
    assert 0 < entry.value <= 1
    assert entry.measured_on in ("H200", "derived") and len(entry.source) > 20 and entry.of
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", entry.date)


def test_forecast_format_choice_and_lint_use_the_same_table():
    rates, costs = ReachableRates(H200), choose_formats.predict_costs(65536, 768, 3072, H200)
    flops = 2 * 65536 * 768 * 3072
    assert costs.bf16[0] == pytest.approx(flops / rates.product("bf16") * 1e3)
    assert costs.fp8[0] == pytest.approx(flops / rates.product("fp8") * 1e3)
    assert pytest.approx(costs.fp8[0] / costs.bf16[0], rel=1e-3) == padding.FP8_TIME
    assert get_fraction("unaligned_product") == padding.UNALIGNED


def test_a_whole_step_reaches_less_than_one_large_product():
    for format in ("bf16", "fp8"):
        assert get_fraction(f"product.{format}") < get_fraction(f"square_product.{format}")
    memory = [entry.value for name, entry in load_fractions().items() if name.startswith("memory.")]
    assert max(memory) == get_fraction("memory.plain_copy")


def test_every_entry_is_used():
    source = Path(narrowgauge.__file__).parent
    text = "".join(path.read_text() for path in source.rglob("*.py"))
    for name in load_fractions():
        family = name.split(".")[0]
        assert f'"{name}"' in text or f'f"{family}.' in text, name
