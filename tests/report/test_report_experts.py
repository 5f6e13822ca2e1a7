"""Tokens per expert in the page data: cells relative to equal shares, merged columns, damaged records."""

import base64
import itertools

import numpy as np
import pytest
from example_run import configure

from narrowgauge.report import inputs, pages
from narrowgauge.report.expert_history import COLUMNS, ExpertHistory, encode
from narrowgauge.runs import record


def cells(described, layer=0):
    found = described["experts"]
    experts = found["layers"][layer]["experts"]
    table = np.frombuffer(base64.b64decode(found["layers"][layer]["cells"]), dtype=np.uint8)
    return table.reshape(experts, len(found["steps"]))


def multiple(code):
    """As section_experts.js computes it."""
    return 0 if code == 0 else 2 ** (((code - 1) / 253 - 0.5) * 8)


def test_cells_are_multiples_of_an_equal_share():
    codes = encode(np.array([0, 100, 200, 50, 150, 100]))
    assert [multiple(int(code)) for code in codes] == pytest.approx([0, 1, 2, 0.5, 1.5, 1], rel=0.02)
    assert list(encode(np.array([0, 0]))) == [255, 255]
    assert list(encode(np.array([10**6] + [1] * 99))) == [254] + [1] * 99  # at most 16 times, at least a 16th
    assert encode(np.array([7, 7, 7]))[0] in (127, 128)


def test_a_layer_is_described():
    history = ExpertHistory()
    assert history.describe() == {}
    assert history.add(1, [["a", 2, [10, 10, 10, 10], 0.5, []], ["b", 2, [20, 20], None, []]]) == 0
    assert history.add(101, [["a", 2, [30, 5, 5, 0], 0.5, [3]]]) == 0
    found = history.describe()
    assert found["experts"]["steps"] == [[1, 1], [101, 101]]
    first, second = found["experts"]["layers"]
    assert (first["module"], first["experts"], first["chosen"]) == ("a", 4, 2)
    assert (first["most"], first["most_share"], first["none"]) == (0, 0.75, 1)
    assert first["effective"] == pytest.approx(2.09, abs=0.01)
    assert second["module"] == "b"
    assert cells(found, 1)[:, 1].tolist() == [255, 255]  # not sampled
    assert cells(found)[3, 1] == 0


def test_columns_are_summed_and_bounded():
    history = ExpertHistory()
    for step in range(5 * COLUMNS):
        history.add(step, [["a", 1, [2, 2, 4, 0 if step % 2 else 8], None, []]])
    found = history.describe()
    steps = found["experts"]["steps"]
    assert len(steps) <= COLUMNS
    assert steps[0][0] == 0
    assert steps[-1][1] == 5 * COLUMNS - 1
    assert all(earlier[1] + 1 == later[0] for earlier, later in itertools.pairwise(steps))
    ratios = [[multiple(int(code)) for code in row] for row in cells(found)]
    assert ratios[3] == pytest.approx([4 * 4 / 12] * len(steps), rel=0.05)


def test_many_experts_have_fewer_columns():
    history = ExpertHistory()
    for step in range(COLUMNS):
        history.add(step, [[f"layer.{layer}", 8, [1] * 256, None, []] for layer in range(58)])
    found = history.describe()["experts"]
    assert sum(len(layer["cells"]) for layer in found["layers"]) < 600_000
    assert 1 < len(found["steps"]) < COLUMNS


@pytest.mark.parametrize(
    "event",
    [None, 3, "x", [], ["a"], ["a", 2, [1, -1], None, []], ["a", 2, [1, "x"], None, []], ["a", 2, [1], None, []]],
)
def test_damaged_readings_are_counted(event):
    history = ExpertHistory()
    history.add(1, [["a", 2, [1, 1], None, []]])
    assert history.add(2, [event]) == 1
    assert len(history.describe()["experts"]["steps"]) == 1


def test_the_page_has_a_section(tmp_path):
    configure(tmp_path / "run", 10)
    with record.Record(tmp_path / "run") as book:
        book.append("look", 1, applied=True, readings=[], experts=[["layers.0.</script>", 2, [9, 9, 0], 1.0, []]])
    page = pages.render(pages.collect(inputs.open_inputs([tmp_path / "run"])))
    assert "Tokens per expert" in page
    assert "layers.0.</script>" not in page
    data = pages.collect(inputs.open_inputs([tmp_path / "run"]))
    assert data["runs"][0]["experts"]["layers"][0]["none"] == 1
    assert data["runs"][0]["damaged"] == 0
