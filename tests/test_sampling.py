"""``make test`` runs a sample of the variants of tests that take long; the list names tests that exist."""

import ast
from pathlib import Path

import sampling

ROOT = Path(__file__).parent.parent


def test_the_list_names_tests_that_exist():
    listed = sampling.read_list()
    assert len(listed) > 50
    left_out = sampling.read_left_out()
    assert not {*left_out.values()} & {*left_out} and not listed & {*left_out}
    for name in {*listed, *left_out, *left_out.values()}:
        path, _, function = name.partition("::")
        tree = ast.parse((ROOT / path).read_text())
        assert function in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, name


def test_the_last_is_chosen_and_at_least_a_sixth():
    for count in range(1, 60):
        variants = list(range(count))
        found = sampling.choose(variants)
        assert len(found) == len(set(found)) == max(1, count // 6)
        assert found == sorted(found) and found[-1] == count - 1
        steps = [after - before for before, after in zip([-1, *found], found, strict=False)]
        assert max(steps) - min(steps) <= 1


def test_only_listed_tests_are_sampled(monkeypatch):
    class Item:
        def __init__(self, name):
            self.nodeid = name

    class Config:
        hook = property(lambda self: self)
        dropped: list = []  # noqa: RUF012

        def getoption(self, name):
            return name == "--sample"

        def pytest_deselected(self, items):
            self.dropped[:] = [item.nodeid for item in items]

    monkeypatch.setattr(sampling, "read_list", lambda: {"a"})
    monkeypatch.setattr(sampling, "read_left_out", lambda: {"c": "b"})
    items = [Item(f"{name}[{number}]") for name in "ab" for number in range(4)] + [Item("c")]
    sampling.pytest_collection_modifyitems(Config(), items)
    assert [item.nodeid for item in items] == ["a[3]", "b[0]", "b[1]", "b[2]", "b[3]"]
    assert Config.dropped == ["a[0]", "a[1]", "a[2]", "c"]
