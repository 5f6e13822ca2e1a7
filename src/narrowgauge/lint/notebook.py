"""The code cells of a Jupyter notebook, without magics.

IPython's own syntax becomes Python with as many lines, so that line numbers stay correct:

    %magic, !command, ?help         pass
    x = !command, x = %magic        x = None
    %%time and similar              the first line becomes pass, and the rest of the cell is code
    %%bash and all others           the whole cell is skipped
    an indented cell                without the indent of its first line
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from narrowgauge import files
from narrowgauge.errors import UsageError

_LINE_MAGIC = re.compile(
    r"^(\s*)(?:[%!?]|(?:ls|cd|pwd|cat|mkdir|rm|cp|mv|less|man|pip|conda)(?:\s+[\w./~*-].*)?$|[\w.%]+\?{1,2}\s*$)"
)
"""Magics, help, and commands of the shell that IPython accepts without a magic."""
_ASSIGNED_MAGIC = re.compile(r"^(\s*[\w.,\s\[\]'\"]+=)\s*[%!]")
_CODE_MAGICS = ("%%time", "%%timeit", "%%capture", "%%prun", "%%memit", "%%wandb")
"""Cell magics whose cell is Python code."""


@dataclass(frozen=True)
class CellLine:
    """The place of a line of code in a notebook."""

    cell: int
    """Number of the cell among all cells, from 1."""
    line: int
    """Line in the cell, from 1."""
    file_line: int
    """Line in the file, from 1."""


@dataclass(frozen=True)
class Cell:
    """A code cell."""

    number: int
    """Number among all cells, from 1; cells of text count too, as in editors."""
    lines: list[str]
    file_lines: list[int]


def read_cells(text: str, path: str) -> list[Cell]:
    """Return the code cells of a notebook; none if its language is not Python.

    Raises:
        UsageError: the text is not a notebook.
    """
    try:
        data = files.parse_json(text.encode())
    except ValueError as error:
        raise UsageError(f"{path} is not a notebook: it is not valid JSON ({error})") from None
    cells = _cells_of(data)
    if cells is None:
        raise UsageError(f"{path} is JSON, but not a notebook: it has no cells; give a .py or .ipynb file")
    if _language(data) not in ("", "python", "python3", "ipython"):
        return []
    finder = _LineFinder(text)
    found: list[Cell] = []
    for number, cell in enumerate(cells, 1):
        parts = _source(cell)
        places = [finder.line_of(part) for part in parts]
        if cell.get("cell_type") == "code" and parts:
            written = [part.rstrip("\r\n") for part in parts]
            found.append(Cell(number, _without_magics(written), places))
    return found


def syntax_error(lines: list[str]) -> Exception | None:
    """Return why code cannot be parsed; None if it can."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ast.parse("\n".join(lines))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return error
    return None


def _cells_of(data: Any) -> list[dict[str, Any]] | None:
    """Return the cells of a notebook of version 4, or of version 3, which had them in worksheets."""
    if not isinstance(data, dict):
        return None
    cells = data.get("cells")
    if cells is None and isinstance(data.get("worksheets"), list):
        sheets = [sheet for sheet in data["worksheets"] if isinstance(sheet, dict)]
        cells = [cell for sheet in sheets for cell in sheet.get("cells", [])]
    if not isinstance(cells, list) or not all(isinstance(cell, dict) for cell in cells):
        return None
    return cells if not cells or any("cell_type" in cell for cell in cells) else None


def _language(data: dict[str, Any]) -> str:
    about = data.get("metadata")
    about = about if isinstance(about, dict) else {}
    for key, name in (("language_info", "name"), ("kernelspec", "language")):
        part = about.get(key)
        if isinstance(part, dict) and isinstance(part.get(name), str):
            return str(part[name]).lower()
    return ""


def _source(cell: dict[str, Any]) -> list[str]:
    """Return the lines of a cell, with their ends."""
    source = cell.get("source", cell.get("input", ""))
    if isinstance(source, list):
        source = "".join(part for part in source if isinstance(part, str))
    return source.splitlines(keepends=True) if isinstance(source, str) else []


class _LineFinder:
    """Finds lines of cells in the file: notebooks usually have each on a line of its own, as a JSON string."""

    def __init__(self, text: str) -> None:
        self._text, self._position, self._line = text, 0, 1

    def line_of(self, part: str) -> int:
        """Return the line in the file of the next line of code; that of the one before if it is not found."""
        for ascii_only in (False, True):
            at = self._text.find(json.dumps(part, ensure_ascii=ascii_only), self._position)
            if at >= 0:
                self._line += self._text.count("\n", self._position, at)
                self._position = at
                break
        return self._line


def _without_magics(lines: list[str]) -> list[str]:
    first = next((line.strip() for line in lines if line.strip()), "")
    if first.startswith("%%"):
        if first.split()[0] not in _CODE_MAGICS:
            return []
        at = next(index for index, line in enumerate(lines) if line.strip())
        lines = [*lines[:at], "pass", *lines[at + 1 :]]
    # Code that is valid as it is may contain a line that looks like a magic, for example in a string.
    if syntax_error(lines) is None:
        return lines
    indent = re.match(r"\s*", next((line for line in lines if line.strip()), ""))
    return list(_replace_magics([line.removeprefix(indent[0] if indent else "") for line in lines]))


def _replace_magics(lines: list[str]) -> Iterator[str]:
    continues = False
    for line in lines:
        if continues:
            continues = line.rstrip().endswith("\\")
            yield ""
            continue
        magic, assigned = _LINE_MAGIC.match(line), _ASSIGNED_MAGIC.match(line)
        if magic is None and assigned is None:
            yield line
            continue
        continues = line.rstrip().endswith("\\")
        if magic is not None:
            yield f"{magic[1]}pass"
        elif assigned is not None:
            yield f"{assigned[1]} None"
