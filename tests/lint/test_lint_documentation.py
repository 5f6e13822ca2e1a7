"""The examples in docs/lint-examples.md: wrong ones give exactly the rule they are for, right ones no finding."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import nn

import narrowgauge as ng
from narrowgauge.lint import model as model_lint
from narrowgauge.lint import script
from narrowgauge.lint.rules import RULES

PAGE = (Path(__file__).parent.parent.parent / "docs" / "lint-examples.md").read_text()
SETUP, *BLOCKS = re.findall(r"```py\n(.*?)```", PAGE, re.DOTALL)
PAIRS = {
    match[1]: (match[2], match[3])
    for block in BLOCKS
    if (match := re.fullmatch(r"# ([\w-]+): wrong\n(.*)# right\n(.*)", block, re.DOTALL))
}
LOOP, *PARTS = re.split(
    r"# ([\w-]+): after the loop\n", next(block for block in BLOCKS if block.startswith("# loop\n"))
)
LINES = dict(zip(PARTS[::2], PARTS[1::2], strict=True))
IN_TASKS = ("half-parameters", "keep-names-nothing", "lean-optimizer")


def rules_in(text: str) -> set[str]:
    return {finding.rule for finding in script.check_text(SETUP + text)}


def rules_in_task(text: str) -> set[str]:
    values: dict[str, object] = {}
    exec(SETUP + text, values)
    model, optimizer = values["model"], values["optimizer"]
    assert isinstance(model, nn.Module) and isinstance(optimizer, torch.optim.Optimizer)
    return {finding.rule for finding in model_lint.check(model, optimizer, ng.recipe(str(values["recipe"])))}


def test_every_rule_has_an_example() -> None:
    assert {*PAIRS, *LINES} == set(RULES) - {"syntax", "unknown-rule"}
    assert rules_in("") == rules_in(LOOP) == set()


@pytest.mark.filterwarnings("ignore:torch.cuda.amp.GradScaler is enabled")
@pytest.mark.parametrize("rule", PAIRS)
def test_wrong_examples_give_exactly_their_rule_and_right_ones_nothing(rule: str) -> None:
    wrong, right = PAIRS[rule]
    rules = rules_in_task if rule in IN_TASKS else rules_in
    assert rules(wrong) == {rule}
    assert rules(right) == set()


@pytest.mark.parametrize("rule", LINES)
def test_lines_after_a_correct_loop_give_exactly_their_rule(rule: str) -> None:
    assert rules_in(LOOP + LINES[rule]) == {rule}
