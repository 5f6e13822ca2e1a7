"""``narrowgauge formats [VALUE...]``: number formats, block formats, and how each format stores the given values."""

from __future__ import annotations

import argparse
import math
import re
from typing import TYPE_CHECKING, Any, TextIO

from narrowgauge.cli import Outcome, prose
from narrowgauge.cli.terminal import has_rich, say, show_table

if TYPE_CHECKING:
    from narrowgauge.block_formats import BlockFormat
    from narrowgauge.formats import Format, Stored

ABOUT = "show the range of each number format, and how it stores the values you give"
STYLES = ("bold red", "bold green", "bold cyan")
"""Colors of the sign, exponent and mantissa bits."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments."""
    # By default argparse takes -1.5 for a number, but -1e-5, -inf and -0x1p-3 for options.
    parser._negative_number_matcher = re.compile(r"-(\.?\d|inf|nan)", re.IGNORECASE)
    parser.add_argument("values", nargs="*", metavar="VALUE", help="a number: 1.2e-7, -3, 0x1p-24, inf, nan")


def run(args: argparse.Namespace) -> Outcome:
    """Run the verb."""
    from narrowgauge.block_formats import BLOCK_FORMATS
    from narrowgauge.formats import parse_value, store

    known = _list_formats()
    numbers = [parse_value(text) for text in args.values]
    stored = [{name: store(number, name) for name in known} for number in numbers]
    if not args.json:
        out = prose(args)
        _show_formats(out)
        _show_block_formats(out)
        for text, number, outcomes in zip(args.values, numbers, stored, strict=True):
            _show_value(text, number, outcomes, out)
    return Outcome(
        {
            "formats": {name: _describe(f) for name, f in known.items()},
            "block_formats": {name: _describe_blocks(f) for name, f in BLOCK_FORMATS.items()},
            "values": [
                {
                    "text": text,
                    "value": to_json(number),
                    "stored": {
                        name: _describe_outcome(number, outcome, known[name]) for name, outcome in outcomes.items()
                    },
                }
                for text, number, outcomes in zip(args.values, numbers, stored, strict=True)
            ],
        }
    )


def to_json(number: float) -> float | str:
    """Return the number; as text if it is inf or NaN, which JSON lacks."""
    return number if math.isfinite(number) else str(number)


def explain(number: float, outcome: Stored, f: Format) -> str:
    """Describe how a format stores a number."""
    lowest = f.min_exponent - f.mantissa_bits
    bits_left = ""
    if 0 < abs(outcome.value) < f.smallest_normal:
        multiple = int(abs(outcome.value) / f.smallest_subnormal)
        bits_left = f"{multiple} × 2^{lowest}, {multiple.bit_length()} of {f.mantissa_bits + 1} bits left"
    match outcome.state:
        case "exact":
            return f"exact, as a subnormal: {bits_left}" if bits_left else "exact"
        case "subnormal":
            return f"subnormal: {bits_left}; 2^{lowest - 1} and less becomes 0"
        case "underflow":
            return f"underflow: 2^{lowest - 1} and less becomes 0, which is nearer than 2^{lowest}"
        case "overflow":
            what = f"the largest number is {f.max:g}"
            if not math.isfinite(number):
                what = f"it has no {'NaN' if math.isnan(number) else 'inf'}"
            if not f.has_nan:
                return f"overflow: {what}; it always saturates, here to {outcome.value:g}"
            saturated = f"; narrowgauge's FP8 casts saturate, to {math.copysign(f.max, number):g}"
            return f"overflow: {what}{saturated if f.storage_bits == 8 else ''}"
    return "rounded"


def split_bits(bits: str, f: Format) -> tuple[str, str, str]:
    """Split the bits into sign, exponent and mantissa."""
    return bits[0], bits[1 : 1 + f.exponent_bits], bits[1 + f.exponent_bits :]


def _list_formats() -> dict[str, Format]:
    from narrowgauge.formats import ELEMENT_FORMATS, FORMATS

    return FORMATS | ELEMENT_FORMATS


def _describe(f: Format) -> dict[str, Any]:
    names = ("title", "bits", "storage_bits", "exponent_bits", "mantissa_bits", "bias", "has_inf", "has_nan", "max",
             "smallest_normal", "smallest_subnormal", "epsilon", "decimal_digits", "finite_values",
             "about")  # fmt: skip
    return {name: getattr(f, name) for name in names}


def _describe_blocks(f: BlockFormat) -> dict[str, Any]:
    names = ("title", "block", "scale", "tensor_scale", "bits_per_element", "range_in_block", "about")
    smallest, largest = f.scale_range
    return {name: getattr(f, name) for name in names} | {
        "element": f.element.name,
        "numbers": f.element.finite_values,
        "largest_element": f.element.max,
        "smallest_element": f.element.smallest_subnormal,
        "smallest_scale": smallest,
        "largest_scale": largest,
        "decibels": dict(f.decibels),
    }


def _describe_outcome(number: float, outcome: Stored, f: Format) -> dict[str, Any]:
    from narrowgauge.formats import spacing

    return {
        "value": to_json(outcome.value),
        "bits": outcome.bits,
        "relative_error": to_json(outcome.relative_error),
        "state": outcome.state,
        "spacing": to_json(spacing(outcome.value, f)),
        "detail": explain(number, outcome, f),
    }


def _show_formats(out: TextIO) -> None:
    known = _list_formats()
    columns = ("format", "s|e|m bits", "largest", "smallest normal", "subnormal", "epsilon", "digits", "numbers")
    rows = []
    for f in known.values():
        layout = ("1", str(f.exponent_bits), str(f.mantissa_bits))
        numbers = [
            f"{n:.5g}" if n > 1 else f"{n:.3g}" for n in (f.max, f.smallest_normal, f.smallest_subnormal, f.epsilon)
        ]
        count = f"{f.finite_values:,}" if f.bits <= 16 else f"{f.finite_values:.2g}"
        rows.append((f.title, layout, *numbers, f"{f.decimal_digits:.1f}", count))
    _print_table("Number formats", columns, rows, out)
    say("", out)
    for f in known.values():
        say(f"{f.title:<8}  {f.about}", out)


def _show_block_formats(out: TextIO) -> None:
    from narrowgauge.block_formats import BLOCK_FORMATS

    columns = ("format", "elements", "block", "scale", "tensor", "bits", "numbers", "in a block", "scales", "dB")
    rows = []
    for f in BLOCK_FORMATS.values():
        smallest, largest = (math.log2(scale) for scale in f.scale_range)
        parts = (f.element.title, f.block, f.scale.upper(), "FP32" if f.tensor_scale else "-", f.bits_per_element)
        ranges = (f"1 to {f.range_in_block:.3g}", f"2^{smallest:.3g} to 2^{largest:.3g}")
        decibels = f"{max(f.decibels.values()):.1f}"
        rows.append((f.title, *parts, f.element.finite_values, *ranges, decibels))
    say("", out)
    _print_table("Block formats: elements that share a scale", columns, rows, out)
    say("", out)
    for f in BLOCK_FORMATS.values():
        say(f"{f.title:<10}  {f.about}", out)
    say("\nnumbers: of an element. in a block: its range. dB: of normal values to their rounding noise", out)
    say("Recipes emulate these formats. To test one: narrowgauge validate TASK --candidates nvfp4", out)


def _show_value(text: str, number: float, outcomes: dict[str, Stored], out: TextIO) -> None:
    known = _list_formats()
    rows, remarks = [], []
    for name, outcome in outcomes.items():
        f = known[name]
        error = f"{outcome.relative_error:.2g}"
        rows.append((f.title, split_bits(outcome.bits, f), f"{outcome.value:.6g}", error, outcome.state))
        words = explain(number, outcome, f)
        if words != outcome.state:
            remarks.append(f"{f.title:<8}  {words}")
    say("", out)
    _print_table(f"{text} becomes", ("format", "sign|exponent|mantissa", "value", "error", "state"), rows, out)
    if remarks:
        say("\n" + "\n".join(remarks), out)


def _print_table(title: str, columns: tuple[str, ...], rows: list[tuple[Any, ...]], out: TextIO) -> None:
    """Print a table. A tuple as second cell is bits in three parts, separated by bars and colored by rich."""
    if not has_rich():
        plain = [[row[0], "|".join(row[1]) if isinstance(row[1], tuple) else row[1], *row[2:]] for row in rows]
        show_table(title, columns, plain, stream=out)
        return
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    # Narrow on purpose: FP32's 32 bits and four more columns fit a terminal of 80 characters.
    table = Table(title=title, title_justify="left", title_style="bold", header_style="bold", box=box.SIMPLE_HEAD,
                  show_edge=False, padding=(0, 1, 0, 0))  # fmt: skip
    for index, column in enumerate(columns):
        table.add_column(
            column, justify="left" if index < 2 or column == "state" else "right", no_wrap=" " not in column
        )
    for name, second, *rest in rows:
        parts = zip(second, STYLES, strict=True) if isinstance(second, tuple) else [(second, "")]
        bits = Text("|", no_wrap=True).join(Text(part, style) for part, style in parts)
        table.add_row(Text(name), bits, *(Text(str(cell)) for cell in rest))
    Console(file=out, width=None if out.isatty() else 100).print(table)
