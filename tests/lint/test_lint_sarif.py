"""SARIF output: the fields that version 2.1.0 requires, and locations that a code host can show."""

from __future__ import annotations

import json
from pathlib import Path
from urllib.parse import unquote

from narrowgauge.findings import NOTE, Finding
from narrowgauge.lint import sarif, script
from narrowgauge.lint.rules import RULES

PLANTED = Path(__file__).parent / "scripts" / "planted"


def module_finding() -> Finding:
    return Finding(rule="off-multiple", severity=NOTE, where="blocks.0.up", detail="d", why="w", fix="f")


def test_required_fields_are_present() -> None:
    findings = [*script.check_folder(PLANTED), module_finding()]
    log = json.loads(json.dumps(sarif.report(findings, PLANTED)))
    assert log["version"] == "2.1.0" and log["$schema"].endswith("sarif-2.1.0.json")
    (run,) = log["runs"]
    driver = run["tool"]["driver"]
    assert driver["name"] == "narrowgauge"
    assert [rule["id"] for rule in driver["rules"]] == list(RULES)
    assert all(rule["helpUri"].startswith("https://") for rule in driver["rules"])
    assert all(rule["shortDescription"]["text"] and rule["help"]["text"] for rule in driver["rules"])
    assert len(run["results"]) == len(findings)
    for result, finding in zip(run["results"], findings, strict=True):
        assert driver["rules"][result["ruleIndex"]]["id"] == result["ruleId"] == finding.rule
        assert result["level"] in ("error", "warning", "note")
        assert result["message"]["text"] and len(result["locations"]) == 1
        assert all(isinstance(value, str) for value in result["partialFingerprints"].values())


def test_a_line_is_a_physical_and_a_module_a_logical_location() -> None:
    path = PLANTED / "clip_before_unscale.py"
    findings = script.check(path)
    run = sarif.report([*findings, module_finding()], PLANTED.parent)["runs"][0]
    place = run["results"][0]["locations"][0]["physicalLocation"]
    assert place["artifactLocation"] == {"uri": "planted/clip_before_unscale.py", "uriBaseId": "%SRCROOT%"}
    region = place["region"]
    line = path.read_text().splitlines()[region["startLine"] - 1]
    assert region["endLine"] == region["startLine"]
    assert line[region["startColumn"] - 1 : region["endColumn"] - 1].startswith("torch.nn.utils.clip_grad_norm_(")
    logical = run["results"][1]["locations"][0]["logicalLocations"]
    assert logical == [{"fullyQualifiedName": "blocks.0.up", "name": "up", "kind": "module"}]
    assert run["originalUriBaseIds"]["%SRCROOT%"]["uri"].endswith("/")


def test_paths_are_quoted_and_absolute_outside_the_root(tmp_path: Path) -> None:
    path = tmp_path / "my script.py"
    path.write_text("import torch\nscaler = torch.cuda.amp.GradScaler()\n")
    findings = script.check(path)
    inside = sarif.report(findings, tmp_path)["runs"][0]["results"][0]["locations"][0]["physicalLocation"]
    assert inside["artifactLocation"]["uri"] == "my%20script.py"
    outside = sarif.report(findings, tmp_path / "elsewhere")["runs"][0]["results"][0]["locations"][0]
    uri = outside["physicalLocation"]["artifactLocation"]["uri"]
    assert uri.startswith("file:///") and unquote(uri).endswith("/my script.py")


def test_fingerprint_does_not_depend_on_the_line_number(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    prints = []
    for text in (
        "import torch\nscaler = torch.cuda.amp.GradScaler()\n",
        "import torch\n\n\nscaler = torch.cuda.amp.GradScaler()\n",
    ):
        path.write_text(text)
        (result,) = sarif.report(script.check(path), tmp_path)["runs"][0]["results"]
        prints.append(result["partialFingerprints"])
    assert prints[0] == prints[1]
