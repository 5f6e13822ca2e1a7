"""``gradients_format=auto``: E4M3 for gradients whose values fit into it, E5M2 for others, chosen at set updates."""

import math

import pytest
import torch
import transformers
from torch import nn

from narrowgauge import Engine, UsageError, recipe
from narrowgauge.models.gpt import GPT, GPTConfig
from narrowgauge.runs.engine_choices import describe_changes
from narrowgauge.scaling import gradient_formats as module
from narrowgauge.scaling.gradient_formats import E4M3, E5M2, FLUSHED_BELOW, MOST_FLUSHED, FormatChange

AUTO = "fp8[products=all,gradients_format=auto]"


@pytest.fixture(autouse=True)
def _early(monkeypatch):
    """Read gradients in updates 2, 5 and 8."""
    monkeypatch.setattr(module, "EARLY", (2, 5))
    monkeypatch.setattr(module, "EVERY", 8)


class Wide(nn.Module):
    """The gradient of ``wide``'s output has rows of very different sizes, that of ``narrow``'s has not."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.narrow, self.wide = nn.Linear(64, 32), nn.Linear(64, 32)
        self.factors = 1.0

    def forward(self, x):
        return self.narrow(x).float().sin().sum() + (self.wide(x).float().sin().sum(1) * self.factors).sum()


def make(text=AUTO, **options):
    model = Wide()
    return Engine(model, torch.optim.AdamW(model.parameters(), lr=1e-3), text, **options)


def run(engine, spread, steps=1):
    """Train with factors from 1 to 2**-spread on the rows of the wide gradient."""
    for _ in range(steps):
        x = torch.randn(64, 64, generator=torch.Generator().manual_seed(engine.updates))
        engine.inner.factors = torch.linspace(0, -spread, 64).exp2()
        with engine.forward():
            loss = engine.model(x)
        engine.backward(loss)
        report = engine.step()
    return report


def get(engine):
    return {name.partition(".")[0]: format for name, format in engine.gradient_formats.formats.items()}


def make_gpt(text, **options):
    torch.manual_seed(0)
    model = GPT(GPTConfig(layers=2, width=64, heads=4, vocab=128, context=32))
    return Engine(model, torch.optim.AdamW(model.parameters(), lr=1e-3), text, **options)


def train_gpt(engine, steps, first=0):
    losses = []
    for step in range(first, first + steps):
        for part in range(engine.accumulate):
            seed = torch.Generator().manual_seed(10 * step + part)
            tokens = torch.randint(0, 128, (2, 33), generator=seed)
            with engine.forward():
                loss = engine.model(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
            engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def test_numbers_that_e4m3_flushes_are_known_by_their_bits_in_e5m2():
    bits = torch.arange(1, 124, dtype=torch.uint8)  # all positive numbers
    numbers = bits.view(E5M2).float()
    flushed = (numbers * (448 / 57344)).to(E4M3).float() == 0
    assert torch.equal(flushed, bits < FLUSHED_BELOW) and flushed.any()


def test_wide_gradients_stay_in_e5m2_and_narrow_ones_change():
    engine = make()
    run(engine, 40)
    assert get(engine) == {"narrow": "e5m2", "wide": "e5m2"}, "the first update reads nothing"
    run(engine, 40)
    assert get(engine) == {"narrow": "e4m3", "wide": "e5m2"}
    (change,) = engine.gradient_formats.changes
    assert change._replace(flushed=0.0) == FormatChange(2, "narrow.grad_output", "e4m3", 0.0)
    assert change.flushed <= MOST_FLUSHED
    assert str(engine.gradient_formats) == "1 of 2 gradients in E4M3, the others in E5M2"
    for name, dtype, largest in (("narrow", E4M3, 448), ("wide", E5M2, 57344)):
        site = engine.conversion.scales.sites[f"{name}.grad_output"]
        assert site.dtype is dtype and float(site.scale * site.inv_scale) == pytest.approx(1)
        history = engine.conversion.scales.history[:, list(engine.conversion.scales.sites).index(site.name)]
        assert float(site.scale * history.max()) == pytest.approx(largest)


def test_gradients_change_back_when_they_become_wide():
    engine = make()
    run(engine, 2, 2)
    assert get(engine) == {"narrow": "e4m3", "wide": "e4m3"}
    run(engine, 40, 2)
    assert get(engine)["wide"] == "e4m3", "updates 3 and 4 read nothing"
    run(engine, 40)
    assert get(engine) == {"narrow": "e4m3", "wide": "e5m2"}
    last = engine.gradient_formats.changes[-1]
    assert (last.update, last.site, last.format) == (5, "wide.grad_output", "e5m2") and 0.3 < last.flushed < 0.7
    run(engine, 1, 3)
    assert get(engine)["wide"] == "e4m3", "and again"


def test_the_share_is_that_of_the_values_themselves():
    """In E4M3 it was counted, in E5M2 it is found from exponents."""
    engine = make()
    run(engine, 2, 2)
    run(engine, 40, 3)
    counted = engine.gradient_formats.changes[-1].flushed
    assert counted == pytest.approx(1 - 18 / 40, abs=0.05), "rows of less than 2**-18 of the largest"
    run(engine, 18, 3)
    last = engine.gradient_formats.changes[-1]
    assert (last.update, last.format) == (8, "e4m3") and 0 < last.flushed <= MOST_FLUSHED


def test_a_skipped_update_chooses_nothing():
    engine = make()
    run(engine, 2)
    engine.inner.factors = torch.full((64,), math.inf)
    with engine.forward():
        loss = engine.model(torch.randn(64, 64))
    engine.backward(loss)
    assert not engine.step().applied
    assert set(get(engine).values()) == {"e5m2"}
    run(engine, 2, 3)
    assert set(get(engine).values()) == {"e4m3"}, "five updates in all"


@pytest.mark.parametrize(
    "fields",
    ["", ",checkpoint=full", ",activations=bf16", ",activations=recompute", ",first_forward=bf16", ",history=4"],
)
def test_fused_blocks(fields):
    engine = make_gpt(f"fp8[products=all,gradients_format=auto{fields}]")
    assert engine.conversion.blocks
    losses = train_gpt(engine, 6)
    found = engine.gradient_formats.formats
    assert len(found) == 8 and all(
        found[f"blocks.{n}.{name}.grad_output"] == "e4m3" for n in (0, 1) for name in ("out", "down")
    )
    for other in ("e5m2", "e4m3"):
        plain = train_gpt(make_gpt(f"fp8[products=all,gradients_format={other}{fields}]"), 6)
        assert losses == pytest.approx(plain, rel=2e-3) and losses != plain
        assert (losses[:2] == plain[:2]) == (other == "e5m2"), "E5M2 at first"


@pytest.mark.parametrize("text", ["fp8-lean[products=all,gradients_format=auto]", AUTO])
def test_accumulation_and_lean_recipes(text):
    engine = make_gpt(text) if "lean" in text else make_gpt(text, accumulate=2)
    train_gpt(engine, 3)
    assert "e4m3" in engine.gradient_formats.formats.values()


def test_a_resumed_run_has_the_same_formats_and_losses():
    whole = make_gpt(AUTO)
    losses = train_gpt(whole, 9)
    for stop in (1, 2, 4, 7):
        first, second = make_gpt(AUTO), make_gpt(AUTO)
        train_gpt(first, stop)
        second.load_state_dict(first.state_dict())
        assert second.gradient_formats.formats == first.gradient_formats.formats
        assert train_gpt(second, 9 - stop, stop) == losses[stop:], stop
        assert second.gradient_formats.formats == whole.gradient_formats.formats


def test_a_state_of_another_recipe_loads():
    fixed = make_gpt("fp8[products=all,gradients_format=e4m3]")
    train_gpt(fixed, 3)
    auto = make_gpt(AUTO)
    auto.load_state_dict(fixed.state_dict())
    assert set(auto.gradient_formats.formats.values()) == {"e4m3"}
    back = make_gpt("fp8[products=all]")
    back.load_state_dict(auto.state_dict())
    assert {site.dtype for name, site in back.conversion.scales.sites.items() if name.endswith("grad_output")} == {E5M2}
    train_gpt(back, 2)


def test_experts_are_read_too():
    torch.manual_seed(0)
    config = transformers.MixtralConfig(
        hidden_size=128, intermediate_size=128, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
        num_local_experts=4, vocab_size=64, use_cache=False,
    )  # fmt: skip
    model = transformers.MixtralForCausalLM(config)
    engine = Engine(model, torch.optim.AdamW(model.parameters(), lr=1e-3), AUTO)
    assert engine.conversion.experts
    ids = torch.randint(0, 64, (2, 16))
    for _ in range(2):
        with engine.forward():
            loss = model(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
    found = engine.gradient_formats.formats
    stacks = [name for name in found if ".experts." in name]
    assert len(stacks) == 2 and {found[name] for name in stacks} == {"e4m3"}


def test_other_recipes_choose_nothing():
    assert make("fp8[products=all]").gradient_formats is None and make("bf16").gradient_formats is None
    with pytest.raises(UsageError, match="gradients_format=auto measures what delayed scales flush"):
        recipe("fp8[gradients_format=auto,scaling=current]")
    with pytest.raises(UsageError, match="gradients_format=auto is for fp8"):
        recipe("emulated-mxfp8[gradients_format=auto]")
    with pytest.raises(UsageError, match="belongs to fp8"):
        recipe("bf16[gradients_format=auto]")


def test_changes_are_told_in_one_line():
    narrow = FormatChange(8, "a.grad_output", "e4m3", 0.001)
    wide = [
        FormatChange(8, f"{name}.grad_output", "e5m2", share)
        for name, share in zip("bcde", (0.1, 0.4, 0.2, 0.02), strict=True)
    ]
    assert describe_changes([narrow, narrow]) == "2 changed to E4M3"
    assert describe_changes([narrow, *wide]) == (
        "changed to E5M2, as E4M3 flushed too much: c (40.0%), d (20.0%), b (10.0%) and 1 more"
    )
