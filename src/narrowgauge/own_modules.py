"""The modules that a user's file imports from its own folder: which files they are, and how they are imported.

The folder of a task's file is searched first while the file runs, as for a script. After that it stays on the path as
the last entry: functions of the file may import a neighbor when they are called, and the neighbor hides no installed
package. Two files in two folders may each have a neighbor of the same name, such as two versions of ``model.py``. So
modules of the other folder are forgotten before a file runs. A file of a package imports the package by its name, so
the folder that holds the package is searched as well.
"""

from __future__ import annotations

import ast
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from narrowgauge import files

_FOLDERS: set[Path] = set()
"""Folders of the files that were run in this process."""


@contextmanager
def import_neighbors(folder: Path) -> Iterator[None]:
    """Within the context, imports find the modules of a folder first, and those beside its package; after it, last.

    Args:
        folder: The folder of the file that runs in the context, as an absolute path.
    """
    folders = list(dict.fromkeys([folder, _find_root(folder)]))
    for one in folders:
        _forget_neighbors_of_others(one)
    _FOLDERS.update(folders)
    added = [str(one) for one in folders]
    sys.path[:0] = added
    try:
        yield
    finally:
        for entry in added:
            sys.path.remove(entry)
            if entry not in sys.path:
                sys.path.append(entry)


def _find_root(folder: Path) -> Path:
    """Return the folder itself, or the one that holds the package that it is a part of."""
    root = folder
    while files.is_file(root / "__init__.py") and root.parent != root:
        root = root.parent
    return root


def list_own_files(file: Path) -> list[Path]:
    """List the files that a file imports from its own folder or other folders on the path, and those they import.

    Installed packages, the standard library and modules that are imported by a computed name are not listed.

    Args:
        file: The user's file, as an absolute path.

    Returns:
        The files in order of their paths, without the first one.
    """
    roots = [
        file.parent,
        _find_root(file.parent),
        *(root for root in map(_resolve_entry, sys.path) if not _is_installed(root)),
    ]
    found: set[Path] = set()
    waiting = [file]
    while waiting:
        for one in _find_imports(waiting.pop(), roots):
            if one not in found and one != file:
                found.add(one)
                waiting.append(one)
    return sorted(found)


def _forget_neighbors_of_others(folder: Path) -> None:
    """Remove modules that came from another file's folder, if this folder has modules of these names."""
    if not _FOLDERS - {folder}:
        return
    tops = {name.partition(".")[0] for name in list(sys.modules)}  # thousands of modules are of a few hundred packages
    own = {top for top in tops if any((folder / one).is_file() for one in (f"{top}.py", f"{top}/__init__.py"))}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] not in own or (origin := getattr(module, "__file__", None)) is None:
            continue
        home = _find_home(Path(origin), name)
        if home in _FOLDERS and home != folder:
            del sys.modules[name]


def _find_home(origin: Path, name: str) -> Path:
    """The folder in which the first part of a module's name was found."""
    depth = name.count(".") + (origin.name == "__init__.py")
    return files.resolve_path(origin).parents[depth]


def _find_imports(file: Path, roots: list[Path]) -> Iterator[Path]:
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError):  # running it reports what is wrong
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield from _find_module(alias.name.split("."), roots)
        elif isinstance(node, ast.ImportFrom):
            base = node.module.split(".") if node.module else []
            where = roots if not node.level else [file.parents[min(node.level, len(file.parents)) - 1]]
            for alias in node.names:  # each may be a module, or something in the module before it
                yield from _find_module([*base, alias.name], where)


def _find_module(parts: list[str], roots: list[Path]) -> Iterator[Path]:
    """The files that run if a module is imported: those of its packages, and its own."""
    if not parts or parts[0] == "narrowgauge":  # known by its version
        return
    for root in roots:
        found = []
        for count in range(1, len(parts) + 1):
            path = root.joinpath(*parts[:count])
            found += [one for one in (path / "__init__.py", path.with_name(f"{path.name}.py")) if files.is_file(one)]
        if found:
            yield from (files.resolve_path(one) for one in found)
            return


def _resolve_entry(entry: str) -> Path:
    return files.resolve_path(Path(entry or "."))


def _is_installed(folder: Path) -> bool:
    """Whether a folder on the path holds the standard library or installed packages."""
    known = {files.resolve_path(Path(path)) for path in sysconfig.get_paths().values()}
    return folder in known or any(part in ("site-packages", "dist-packages", "lib-dynload") for part in folder.parts)
