"""Lines and tables on the terminal, with rich if it is installed."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from typing import Any, TextIO

from narrowgauge.errors import printable


def has_rich() -> bool:
    """Return whether rich is installed."""
    return importlib.util.find_spec("rich") is not None


def say(text: str = "", stream: TextIO | None = None) -> None:
    """Print a line, with control characters escaped.

    Args:
        text: The line.
        stream: Where to print. Default: stdout.
    """
    print(printable(text), file=stream or sys.stdout, flush=True)


def show_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], stream: TextIO | None = None) -> None:
    """Print a table. The first column is left-aligned, the others are right-aligned.

    Args:
        title: Printed above the table.
        columns: Headings.
        rows: Cells; None is an empty cell.
        stream: Where to print. Default: stdout.
    """
    out = stream or sys.stdout
    title, columns = printable(title), [printable(column) for column in columns]
    cells = [["" if cell is None else printable(str(cell)) for cell in row] for row in rows]
    if has_rich():
        from rich.console import Console
        from rich.table import Table

        table = Table(title=title, title_justify="left", title_style="bold", header_style="bold", expand=False)
        for index, column in enumerate(columns):
            table.add_column(column, justify="left" if index == 0 else "right", no_wrap=True)
        for row in cells:
            table.add_row(*row)
        Console(file=out, width=None if out.isatty() else 200, soft_wrap=False, markup=False).print(table)
        return
    widths = [
        max(len(column), *(len(row[i]) for row in cells)) if cells else len(column) for i, column in enumerate(columns)
    ]
    print(title, file=out)
    for row in [list(columns), *cells]:
        line = [cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))]
        print("  " + "  ".join(line).rstrip(), file=out)
