"""Hooks of pytest: ``--sample`` runs only some variants of the tests in sampled_tests.txt, first and last included.

Of n variants, which ``parametrize`` makes, n / 6 are run, and at least two. They are the same each time.
"""

from pathlib import Path

LIST = Path(__file__).with_name("sampled_tests.txt")
SHARE, FEWEST = 6, 2


def pytest_addoption(parser):
    parser.addoption("--sample", action="store_true", help="run a sample of the variants of tests that take long")


def read_list():
    return {line for line in LIST.read_text().splitlines() if not line.startswith("#")}


def choose(variants):
    """Return some of the variants, evenly spaced."""
    count = max(FEWEST, len(variants) // SHARE)
    if len(variants) <= count:
        return variants
    return [variants[round(index * (len(variants) - 1) / (count - 1))] for index in range(count)]


def pytest_collection_modifyitems(config, items):
    if not config.getoption("--sample"):
        return
    sampled, groups = read_list(), {}
    for item in items:
        name = item.nodeid.partition("[")[0]
        if name in sampled:
            groups.setdefault(name, []).append(item)
    dropped = {id(item) for group in groups.values() for item in set(group) - set(choose(group))}
    config.hook.pytest_deselected(items=[item for item in items if id(item) in dropped])
    items[:] = [item for item in items if id(item) not in dropped]
