"""Comments that suppress findings: on any line of a statement, and with names of rules that exist."""

from __future__ import annotations

from narrowgauge.lint import script

CALL = """import torch
scaler = torch.cuda.amp.GradScaler({}
    init_scale=1.0,{}
){}
"""
MARK = "  # narrowgauge: ignore[deprecated-amp, scale-settings]"


def rules(text: str) -> list[tuple[int, str]]:
    return [(finding.span.line, finding.rule) for finding in script.check_text(text) if finding.span]


def test_comment_on_any_line_of_a_statement() -> None:
    assert rules(CALL.format("", "", "")) == [(2, "deprecated-amp"), (2, "scale-settings")]
    for place in range(3):
        marks = ["", "", ""]
        marks[place] = MARK
        assert rules(CALL.format(*marks)) == []
    assert rules(CALL.format("", MARK.replace("deprecated-amp, ", ""), "")) == [(2, "deprecated-amp")]
    assert rules(CALL.format("", "", "\nx = 1" + MARK)) == [(2, "deprecated-amp"), (2, "scale-settings")]


def test_comment_on_the_head_of_a_block_does_not_cover_its_body() -> None:
    text = (
        "import torch\nwith torch.cuda.amp.autocast(\n    enabled=True\n):  # narrowgauge: ignore\n"
        "    scaler = torch.cuda.amp.GradScaler()\n"
    )
    assert rules(text) == [(5, "deprecated-amp")]
    body = text.replace("  # narrowgauge: ignore", "").replace("Scaler()", "Scaler()  # narrowgauge: ignore")
    assert rules(body) == [(2, "deprecated-amp")]


def test_unknown_rule_names_are_reported() -> None:
    text = "import torch\nx = 1  # narrowgauge: ignore[clip-befor-unscale, custom-op]\n"
    (finding,) = script.check_text(text)
    assert finding.rule == "unknown-rule" and "'clip-befor-unscale'" in finding.detail
    assert finding.span is not None and finding.span.line == 2
    assert rules('text = "# narrowgauge: ignore[nothing]"\n') == []
    assert rules("x = 1  # narrowgauge: ignore[nothing]\n") == [(1, "unknown-rule")]
