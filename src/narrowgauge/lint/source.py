"""The text of a script or notebook, and the ranges in it that findings point to."""

from __future__ import annotations

import ast
import functools
import io
import re
import sys
import tokenize
import warnings
from dataclasses import dataclass
from pathlib import Path

from narrowgauge import files
from narrowgauge.errors import UsageError
from narrowgauge.findings import NOTE, Finding, Span
from narrowgauge.lint import notebook
from narrowgauge.lint.rules.syntax import SYNTAX

LARGEST = 16 << 20
"""Maximum size of a script in bytes; larger ones are generated. Notebooks may be larger, because of their outputs."""
SUFFIXES = (".py", ".ipynb")
"""Endings of the files in a folder that are checked."""
_OF_3_12 = re.compile(r"\s*(type\s+\w+\s*[=\[]|class\s+\w+\s*\[|(async\s+)?def\s+\w+\s*\[)")


@dataclass(frozen=True)
class Source:
    """A script, or the code of all cells of a notebook."""

    path: str
    text: str
    cells: tuple[notebook.CellLine, ...] = ()
    """For a notebook: the cell of each line."""
    broken: tuple[Finding, ...] = ()
    """Cells that could not be parsed."""
    unparsed: str = ""
    """The text of these cells."""

    def parse(self) -> ast.Module:
        """Return the syntax tree.

        Raises:
            UsageError: it is not valid Python.
        """
        return parse(self.text, self.path)

    def span(self, node: ast.AST) -> Span:
        """Return the range of a node, with columns in characters (Python counts bytes)."""
        line = getattr(node, "lineno", 1)
        end = getattr(node, "end_lineno", None) or line
        is_definition = isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        end = line if is_definition else end
        offset = getattr(node, "end_col_offset", 0) or 0
        last = len(self._line(end)) + 1 if is_definition else self._column(end, offset)
        return self.at(line, self._column(line, getattr(node, "col_offset", 0)), end, last)

    def at(self, line: int, column: int = 1, end_line: int | None = None, end_column: int | None = None) -> Span:
        """Return a range; in a notebook, its lines count from the beginning of the cell."""
        code = self._line(line).strip()
        if not self.cells:
            return Span(self.path, line, column, end_line, end_column, code=code)
        place = self.cells[min(line, len(self.cells)) - 1]
        end = place.line + (end_line - line) if end_line is not None else None
        return Span(self.path, place.line, column, end, end_column, place.cell, place.file_line, code)

    @functools.cached_property
    def _lines(self) -> list[str]:
        return self.text.splitlines()

    def _line(self, number: int) -> str:
        return self._lines[number - 1] if number <= len(self._lines) else ""

    def _column(self, line: int, offset: int) -> int:
        return len(self._line(line).encode()[:offset].decode(errors="ignore")) + 1


def read(path: Path) -> Source:
    """Read a script or a notebook.

    Raises:
        UsageError: it cannot be read, or is neither Python nor a notebook.
    """
    is_notebook = path.suffix in (".ipynb", ".json")
    return decode(files.read(path, files.LARGEST if is_notebook else LARGEST), str(path))


def decode(data: bytes, path: str) -> Source:
    """Return the source in a file's content; the ending of its path tells whether it is a notebook.

    Raises:
        UsageError: it cannot be decoded, or a notebook is not valid.
    """
    try:
        text = data.decode(_encoding(data))
    except (UnicodeDecodeError, LookupError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from error
    if Path(path).suffix not in (".ipynb", ".json"):
        return Source(path, text)
    return _join_cells(text, path)


def parse(text: str, path: str) -> ast.Module:
    """Return the syntax tree of Python code.

    Raises:
        UsageError: it is not valid Python.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the script's own, such as an invalid escape
            return ast.parse(text, path)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        line = getattr(error, "lineno", None)
        place = f"{path}:{line}" if line else path
        raise UsageError(f"{place} is not valid Python {_version()}: {_reason(error)}") from error


def _join_cells(text: str, path: str) -> Source:
    """Return the code of a notebook as one script. A cell that is not valid Python is left out and reported."""
    lines: list[str] = []
    places: list[notebook.CellLine] = []
    faults: list[Finding] = []
    unparsed: list[str] = []
    for cell in notebook.read_cells(text, path):
        code = cell.lines
        error = notebook.syntax_error(code)
        if error is not None:
            line = min(getattr(error, "lineno", None) or 1, max(len(code), 1))
            span = Span(path, line, 1, cell=cell.number, file_line=cell.file_lines[line - 1] if code else 1)
            detail = f"cell {cell.number} is not valid Python {_version()}: {_reason(error)}"
            faults.append(fault(span, detail, error))
            unparsed += code
            continue
        lines += code
        places += [
            notebook.CellLine(cell.number, number, line) for number, line in enumerate(cell.file_lines[: len(code)], 1)
        ]
    return Source(path, "\n".join(lines) + "\n" * bool(lines), tuple(places), tuple(faults), "\n".join(unparsed))


def fault(span: Span, detail: str, error: BaseException | None) -> Finding:
    """Return the finding for code that cannot be read or parsed: a note if a newer Python may accept it."""
    if not _needs_newer_python(error):
        return SYNTAX.finding(str(span), detail, span=span)
    fix = f"run narrowgauge with the Python of the project: this one is {_version()}"
    return SYNTAX.finding(str(span), detail, fix, NOTE, span)


def _needs_newer_python(error: BaseException | None) -> bool:
    """Return whether the error is at syntax of Python 3.12: ``type X = ...``, ``class X[T]``, quotes in f-strings."""
    if not isinstance(error, SyntaxError) or tuple(sys.version_info) >= (3, 12):
        return False
    return error.msg.startswith("f-string") or _OF_3_12.match(error.text or "") is not None


def _version() -> str:
    return f"{sys.version_info.major}.{sys.version_info.minor}"


def _reason(error: BaseException) -> str:
    return getattr(error, "msg", None) or str(error) or type(error).__name__


def _encoding(data: bytes) -> str:
    try:
        return tokenize.detect_encoding(io.BytesIO(data).readline)[0]
    except SyntaxError:
        return "utf-8"
