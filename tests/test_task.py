"""Task files: a user's function is found and gets its options; mistakes give one-line errors."""

import pytest

from narrowgauge import Task, UsageError
from narrowgauge.task import load

GOOD = """
import narrowgauge as ng
import torch
import helper_beside

def mine(batch=4, data="here"):
    return ng.Task(name=f"{batch}-{data}", model=None, batch=None, loss=None, steps=helper_beside.STEPS)

def anything(**options):
    return ng.Task(name=",".join(sorted(options)), model=None, batch=None, loss=None)

def wrong():
    return 3

class Net(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
"""


@pytest.fixture
def file(tmp_path):
    (tmp_path / "helper_beside.py").write_text("STEPS = 7\n")
    path = tmp_path / "tasks_of_mine.py"
    path.write_text(GOOD)
    return path


def test_given_options_reach_the_function(file):
    task = load(f"{file}:mine", {"batch": 8, "data": None})
    assert isinstance(task, Task)
    assert (task.name, task.steps) == ("8-here", 7)
    assert load(f"{file}:anything", {"batch": 8, "context": 2, "data": None}).name == "batch,context"


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("tasks_of_mine.py:missing", {}, "has no function 'missing'; it has anything, mine, wrong"),
        ("tasks_of_mine.py:wrong", {}, "returned a int, not a narrowgauge.Task"),
        ("tasks_of_mine.py:mine", {"context": 3}, "takes no --context; it takes batch, data"),
        ("tasks_of_mine.py:Net", {}, "Net is a model's class; bench, memory and roofline take it as --model"),
        ("nowhere.py:mine", {}, "there is no file"),
        ("broken.py:mine", {}, "does not import: SyntaxError"),
        ("text.txt:mine", {}, "is not a Python file"),
    ],
)
def test_mistakes_give_one_line_errors(file, name, options, message):
    (file.parent / "broken.py").write_text("def mine(:\n")
    (file.parent / "text.txt").write_text("hello")
    with pytest.raises(UsageError, match="task") as caught:
        load(str(file.parent / name), options)
    assert message in str(caught.value)
