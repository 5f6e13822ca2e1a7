"""Notebooks: cells are checked together in order, and findings have cell and line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from narrowgauge.errors import UsageError
from narrowgauge.findings import Finding
from narrowgauge.lint import sarif, script

STEP = """scaler.scale(loss).backward()
torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
scaler.step(optimizer)
scaler.update()"""


def notebook(*cells: str, **metadata: Any) -> str:
    """Return a notebook with a cell of text before each code cell."""
    parts: list[dict[str, Any]] = []
    for cell in cells:
        parts.append({"cell_type": "markdown", "source": ["# import torch\n", "loss.backward("]})
        parts.append({"cell_type": "code", "outputs": [], "source": cell.splitlines(keepends=True)})
    return json.dumps({"cells": parts, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}, indent=1)


def check(tmp_path: Path, text: str, name: str = "train.ipynb") -> list[Finding]:
    path = tmp_path / name
    path.write_text(text)
    return script.check(path)


def places(findings: list[Finding]) -> list[tuple[str, int | None, int]]:
    return [(finding.rule, finding.span.cell, finding.span.line) for finding in findings if finding.span]


SETUP = "import torch\nmodel = torch.nn.Linear(8, 8)\noptimizer = torch.optim.SGD(model.parameters(), lr=0.1)"
SCALER = "scaler = torch.amp.GradScaler('cuda')\nloss = model(torch.ones(8)).sum()"


def test_names_of_earlier_cells_are_known(tmp_path: Path) -> None:
    text = notebook(SETUP, SCALER, STEP)
    (finding,) = check(tmp_path, text)
    assert places([finding]) == [("clip-before-unscale", 6, 2)]
    assert finding.where == f"{tmp_path}/train.ipynb:cell 6:2"
    assert finding.describe()["cell"] == 6
    assert finding.span is not None and finding.span.file_line is not None
    assert "clip_grad_norm_" in text.splitlines()[finding.span.file_line - 1]
    assert (
        check(tmp_path, notebook(SETUP, SCALER, STEP.replace("torch.nn", "scaler.unscale_(optimizer)\ntorch.nn"))) == []
    )


def test_magics_are_skipped_and_lines_stay_correct(tmp_path: Path) -> None:
    magics = "%matplotlib inline\n!pip install \\\n   torch\nfiles = !ls\nlines = %sql select\nmodel?\n?model\n"
    loop = "for x in files:\n    %time print(x)\n    !echo {x}\n"
    text = notebook("%%bash\nfor x in; do", f"%%time\n{SETUP}", magics + loop + SCALER, "%%html\n<b>", STEP)
    assert places(check(tmp_path, text)) == [("clip-before-unscale", 10, 2)]


def test_indented_cells_and_commands_without_a_magic(tmp_path: Path) -> None:
    indented = "\n".join(f"    {line}" for line in STEP.splitlines())
    assert places(check(tmp_path, notebook("ls -l text.txt", f"cd /tmp\n{SETUP}", SCALER, indented))) == [
        ("clip-before-unscale", 8, 2)
    ]


def test_text_that_looks_like_a_magic_is_kept(tmp_path: Path) -> None:
    text = notebook(SETUP, f'note = """\n%matplotlib\n!ls"""\nrest = (7\n%4)\n{SCALER}\n{STEP}')
    assert places(check(tmp_path, text)) == [("clip-before-unscale", 4, 9)]


def test_a_cell_with_a_syntax_error_does_not_hide_the_others(tmp_path: Path) -> None:
    findings = check(tmp_path, notebook(SETUP, SCALER, "x = 1\ndef f(:", STEP))
    assert places(findings) == [("syntax", 6, 2), ("clip-before-unscale", 8, 2)]
    assert "cell 6 is not valid Python" in findings[0].detail


def test_cells_of_commands_in_a_notebook_without_torch(tmp_path: Path) -> None:
    assert check(tmp_path, notebook("gh repo clone team/project", "git checkout main", "import json")) == []
    assert [finding.rule for finding in check(tmp_path, notebook("gh repo clone team/project", SETUP))] == ["syntax"]
    assert [finding.rule for finding in check(tmp_path, notebook("import torch\nmodel = (", "x = 1"))] == ["syntax"]


def test_suppression_in_a_cell(tmp_path: Path) -> None:
    quiet = STEP.replace("1.0)", "1.0)  # narrowgauge: ignore[clip-before-unscale]")
    assert check(tmp_path, notebook(SETUP, SCALER, quiet)) == []


def test_other_languages_and_old_versions(tmp_path: Path) -> None:
    assert check(tmp_path, notebook("library(torch)", language_info={"name": "R"})) == []
    assert places(check(tmp_path, notebook(SETUP, SCALER, STEP, kernelspec={"language": "python"})))
    old = {"worksheets": [{"cells": [{"cell_type": "code", "input": [f"{SETUP}\n{SCALER}\n{STEP}"]}]}], "nbformat": 3}
    assert places(check(tmp_path, json.dumps(old))) == [("clip-before-unscale", 1, 7)]
    one_string = {"cells": [{"cell_type": "code", "source": f"{SETUP}\n{SCALER}\n{STEP}"}]}
    assert places(check(tmp_path, json.dumps(one_string), "train.json")) == [("clip-before-unscale", 1, 7)]
    assert check(tmp_path, '{"cells": []}') == []


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("config.json", '{"lr": 0.1}', "is JSON, but not a notebook"),
        ("list.json", "[1, 2]", "is JSON, but not a notebook"),
        ("cells.json", '{"cells": [1]}', "is JSON, but not a notebook"),
        ("broken.ipynb", '{"cells": [', "it is not valid JSON"),
        ("empty.ipynb", "", "it is not valid JSON"),
    ],
)
def test_what_is_no_notebook_is_refused_in_one_line(tmp_path: Path, name: str, text: str, reason: str) -> None:
    with pytest.raises(UsageError, match=reason) as error:
        check(tmp_path, text, name)
    assert "\n" not in str(error.value) and name in str(error.value)


def test_notebooks_in_folders(tmp_path: Path) -> None:
    (tmp_path / "deep" / ".ipynb_checkpoints").mkdir(parents=True)
    for folder in ("deep", "deep/.ipynb_checkpoints"):
        (tmp_path / folder / "a.ipynb").write_text(notebook(SETUP, SCALER, STEP))
    (tmp_path / "b.ipynb").write_text("{")
    (tmp_path / "config.json").write_text("{}")
    assert places(script.check_folder(tmp_path)) == [("syntax", None, 1), ("clip-before-unscale", 6, 2)]


def test_sarif_points_to_the_line_in_the_file(tmp_path: Path) -> None:
    text = notebook(SETUP, SCALER, STEP)
    (result,) = sarif.report(check(tmp_path, text), tmp_path)["runs"][0]["results"]
    region = result["locations"][0]["physicalLocation"]["region"]
    assert "clip_grad_norm_" in text.splitlines()[region["startLine"] - 1] and list(region) == ["startLine"]
    assert result["message"]["text"].startswith("Cell 6, line 2: ")
