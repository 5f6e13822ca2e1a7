"""Sizes of memory as people write them."""

import numpy as np
import pytest

from narrowgauge.byte_sizes import format_size, parse_budget, parse_size
from narrowgauge.errors import UsageError

TOTAL = 100 * 10**9


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("80GB", 80 * 10**9), ("75 GiB", 75 * 2**30), ("1.5tb", 1500 * 10**9), (" 512MiB ", 512 * 2**20), ("7B", 7),
        ("0.9", 90 * 10**9), (".5", 50 * 10**9), ("1", TOTAL), (0.25, 25 * 10**9), (123456, 123456),
        (80e9, 80 * 10**9), (0.85 * 1e9, 850_000_000), (np.int64(80 * 10**9), 80 * 10**9),
        (np.float64(1234567.5), 1234567),
    ],
)  # fmt: skip
def test_a_budget_is_a_size_a_share_or_bytes(given, expected):
    assert parse_budget(given, TOTAL) == expected


@pytest.mark.parametrize(
    "given",
    [
        "80",
        "",
        "GB",
        "0GB",
        "-1GB",
        "1.2",
        "0",
        "nan",
        "inf",
        "80 G",
        "eighty",
        True,
        "1e3GB",
        1.5,
        90.0,
        float("inf"),
        float("nan"),
        -80e9,
    ],
)
def test_anything_else_is_refused_in_one_line(given):
    with pytest.raises(UsageError, match="is not a size; give one such as 80GB") as caught:
        parse_budget(given, TOTAL, "--fit")
    assert "\n" not in str(caught.value) and str(caught.value).startswith("--fit")


def test_a_share_needs_a_device_that_reports_its_memory():
    with pytest.raises(UsageError, match="does not report its memory; give a size"):
        parse_budget("0.9", None)


def test_sizes_are_written_in_units_of_1000():
    assert format_size(59.7e9) == "59.7 GB" and format_size(1.5e12) == "1.5 TB"
    assert format_size(2_340_000) == "2.3 MB" and format_size(12) == "12 bytes"
    assert parse_size(format_size(42e9)) == 42 * 10**9
