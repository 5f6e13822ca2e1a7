"""Hooks of pytest: ``--sample`` runs only some variants of the tests in sampled_tests.txt, the last one included.

Of n variants, which ``parametrize`` makes, n / 6 are run, and at least one. They are the same each time. Long tests
whose subject a shorter one checks too (left_out_tests.txt) are not run.
"""

from pathlib import Path

HERE = Path(__file__).parent
SHARE = 6


def pytest_addoption(parser):
    parser.addoption("--sample", action="store_true", help="run a sample of the variants of tests that take long")


def read_lines(name):
    return [line for line in (HERE / name).read_text().splitlines() if not line.startswith("#")]


def read_list():
    return set(read_lines("sampled_tests.txt"))


def read_left_out():
    """Return the tests that are not run, each with a shorter one."""
    return dict(line.split() for line in read_lines("left_out_tests.txt"))


def choose(variants):
    """Return some of the variants, evenly spaced up to the last."""
    count = max(1, len(variants) // SHARE)
    return [variants[round((index + 1) * len(variants) / count) - 1] for index in range(count)]


def pytest_collection_modifyitems(config, items):
    if not config.getoption("--sample"):
        return
    sampled, left_out, groups = read_list(), read_left_out(), {}
    for item in items:
        name = item.nodeid.partition("[")[0]
        if name in sampled:
            groups.setdefault(name, []).append(item)
    dropped = {id(item) for group in groups.values() for item in set(group) - set(choose(group))}
    dropped |= {id(item) for item in items if item.nodeid.partition("[")[0] in left_out}
    config.hook.pytest_deselected(items=[item for item in items if id(item) in dropped])
    items[:] = [item for item in items if id(item) not in dropped]
