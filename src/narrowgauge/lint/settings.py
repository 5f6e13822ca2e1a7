"""Which findings are shown and which fail: from the command line, or from ``[tool.narrowgauge.lint]``.

[tool.narrowgauge.lint]
select = ["clip-before-unscale", "engine-*"]   # default: all rules
ignore = ["deprecated-amp"]
exclude = ["third_party", "notebooks/old_*.ipynb"]
fail-on = "serious"
baseline = "lint-baseline.json"
"""

from __future__ import annotations

import difflib
import fnmatch
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from narrowgauge import files
from narrowgauge.errors import UsageError
from narrowgauge.findings import NOTE, ORDER, SERIOUS, Finding
from narrowgauge.lint.rules import RULES

LEVELS = tuple(ORDER)
_LISTS = ("select", "ignore", "exclude")
_KEYS = (*_LISTS, "fail-on", "baseline")
_TABLE = "[tool.narrowgauge.lint]"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What to check and what counts as a failure."""

    select: tuple[str, ...] = ()
    """Names of rules, or patterns such as ``engine-*``; empty for all."""
    ignore: tuple[str, ...] = ()
    """Names or patterns of rules that are not reported."""
    exclude: tuple[str, ...] = ()
    """Patterns of files and folders that are not read."""
    fail_on: str | None = None
    """The mildest severity that fails. None: serious findings and likely bugs fail, advice and notes do not."""
    baseline: str | None = None
    """A file of findings that are known and not reported."""

    def __post_init__(self) -> None:
        for name in (*self.select, *self.ignore):
            _refuse_unknown(name)
        if self.fail_on is not None and self.fail_on not in LEVELS:
            raise UsageError(f"fail-on: {self.fail_on!r} is unknown; use {', '.join(LEVELS)}")

    def shows(self, finding: Finding) -> bool:
        """Return whether a finding is reported. A file that cannot be read always is."""
        if finding.rule == "syntax":
            return not _matches(finding.rule, self.ignore)
        return (not self.select or _matches(finding.rule, self.select)) and not _matches(finding.rule, self.ignore)

    def fails(self, finding: Finding) -> bool:
        """Return whether a finding makes the command fail."""
        if self.fail_on is not None:
            return ORDER[finding.severity] <= ORDER[self.fail_on]
        if finding.severity == SERIOUS:
            return True
        return finding.severity != NOTE and not (finding.rule in RULES and RULES[finding.rule].advice)

    def override(self, options: Mapping[str, Any]) -> Settings:
        """Return the settings with those of the command line, which replace those of the file."""
        return replace(self, **{name: value for name, value in options.items() if value is not None})


def read_settings(folder: Path) -> Settings:
    """Return the settings in the nearest ``pyproject.toml`` that has them, in a folder or above it.

    Raises:
        UsageError: The file cannot be parsed, or a setting is unknown or has the wrong type.
    """
    for parent in (folder, *folder.parents):
        path = parent / "pyproject.toml"
        if not files.is_file(path):
            continue
        try:
            data = tomllib.loads(files.read(path).decode())
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise UsageError(f"{path} is not valid TOML: {error}") from None
        table: Any = data
        for name in ("tool", "narrowgauge", "lint"):
            table = table.get(name) if isinstance(table, dict) else None
        if isinstance(table, dict):
            return _from_table(table, path)
    return Settings()


def split_names(given: Sequence[str] | None) -> tuple[str, ...] | None:
    """Return the names in an option that may be repeated and may contain commas; None if it was not given."""
    if given is None:
        return None
    return tuple(name.strip() for text in given for name in text.split(",") if name.strip())


def _from_table(table: dict[str, Any], path: Path) -> Settings:
    fields: dict[str, Any] = {}
    for key, value in table.items():
        if key not in _KEYS:
            raise UsageError(f"{path}: {key!r} in {_TABLE} is unknown; use {', '.join(_KEYS)}")
        is_list = isinstance(value, list) and all(isinstance(one, str) for one in value)
        if key in _LISTS and not is_list:
            raise UsageError(f"{path}: {key} in {_TABLE} is {value!r}; expected a list of strings")
        if key not in _LISTS and not isinstance(value, str):
            raise UsageError(f"{path}: {key} in {_TABLE} is {value!r}; expected a string")
        fields[key.replace("-", "_")] = tuple(value) if key in _LISTS else value
    if "baseline" in fields:
        fields["baseline"] = str(path.parent / fields["baseline"])
    try:
        return Settings(**fields)
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from None


def _matches(rule: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(rule, pattern) for pattern in patterns)


def _refuse_unknown(name: str) -> None:
    if not any(fnmatch.fnmatchcase(rule, name) for rule in RULES):
        near = difflib.get_close_matches(name, RULES, 1)
        hint = f"did you mean {near[0]}?" if near else "narrowgauge lint --rules lists all rules"
        raise UsageError(f"there is no rule {name!r}; {hint}")
