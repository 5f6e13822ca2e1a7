"""Rules about mixtures of experts: routers, counts, loops over experts."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from lint_experts import EXPERTS_RIGHT, EXPERTS_WRONG
from lint_wrong import HEAD
from torch import nn

import narrowgauge as ng
from narrowgauge.findings import NOTE, SERIOUS, WARNING, Finding
from narrowgauge.lint import model as model_lint
from narrowgauge.lint import script
from narrowgauge.nn.experts.routers import find_routers

RULES = ("low-precision-router", "counts-16bit", "expert-loop")


def expected(text: str) -> set[tuple[int, str]]:
    matches = [(number, re.search(r"# lint: ([\w-]+)$", line)) for number, line in enumerate(text.splitlines(), 1)]
    return {(number, match[1]) for number, match in matches if match}


def found(text: str) -> set[tuple[int, str]]:
    return {(finding.span.line, finding.rule) for finding in script.check_text(text) if finding.span}


@pytest.mark.parametrize("name", EXPERTS_WRONG)
def test_pitfalls_are_found_at_their_lines(name: str) -> None:
    text = HEAD + EXPERTS_WRONG[name]
    assert found(text) == expected(text) != set()


@pytest.mark.parametrize("name", EXPERTS_WRONG)
def test_comments_suppress_each_finding(name: str) -> None:
    text = HEAD + re.sub(r"# lint: ([\w-]+)$", r"# narrowgauge: ignore[\1]", EXPERTS_WRONG[name], flags=re.MULTILINE)
    assert found(text) == set()


@pytest.mark.parametrize("name", EXPERTS_RIGHT)
def test_similar_but_correct_code_has_no_findings(name: str) -> None:
    assert found(HEAD + EXPERTS_RIGHT[name]) == set()


def severities(text: str) -> list[str]:
    return [finding.severity for finding in script.check_text(HEAD + text)]


def test_severity_depends_on_what_is_known() -> None:
    assert severities(EXPERTS_WRONG["a router under autocast"]) == [NOTE, WARNING, WARNING]
    assert severities(EXPERTS_WRONG["positions"]) == [SERIOUS, SERIOUS, NOTE]
    assert set(severities(EXPERTS_WRONG["sums of masks"])) == {WARNING}
    assert set(severities(EXPERTS_WRONG["loops that wait"])) == {NOTE}


MODELS = ("mixtral", "olmoe", "qwen3_moe", "deepseek_v3", "gpt_oss", "switch_transformers")


@pytest.mark.parametrize("name", MODELS)
def test_models_of_transformers_have_no_findings(name: str) -> None:
    folder = Path(pytest.importorskip("transformers").__file__).parent / "models" / name
    rules = [finding.rule for finding in script.check(folder / f"modeling_{name}.py")]
    # Switch Transformers has a dictionary of experts and waits at each; the others have stacked parameters.
    assert [rule for rule in rules if rule in RULES] == ["expert-loop"] * (name == "switch_transformers")


class Mixture(nn.Module):
    """A router beside a list of experts, or beside stacked ones."""

    def __init__(self, experts: int, *, stacked: bool = False) -> None:
        super().__init__()
        self.router = nn.Linear(64, experts)
        if stacked:
            self.experts = nn.Module()
            self.experts.up = nn.Parameter(torch.zeros(experts, 128, 64))
            self.experts.down = nn.Parameter(torch.zeros(experts, 64, 64))
        else:
            self.experts = nn.ModuleList(nn.Linear(64, 64) for _ in range(experts))


def check(model: nn.Module, recipe: str) -> list[Finding]:
    return model_lint.check(model, torch.optim.AdamW(model.parameters()), ng.recipe(recipe))


def test_routers_that_the_engine_keeps_in_fp32_are_not_reported() -> None:
    for recipe in ("fp8", "bf16", "fp16"):
        for stacked in (True, False):
            model = nn.Sequential(Mixture(16, stacked=stacked), Mixture(16))
            assert check(model, recipe) == [] and list(find_routers(model)) == ["0.router", "1.router"]


def test_other_lists_and_layers_are_not_routers() -> None:
    blocks = nn.ModuleDict({"layers": nn.ModuleList(nn.Linear(64, 64) for _ in range(16)), "head": nn.Linear(64, 16)})
    shared = nn.ModuleDict(
        {"experts": nn.ModuleList(nn.Linear(64, 64) for _ in range(16)), "shared_expert": nn.Linear(64, 16)}
    )
    assert check(blocks, "fp8") == check(shared, "fp8") == []
