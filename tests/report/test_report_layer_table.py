"""The layer table joins time, SQNR and underflow by module."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import example_results
import example_run
import pytest

from narrowgauge.report import layer_table
from narrowgauge.report.inputs import open_inputs


def test_times_of_a_layer_are_summed(tmp_path: Path) -> None:
    def work(phase: str, ms: float) -> dict[str, Any]:
        return {
            "path": "up",
            "kind": "product",
            "phase": phase,
            "flops": 8e9,
            "bytes": 1e6,
            "ms": ms,
            "bound": "compute",
        }

    layers_of = {name: {"step_ms": 9.0, "layers": [work("forward", ms), work("backward", 2 * ms)]}
                 for name, ms in (("bf16", 2.0), ("fp8", 1.25))}  # fmt: skip
    [path] = example_results.save(tmp_path, phases={"gpu": "h200", "layers": [], "recipes": layers_of})
    sources = open_inputs([path])
    assert [(one["recipe"], one["phase"]) for one in sources.of("roofline")[0]["layers"]][:2] == [
        ("bf16", "forward"), ("bf16", "backward")]  # fmt: skip
    [row] = layer_table.build_tables(sources)[0]["rows"]
    assert (row["ms bf16"], row["ms fp8"], row["saved fp8"], row["bound"]) == (6, 3.75, 2.25, "compute")


def test_layers_of_different_tasks_are_not_joined(tmp_path: Path) -> None:
    run = example_run.write_run(tmp_path / "run", 30, tensors=16, every=10)
    other = example_results.roofline() | {"task": "llama-7b"}
    same = example_results.roofline()
    same["layers"] = [{"path": "blocks.*.qkv", "ms": {"bf16": 4.0, "fp8": 3.0}}, {"path": "odd.*", "ms": {"bf16": 1.0}}]
    apart = layer_table.build_tables(open_inputs([run, *example_results.save(tmp_path, other=other)]))
    assert [table["task"] for table in apart] == ["llama-7b", "gpt:12x768"]
    assert all("ms bf16" not in row for row in apart[1]["rows"])
    [table] = layer_table.build_tables(open_inputs([run, *example_results.save(tmp_path, same=same)]))
    rows = {row["module"]: row for row in table["rows"]}
    assert [rows[f"blocks.{i}.qkv"]["saved fp8"] for i in (0, 1, 2)] == [0.333333] * 3, (
        "equal layers divide the time equally"
    )
    assert rows["odd.*"]["ms bf16"] == 1 and "blocks.*.qkv" not in rows


def test_work_that_moved_to_another_layer_is_not_a_saving(tmp_path: Path) -> None:
    """A trace may attribute FP8 products to the model: its layers then take no time, but nothing is saved."""
    work = {"kind": "product", "phase": "forward"}
    layers = [
        {"path": "blocks.0.up", "recipe": "bf16", "ms": 2.0, "flops": 4e11, **work},
        {"path": "blocks.0.up", "recipe": "fp8", "ms": 0.1, "flops": 1e6, "kind": "cast", "phase": "forward"},
        {"path": "", "recipe": "fp8", "ms": 1.1, "flops": 4e11, **work},
        {"path": "blocks.0.down", "recipe": "bf16", "ms": 2.0, "flops": 4e11, **work},
        {"path": "blocks.0.down", "recipe": "fp8", "ms": 1.1, "flops": 4e11, **work},
    ]
    [table] = layer_table.build_tables(
        open_inputs(example_results.save(tmp_path, moved=example_results.roofline() | {"layers": layers}))
    )
    rows = {row["module"]: row for row in table["rows"]}
    assert "saved fp8" not in rows["blocks.0.up"] and rows["blocks.0.down"]["saved fp8"] == pytest.approx(0.9)


def test_layers_are_joined_and_summarized(tmp_path: Path) -> None:
    run = example_run.write_run(tmp_path / "run", 100, tensors=8, every=10)
    sources = open_inputs([run, *example_results.save_all(tmp_path)])
    [table] = layer_table.build_tables(sources)
    rows = {row["module"]: row for row in table["rows"]}
    joined = rows["blocks.0.qkv"]
    assert joined["class"] == "Linear" and joined["own fp8"] == 26.4 and joined["end_to_end fp8"] == pytest.approx(21.4)
    assert joined["saved fp8"] == pytest.approx(4e11 / 5e11 - 4e11 / 9e11, rel=1e-5)
    assert 0 <= joined["fp8 forward"] < 1 and joined["bound"] == "compute"
    assert joined["summary"].startswith("FP8 saves 0.356 ms, SQNR 26.4 dB, underflow 0.0")
    assert "no error" in rows["blocks.0.up"]["summary"]
    assert rows[example_run.EVIL]["summary"] == ""
    keys = [column["key"] for column in table["columns"]]
    assert "ms fp8" in keys and "saved bf16" not in keys and "saved_ms" not in keys
    assert layer_table.build_tables(open_inputs(example_results.save(tmp_path, lint=example_results.lint()))) == []
