"""The examples run. Each compares its losses with the plain engine loop and fails if a bit differs."""

import re
import runpy
import sys

import pytest
import torch
from hosting import EXAMPLES

NEEDS = {
    "torch_amp_loop": "torch",
    "accelerate_loop": "accelerate",
    "hf_trainer": "transformers",
    "lightning_fabric_loop": "lightning",
    "lightning_trainer": "lightning",
    "sft_trainer --lora": "trl",
}


@pytest.mark.parametrize("name", list(NEEDS))
@pytest.mark.filterwarnings("default")  # as a user runs them
def test_example_losses_match_the_engine(name, monkeypatch, capsys):
    pytest.importorskip(NEEDS[name])
    monkeypatch.setattr(sys, "argv", name.split())
    runpy.run_path(str(EXAMPLES / f"{name.split()[0]}.py"), run_name="__main__")
    shown = capsys.readouterr().out
    assert "bit for bit" in shown
    if name == "torch_amp_loop":
        assert "the weights are ruined" in shown
        assert "LossScaler: stopped, weights as before" in shown


@pytest.mark.filterwarnings("default")
def test_the_code_of_the_documentation_runs(tmp_path, monkeypatch):
    for library in ("accelerate", "lightning", "transformers"):
        pytest.importorskip(library)
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    page = (EXAMPLES.parent / "docs" / "integrations.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(blocks) == 6
    space = {"__name__": "page"}
    for block in blocks:
        exec(compile(block, "docs/integrations.md", "exec"), space)
    assert {path.name for path in tmp_path.iterdir()} >= {"fabric.ckpt", "trainer.ckpt", "state", "run"}
