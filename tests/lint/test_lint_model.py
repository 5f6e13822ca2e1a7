"""Checks of models: dimensions, formats of parameters, optimizer, keep patterns and shared weights with a recipe."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import narrowgauge as ng
from narrowgauge import recipe as parse
from narrowgauge.findings import NOTE, SERIOUS, WARNING, Finding
from narrowgauge.lint import model as lint
from narrowgauge.lint import padding
from narrowgauge.models.gpt import GPT, GPTConfig


class Language(nn.Module):
    """A small language model whose head shares the embedding's weight."""

    def __init__(self, vocab: int = 50257, width: int = 768, hidden: int = 3072, layers: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.up = nn.ModuleList(nn.Linear(width, hidden) for _ in range(layers))
        self.down = nn.ModuleList(nn.Linear(hidden, width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        self.head.weight = self.embed.weight


def check(model: nn.Module, recipe: str, optimizer: torch.optim.Optimizer | None = None) -> list[Finding]:
    return lint.check(model, optimizer or torch.optim.AdamW(model.parameters()), parse(recipe))


def meta(**sizes: int) -> Language:
    with torch.device("meta"):
        return Language(**sizes)


@pytest.mark.parametrize("recipe", ["fp16", "bf16"])
def test_unaligned_vocabulary_is_reported_with_the_gain_from_padding(recipe: str) -> None:
    (finding,) = check(meta(), recipe)
    assert (finding.rule, finding.where, finding.severity) == ("off-multiple", "head", WARNING)
    assert "50,257 outputs are not a multiple of 8" in finding.detail
    share = 50257 * 768 / (50257 * 768 + 8 * 768 * 3072)
    assert f"{share:.0%} of the weights" in finding.detail
    assert "pad to 50,304, together with the embedding that shares the weight: 0.09% more" in finding.fix
    gain = padding.saved(share, 50257, recipe)
    assert 0.7 < gain < 0.85 and f"a predicted {gain:.0%} less" in finding.fix


def test_required_multiple_depends_on_the_format() -> None:
    model = meta(vocab=1000)  # 8 x 125: good for 16 bits, not for FP8
    assert check(model, "bf16") == [] and check(model, "fp32") == []
    (finding,) = check(model, "fp8")
    assert "not a multiple of 16" in finding.detail and "stays in BF16" in finding.detail


def test_layers_of_one_shape_are_reported_once() -> None:
    findings = check(meta(vocab=1024, hidden=2730), "bf16")
    assert [(finding.where, finding.rule) for finding in findings] == [
        ("up.0", "off-multiple"),
        ("down.0", "off-multiple"),
    ]
    assert "2,730 outputs" in findings[0].detail and "3 more like it" in findings[0].detail


def test_small_dimensions_and_kept_layers_are_not_reported() -> None:
    model = nn.Sequential(nn.Conv2d(3, 64, 3), nn.Flatten(), nn.Linear(64, 10))
    assert check(model, "bf16") == [] and check(model, "fp8") == []
    assert {finding.rule for finding in check(meta(), "bf16[keep=head+embed]")} == set()


def test_predicted_gain_from_padding() -> None:
    assert padding.padded(50257) == 50304 and padding.padded(2730) == 2752 and padding.padded(1000) == 1008
    assert padding.saved(1.0, 50257, "bf16") == pytest.approx(1 - padding.UNALIGNED, abs=0.01)
    assert padding.saved(0.0, 50257, "bf16") == 0
    assert padding.saved(1.0, 50264, "fp8") == pytest.approx(1 - padding.FP8_TIME, abs=0.01)
    assert padding.saved(1.0, 50257, "fp8") == pytest.approx(1 - padding.FP8_TIME * padding.UNALIGNED, abs=0.01)
    assert padding.saved(1.0, 65, "fp8") >= 0


def test_built_in_models_have_no_findings() -> None:
    with torch.device("meta"):
        model = GPT(GPTConfig(layers=2, width=384, heads=6, context=128, vocab=50257))
    for name in ("fp32", "tf32", "fp16", "bf16", "fp8", "bf16-lean", "fp8-lean"):
        assert check(model, name) == []


def test_16_bit_parameters_are_reported() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64)).half()
    findings = check(model, "fp16")
    assert {finding.rule: finding.where for finding in findings} == {
        "half-parameters": "0.weight",
        "half-norms": "1",
        "eps-below-format": "optimizer group 0",
    }
    assert "3 more like it" in findings[0].detail
    wide = torch.optim.AdamW(model.parameters(), eps=1e-4)
    assert "eps-below-format" not in {finding.rule for finding in check(model, "fp16", wide)}
    bf16 = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64)).bfloat16()
    assert {finding.rule for finding in check(bf16, "bf16")} == {"half-parameters"}
    frozen = nn.Sequential(nn.Linear(64, 64).half().requires_grad_(False), nn.Linear(64, 64))
    assert check(frozen, "bf16") == []


def test_fp16_running_statistics_are_reported() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64, affine=False).half())
    assert [(finding.rule, finding.where) for finding in check(model, "fp16")] == [("half-norms", "1")]


@pytest.mark.parametrize(
    ("recipe", "rule", "severity"),
    [
        ("fp16[loss_scale=none]", "fp16-without-scaler", SERIOUS),
        ("fp16[loss_scale=1]", "scale-settings", WARNING),
        ("bf16[master=none]", "states-16bit", WARNING),
        ("bf16[moments=bf16]", "states-16bit", WARNING),
        ("bf16[keep=attention]", "keep-names-nothing", SERIOUS),
    ],
)
def test_recipes_are_checked(recipe: str, rule: str, severity: str) -> None:
    (finding,) = check(meta(vocab=1024), recipe)
    assert (finding.rule, finding.severity) == (rule, severity)
    assert finding.where == f"recipe {parse(recipe)}"


def test_shared_weight_that_is_kept_in_one_module_is_a_note() -> None:
    model = meta(vocab=1024)
    (finding,) = check(model, "bf16[keep=head]")
    assert (finding.rule, finding.where, finding.severity) == ("tied-formats", "head", NOTE)
    assert "embed" in finding.detail
    assert check(model, "bf16[keep=head+embed]") == [] and check(model, "bf16[keep=norm]") == []


def test_lean_recipes_need_an_optimizer_with_small_states() -> None:
    model = nn.Linear(64, 64)
    rprop = torch.optim.Rprop(model.parameters(), lr=0.1)
    assert [finding.rule for finding in check(model, "bf16-lean", rprop)] == ["lean-optimizer"]
    assert check(model, "bf16", rprop) == []
    for fits in (torch.optim.Adam(model.parameters()), torch.optim.SGD(model.parameters(), lr=0.1)):
        assert check(model, "bf16-lean", fits) == []
    decayed = torch.optim.Adam(model.parameters(), weight_decay=0.1)
    assert [finding.rule for finding in check(model, "bf16[moments=8bit]", decayed)] == ["lean-optimizer"]


def test_optimizer_is_optional() -> None:
    assert lint.check(meta(vocab=1024), None, parse("bf16")) == []


def test_muon_steps_no_embedding() -> None:
    model = nn.ModuleDict({"words": nn.Embedding(128, 64), "blocks": nn.ModuleList([nn.Linear(64, 64)])})
    everything = ng.optim.Muon(model.parameters(), lr=0.02, adamw_lr=1e-3)
    (found,) = check(model, "bf16", everything)
    assert found.rule == "muon-embedding" and found.where == "words"
    assert check(model, "bf16", ng.optim.Muon(ng.optim.split_for_muon(model), lr=0.02, adamw_lr=1e-3)) == []
    inner = torch.optim.Muon([model["blocks"][0].weight], lr=0.02)
    assert check(model, "bf16", inner) == []
