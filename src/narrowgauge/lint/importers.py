"""Which classes of a file other files of the same folder call under autocast, such as a model that train.py imports.

    # train.py
    from model import Net
    net = Net().cuda()
    with torch.autocast("cuda", dtype=torch.float16):
        loss = net(x)                                     -> model.py: Net.forward runs under autocast in FP16

Names are compared as text. A class that is also called outside of autocast is left out.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from narrowgauge.errors import UsageError
from narrowgauge.lint import source
from narrowgauge.lint.interpreter.names import DTYPES
from narrowgauge.lint.interpreter.syntax import dotted, nodes_of
from narrowgauge.lint.interpreter.values import Autocast

_WORD = b"autocast"


class Importers:
    """What the scripts among some files do with classes of the others."""

    def __init__(self, paths: Iterable[Path] = ()) -> None:
        self._called: dict[Path, dict[str, Autocast]] = {}
        self._paths = [path.resolve() for path in paths if path.suffix == ".py"]
        modules: dict[str, list[Path]] = {}
        for path in self._paths:
            modules.setdefault(path.stem if path.stem != "__init__" else path.parent.name, []).append(path)
        for path in self._paths if len(self._paths) > 1 else ():
            tree = _parsed(path)
            if tree is not None:
                self._note(path, tree, modules)

    def called_under(self, path: Path) -> dict[str, Autocast]:
        """Return the classes of a file that are called under autocast elsewhere."""
        return self._called.get(path.resolve(), {}) if self._called else {}

    def _note(self, path: Path, tree: ast.Module, modules: dict[str, list[Path]]) -> None:
        for node in nodes_of(tree):
            if not isinstance(node, ast.ImportFrom) or not node.module:
                continue
            steps = node.module.split(".")
            for origin in modules.get(steps[-1], []):
                if origin == path or not _is_at(origin, steps):
                    continue
                for alias in node.names:
                    under = _autocast_of(tree, alias.asname or alias.name)
                    if under is not None:
                        self._called.setdefault(origin, {})[alias.name] = under


def _parsed(path: Path) -> ast.Module | None:
    """Return the syntax tree of a file that mentions autocast."""
    try:
        if path.stat().st_size > source.LARGEST or _WORD not in path.read_bytes():
            return None
        return source.read(path).parse()
    except (OSError, UsageError):
        return None


def _is_at(path: Path, steps: Sequence[str]) -> bool:
    """Return whether a file can be the module that the parts of a dotted name give."""
    parts = path.with_suffix("").parts
    parts = parts[:-1] if parts[-1] == "__init__" else parts
    return tuple(parts[-len(steps) :]) == tuple(steps)


def _autocast_of(tree: ast.Module, name: str) -> Autocast | None:
    """Return the autocast under which objects of a class are called; None if they are not, or not always."""
    objects = {
        target
        for node in nodes_of(tree)
        if isinstance(node, ast.Assign) and _creates(node.value, name)
        for target in map(dotted, node.targets)
        if target
    }
    found: set[Autocast | None] = set()
    for call, under in _calls(tree.body, None) if objects else ():
        if dotted(call.func) in objects:
            found.add(under)
    return found.pop() if len(found) == 1 else None


def _creates(value: ast.expr, name: str) -> bool:
    return any(isinstance(node, ast.Call) and dotted(node.func) == name for node in ast.walk(value))


def _calls(body: Sequence[ast.AST], under: Autocast | None) -> Iterator[tuple[ast.Call, Autocast | None]]:
    """Yield every call with the autocast around it, except where no gradients are computed."""
    for node in body:
        inner = under
        if isinstance(node, ast.With):
            names = [dotted(item.context_expr.func) for item in node.items if isinstance(item.context_expr, ast.Call)]
            if any(name and name.endswith(("no_grad", "inference_mode")) for name in names):
                continue
            for item in node.items:
                inner = _made_by(item.context_expr) or inner
        elif isinstance(node, ast.FunctionDef) and node.name.startswith(("eval", "val", "test", "predict")):
            continue
        if isinstance(node, ast.Call):
            yield node, under
        yield from _calls(list(ast.iter_child_nodes(node)), inner)


def _made_by(node: ast.expr) -> Autocast | None:
    """Return the autocast that a call creates, if its format and device are written there."""
    if not isinstance(node, ast.Call) or (dotted(node.func) or "").split(".")[-1] != "autocast":
        return None
    given = {one.arg: one.value for one in node.keywords}
    device = "cuda" if "cuda" in ast.unparse(node) else None
    enabled = given.get("enabled")
    text = "" if enabled is None or ast.unparse(enabled) == "True" else ast.unparse(enabled)
    dtype = given.get("dtype")
    if text == "False" or None in given or device is None:
        return None
    if dtype is None:
        return Autocast("fp16", device, text)
    kind = DTYPES.get(dotted(dtype) or "")
    return Autocast(kind, device, text) if kind in ("fp16", "bf16") else None
