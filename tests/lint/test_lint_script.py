"""Checks of scripts: every planted pitfall is reported at its line, and correct scripts have no findings."""

from __future__ import annotations

import asyncio
import email
import json
import re
import sys
from pathlib import Path

import pytest
import torch
from lint_engine_and_other_loops import ENGINE_AND_OTHER_LOOPS
from lint_engine_right import ENGINE_RIGHT
from lint_engine_wrong import ENGINE_HEAD, ENGINE_WRONG
from lint_right import RIGHT
from lint_wrong import HEAD, WRONG

from narrowgauge.errors import UsageError
from narrowgauge.findings import NOTE, SERIOUS, WARNING
from narrowgauge.lint import script
from narrowgauge.lint.rules import RULES
from pace import at_most

HERE = Path(__file__).parent
PLANTED = sorted((HERE / "scripts" / "planted").glob("*.py"))
CLEAN = sorted((HERE / "scripts" / "clean").glob("*.py"))
EXAMPLES = sorted((HERE.parent.parent / "examples").glob("*.py"))
FOLDERS = [Path(module.__file__).parent for module in (json, email, asyncio, torch.optim)]


def expected(text: str) -> set[tuple[int, str]]:
    """Return the lines and rules of comments ``# lint: rule, rule``."""
    lines = enumerate(text.splitlines(), 1)
    matches = ((number, re.search(r"# lint: ([\w\s,-]+)$", line)) for number, line in lines)
    return {(number, rule.strip()) for number, match in matches if match for rule in match[1].split(",")}


def found(text: str, formats: tuple[str, ...] = ()) -> set[tuple[int, str]]:
    return {(finding.span.line, finding.rule) for finding in script.check_text(text, formats=formats) if finding.span}


@pytest.mark.parametrize("path", PLANTED, ids=lambda path: path.stem)
def test_planted_pitfalls_are_found_at_their_lines_and_nothing_else(path: Path) -> None:
    findings = script.check(path)
    assert {(finding.span.line, finding.rule) for finding in findings if finding.span} == expected(path.read_text())
    for finding in findings:
        assert finding.where == f"{path}:{finding.span.line}"
        assert finding.detail and finding.why and finding.fix and finding.severity in (SERIOUS, WARNING, NOTE)


def test_every_rule_has_a_planted_script() -> None:
    rules = {rule for path in PLANTED for _, rule in expected(path.read_text())}
    assert len(PLANTED) >= 20 and len(rules) >= 25 and rules <= set(RULES)
    assert len(CLEAN) >= 5 and EXAMPLES
    model_tests = (HERE / "test_lint_model.py").read_text()
    untested = [name for name in RULES if name not in rules and f'"{name}"' not in model_tests]
    assert untested == ["syntax", "unknown-rule"], "a rule without a planted script or a test of a model"


def test_rules_in_the_documentation_exist() -> None:
    page = (HERE.parent.parent / "docs" / "lint.md").read_text()
    cells = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    assert {name for cell in cells for name in re.findall(r"`([\w-]+)`", cell)} <= set(RULES)


@pytest.mark.parametrize("path", [*CLEAN, *EXAMPLES], ids=lambda path: path.stem)
@pytest.mark.parametrize("formats", [(), ("bf16",)])
def test_correct_scripts_have_no_findings(path: Path, formats: tuple[str, ...]) -> None:
    assert script.check(path, formats) == []


@pytest.mark.parametrize("name", WRONG)
def test_variants_of_pitfalls_are_found(name: str) -> None:
    text = HEAD + WRONG[name]
    assert found(text) == expected(text)


@pytest.mark.parametrize("name", RIGHT)
def test_similar_but_correct_code_has_no_findings(name: str) -> None:
    assert found(HEAD + RIGHT[name]) == set()


@pytest.mark.parametrize("name", ENGINE_WRONG)
def test_engine_misuse_is_found(name: str) -> None:
    text = ENGINE_HEAD + ENGINE_WRONG[name]
    assert found(text) == expected(text)


@pytest.mark.parametrize("name", [*ENGINE_RIGHT, *ENGINE_AND_OTHER_LOOPS])
def test_correct_engine_use_has_no_findings(name: str) -> None:
    assert found(ENGINE_HEAD + {**ENGINE_RIGHT, **ENGINE_AND_OTHER_LOOPS}[name]) == set()


def test_severity_of_engine_findings_depends_on_the_recipe() -> None:
    def severity(rule: str, recipe: str, line: str, accumulate: int = 1) -> str | None:
        text = (
            f"{ENGINE_HEAD}model = nn.Linear(8, 8)\noptimizer = torch.optim.AdamW(model.parameters())\n"
            f"engine = ng.Engine(model, optimizer, {recipe!r}, accumulate={accumulate})\n"
            "for x in loader:\n    with engine.forward():\n        loss = model(x).sum()\n    engine.backward(loss)\n"
            f"    engine.step()\n    {line}\n"
        )
        return {finding.rule: finding.severity for finding in script.check_text(text)}.get(rule)

    look = "with torch.no_grad(): model(x)"
    assert severity("engine-evaluation", "fp32", look) is None
    assert severity("engine-evaluation", "bf16", look) == NOTE
    assert severity("engine-evaluation", "fp8", look) == WARNING
    assert severity("engine-evaluation", "auto", look) == WARNING
    for lean in ("bf16-lean", "fp8-lean[moments=bf16]", "bf16[master=split]"):
        assert severity("engine-evaluation", lean, look) == (WARNING if "fp8" in lean else NOTE)
        assert severity("engine-outside", lean, "model(x)") == WARNING
        assert severity("engine-lean-save", lean, "torch.save(model.state_dict(), 'last.pt')") == WARNING
    assert severity("engine-lean-save", "bf16-lean[master=fp32]", "torch.save(model.state_dict(), 'last.pt')") is None
    assert severity("engine-outside", "bf16", "model(x)") == WARNING
    clip = "nn.utils.clip_grad_norm_(model.parameters(), 1.0)"
    assert severity("engine-clip", "bf16", clip) == WARNING
    assert severity("engine-clip", "fp16", clip) == SERIOUS
    assert severity("engine-zero-grad", "bf16", "optimizer.zero_grad()") == NOTE
    assert severity("engine-zero-grad", "bf16", "optimizer.zero_grad()", accumulate=4) == SERIOUS


BROKEN_ENGINE_USE = {
    "engine-backward": (r"(\w+\.)*(\w*engine)\.backward\((\w+)\)", r"\3.backward()"),
    "engine-outside": (r"with (\w+\.)*\w*engine\.forward\(\):", r"if True:"),
    "engine-no-backward": (r"(\w+\.)*\w*engine\.backward\(\w+\)", r"pass"),
    "engine-autocast": (r"with ((\w+\.)*\w*engine)", r"with torch.autocast('cuda'), \1"),
}


@pytest.mark.parametrize("rule", BROKEN_ENGINE_USE)
@pytest.mark.parametrize("name", ["clean/narrowgauge_style", "clean/narrowgauge_gan", "plain_loop"])
def test_a_mistake_added_to_a_correct_engine_script_is_found(name: str, rule: str) -> None:
    path = next(path for path in (*CLEAN, *EXAMPLES) if str(path).endswith(f"{name}.py"))
    pattern, wrong = BROKEN_ENGINE_USE[rule]
    broken = re.sub(pattern, wrong, path.read_text())
    assert broken != path.read_text()
    assert rule in {found_rule for _, found_rule in found(broken)}


PAGES = [*sorted((HERE.parent.parent / "docs").glob("*.md")), HERE.parent.parent / "README.md"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_code_in_the_documentation_uses_engines_correctly(page: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    for text in (*blocks, "\n".join(blocks)):
        rules = {rule for _, rule in found(f"import torch\nimport narrowgauge as ng\n{text}")}
        assert not {rule for rule in rules if rule.startswith("engine-")}


BROKEN = {
    "clip-before-unscale": (r"^( *)\S*scaler\.unscale_\(.*\)$", r"\1pass"),
    "unscale-twice": (r"^( *)(\S*scaler\.unscale_\(.*\))$", r"\1\2\n\1\2"),
    "scaler-without-update": (r"^( *)\S*scaler\.update\(\)$", r"\1pass"),
    "scaler-without-scale": (r"(self\.)?scaler\.scale\((.*)\)\.backward", r"(\2).backward"),
    "step-past-scaler": (r"(self\.)?scaler\.step\((.*)\)", r"\2.step()"),
    "zero-grad-order": (r"^( *)(\S*scaler\.step\((.*)\))$", r"\1\3.zero_grad()\n\1\2"),
}


@pytest.mark.parametrize("rule", BROKEN)
@pytest.mark.parametrize("name", ["nanogpt_style", "hf_style", "torchvision_style", "gan_style", "trainer_class"])
def test_a_mistake_added_to_a_correct_script_is_found(name: str, rule: str) -> None:
    text = next(path for path in CLEAN if path.stem == name).read_text()
    pattern, wrong = BROKEN[rule]
    broken = re.sub(pattern, wrong, text, flags=re.MULTILINE)
    assert broken != text
    assert rule in {found_rule for _, found_rule in found(broken)}


def test_given_formats_are_taken_into_account() -> None:
    text = HEAD + "class Mask(nn.Module):\n    def forward(self, s, m):\n        return s.masked_fill(m, -1e9)\n"
    assert found(text) == set()
    assert found(text, ("bf16",)) == set()
    assert found(text, ("fp16",)) == {(6, "nan-mask")}
    wide = HEAD + "layer = nn.Linear(1032, 4096)\n"
    assert found(wide, ("bf16",)) == set()
    assert found(wide, ("fp8",)) == {(4, "off-multiple")}


def test_fix_for_a_dimension_has_the_cost_of_padding() -> None:
    (finding,) = script.check_text(HEAD + "head = nn.Linear(768, 50257)\n", formats=["bf16"])
    assert "50,257" in finding.detail and finding.fix == "pad it to 50,304 (0.09% more)"
    (small,) = script.check_text(HEAD + "layer = nn.Linear(500, 512)\n", formats=["bf16"])
    assert small.severity == NOTE


def test_ignore_comment_applies_to_the_named_rule_only() -> None:
    text = HEAD + "from torch.cuda.amp import GradScaler\nscaler = GradScaler(True)  # narrowgauge: ignore[custom-op]\n"
    assert found(text) == {(5, "deprecated-amp"), (5, "autocast-argument")}
    assert found(text.replace("custom-op", "deprecated-amp")) == {(5, "autocast-argument")}


def test_columns_count_characters(tmp_path: Path) -> None:
    text = HEAD + "label = 'Größe'; scaler = torch.cuda.amp.GradScaler()\n"
    (finding,) = script.check_text(text)
    span = finding.span
    assert span is not None and span.end_column is not None
    assert text.splitlines()[3][span.column - 1 : span.end_column - 1] == "torch.cuda.amp.GradScaler()"


def test_scripts_are_not_run(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    path = tmp_path / "train.py"
    path.write_text(f"import torch\nopen({str(trace)!r}, 'w').close()\nraise SystemExit(3)\n")
    assert script.check(path) == []
    assert not trace.exists()


def test_invalid_python_is_a_usage_error(tmp_path: Path) -> None:
    path = tmp_path / "broken.py"
    path.write_text("import torch\ndef f(:\n")
    with pytest.raises(UsageError, match=r"broken\.py:2 is not valid Python"):
        script.check(path)
    path.write_bytes(b"\x80\x81 = 1\n")
    with pytest.raises(UsageError, match=r"cannot (read|be read)"):
        script.check(path)
    path.write_bytes(b"x = 1\x00\n")
    with pytest.raises(UsageError, match="is not valid Python"):
        script.check(path)
    with pytest.raises(UsageError, match=r"cannot (read|be read)"):
        script.check(tmp_path / "absent.py")


def test_a_folder_with_a_broken_file_is_checked_completely(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("def f(:\n")
    (tmp_path / "b.py").write_text("import torch\nscaler = torch.cuda.amp.GradScaler()\n")
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / "c.py").write_text("import torch\nscaler = torch.cuda.amp.GradScaler()\n")
    findings = script.check_folder(tmp_path)
    assert [(Path(f.span.path).name, f.rule) for f in findings if f.span] == [
        ("a.py", "syntax"),
        ("b.py", "deprecated-amp"),
    ]


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="this Python accepts the syntax of 3.12")
@pytest.mark.parametrize("line", ["type Row = int", "class Box[T]: pass", "def f[T](x: T): pass", "f'{d['a']}'"])
def test_syntax_of_a_newer_python_is_a_note(tmp_path: Path, line: str) -> None:
    (tmp_path / "new.py").write_text(f"import torch\n{line}\n")
    (tmp_path / "wrong.py").write_text("import torch\ntype(x) = int\n")
    severities = {Path(f.span.path).name: f.severity for f in script.check_folder(tmp_path) if f.span}
    assert severities == {"new.py": "note", "wrong.py": "warning"}


def test_encodings_and_line_endings(tmp_path: Path) -> None:
    path = tmp_path / "latin.py"
    path.write_bytes("# -*- coding: latin-1 -*-\nimport torch\nname = 'Größe'\n".encode("latin-1"))
    assert script.check(path) == []
    path.write_bytes(b"\xef\xbb\xbfimport torch\r\nscaler = torch.cuda.amp.GradScaler()")
    assert [finding.rule for finding in script.check(path)] == ["deprecated-amp"]
    assert script.check_text("") == []


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_library_code_does_not_crash_the_linter(folder: Path) -> None:
    for path in sorted(folder.glob("*.py"))[::2]:
        script.check_text("import torch\n" + path.read_text(encoding="utf-8"), str(path))


@pytest.mark.parametrize(
    "text",
    [
        "x = " + "(" * 60 + "1" + ")" * 60,
        "x = " + "+".join(["1"] * 700),
        "def f():\n    return f()\nf()",
        "def f(g):\n    return g(f)\nf(f)",
        "class A(A): pass",
        "class A:\n    def __init__(self):\n        A()\nA()",
        "for i in range(3):\n    pass\nelse:\n    break_ = 1\nwhile True:\n    continue",
        "match x:\n    case [a, *b] if a: pass\n    case {'k': v, **rest}: pass\n    case _: pass",
        "async def f():\n    async with a as b:\n        async for x in y: yield x\n    await z",
        "try:\n    pass\nexcept* ValueError:\n    raise\nfinally:\n    x = 1",
        "a, (b, *c), d.e, f[0] = *x, 1\nx: int\nx: int = 3\nx += 1\ndel x\nglobal y",
        "(lambda x: x)(1)\n[x for y in z for x in y if x]\n{k: v for k, v in z}\nf'{x!r:>{w}}'\nif (n := 3): pass",
        "scaler.scale(*a, **b).backward(*c)\nscaler.step()\nscaler.unscale_()\nscaler.update()\nmodel.half().to()",
        "torch.autocast(*a, **b)\ntorch.amp.GradScaler(*a, **b)\ntorch.optim.Adam(*a, **b)\ntorch.einsum('...', a, b)",
        "\n".join(f"if a{i}:\n    x{i} = torch.amp.GradScaler('cuda')" for i in range(40)),
        "def f():\n" + "".join("    " * d + f"for x{d} in y:\n" for d in range(1, 12)) + "    " * 12 + "pass",
    ],
)
def test_unusual_syntax_does_not_crash_the_linter(text: str) -> None:
    script.check_text("import torch\n" + text + "\n")


def test_findings_after_a_long_expression() -> None:
    text = f"{HEAD}total = {' + '.join(['1'] * 700)}\nscaler = torch.cuda.amp.GradScaler()\n"
    assert found(text) == {(5, "deprecated-amp")}


def test_many_branches_take_linear_time() -> None:
    branches = "".join(
        f"    if a{i}:\n        scaler.scale(loss).backward()\n        m{i} = nn.Linear(8, 8)\n    else:\n"
        f"        loss.backward()\n        optimizer.step()\n"
        for i in range(60)
    )
    with at_most(5):
        script.check_text(f"{HEAD}def f(scaler, optimizer, loss):\n{branches}")
