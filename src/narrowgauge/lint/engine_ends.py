"""Rules about narrowgauge's Engine that need the whole script, and what in the script takes a verdict back."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from narrowgauge.findings import SERIOUS
from narrowgauge.lint.flow import Follower
from narrowgauge.lint.notebook import Notebook
from narrowgauge.lint.values import Engine, Site


def conclude(follower: Follower) -> None:
    """Judge what needs the whole script, then take back what it explains."""
    book = follower.notebook
    engines = [event.value for event in book.of("engine") if isinstance(event.value, Engine)]
    if not engines:
        return
    _clear(follower, book, engines)
    _steps_without_backward(book)
    for engine in engines:
        _two_networks(follower, book, engine)


def _clear(follower: Follower, book: Notebook, engines: list[Engine]) -> None:
    loose = any(not opened for _, opened in book.contexts.values())  # an ExitStack, a decorator, a choice of two
    saved = bool(book.of("engine-state"))
    inputs = [scope for scope in _functions(follower.tree) if _reads_input_gradients(scope)]
    for (rule, line, _), verdict in book.verdicts.items():
        if (
            (rule in ("engine-outside", "engine-evaluation") and loose)
            or (rule == "engine-lean-save" and saved)
            # The generator's turn leaves gradients in the discriminator, which somebody has to drop.
            or (rule == "engine-zero-grad" and len(engines) > 1 and verdict.severity != SERIOUS)
            or (rule == "engine-backward" and any(_holds(scope, line) for scope in inputs))
        ):
            verdict.good = True


def _steps_without_backward(book: Notebook) -> None:
    """engine.step() of an engine whose backward() is nowhere called."""
    explained = any(rule == "engine-backward" for rule, _ in book.judged())
    elsewhere = any(event.text == "elsewhere" for event in book.of("backward"))  # it may be this engine's
    backward = {event.optimizer for event in book.of("engine-backward")}
    if explained or elsewhere:
        return
    for event in book.of("engine-step"):
        if event.optimizer not in backward and event.optimizer not in book.escaped:
            detail = "engine.step() is called, and nothing in the script calls engine.backward()"
            book.judge("engine-no-backward", event.node, True, detail)
            place = (getattr(event.node, "lineno", 0), getattr(event.node, "col_offset", 0))
            book.verdicts["engine-no-backward", *place].good = False  # no way to it can be right


def _two_networks(follower: Follower, book: Notebook, engine: Engine) -> None:
    """One engine, an optimizer for each of two networks, and a backward and an unnamed step for each in one loop."""
    if len(engine.optimizers) < 2:
        return
    trained = {_whose(follower, optimizer.site) for optimizer in engine.optimizers}
    if None in trained or len(trained) < 2:
        return
    for loop in {event.loop for event in book.of("engine-step")} - {0}:
        steps, backwards = (
            {event.node for event in book.of(kind) if event.loop == loop and event.optimizer == engine.site}
            for kind in ("engine-step", "engine-backward")
        )
        steps = {node for node in steps if not getattr(node, "args", ())}  # engine.step(optimizer) steps that one alone
        if len(steps) > 1 and len(backwards) > 1:
            lines = " and ".join(str(line) for line in sorted(getattr(node, "lineno", 0) for node in steps))
            names = " and ".join(sorted(str(name) for name in trained))
            detail = f"one engine has optimizers for {names}, and each step (lines {lines}) steps both"
            book.judge("engine-two-networks", engine.node, True, detail)


def _whose(follower: Follower, optimizer: Site) -> str | None:
    """The network whose ``parameters()`` an optimizer was given whole."""
    known = follower.evaluator.making.optimizers.get(optimizer)
    given = known[0].args[0] if known and known[0].args else None
    if isinstance(given, ast.Call) and isinstance(given.func, ast.Attribute) and given.func.attr == "parameters":
        return ast.unparse(given.func.value)
    return None


def _functions(tree: ast.Module) -> Iterator[ast.AST]:
    yield from (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def _holds(scope: ast.AST, line: int) -> bool:
    return getattr(scope, "lineno", 0) <= line <= (getattr(scope, "end_lineno", 0) or 0)


def _reads_input_gradients(scope: ast.AST) -> bool:
    """Whether a function goes backward for the gradient of an input, as adversarial examples and saliency maps do."""
    asked: set[str] = set()
    for node in ast.walk(scope):
        if isinstance(node, ast.Assign) and _wants_gradient(node.value):
            asked |= {ast.unparse(target) for target in node.targets}
        elif isinstance(node, ast.Assign):
            owners = [target.value for target in node.targets if isinstance(target, ast.Attribute)]
            wanted = any(getattr(target, "attr", "") == "requires_grad" for target in node.targets)
            asked |= {ast.unparse(owner) for owner in owners} if wanted else set()
        elif isinstance(node, ast.Expr) and _wants_gradient(node.value):
            func = node.value.func if isinstance(node.value, ast.Call) else None
            asked |= {ast.unparse(func.value)} if isinstance(func, ast.Attribute) else set()
    read = (node for node in ast.walk(scope) if isinstance(node, ast.Attribute) and node.attr == "grad")
    return any(ast.unparse(node.value) in asked for node in read)


def _wants_gradient(node: ast.expr) -> bool:
    if not isinstance(node, ast.Call):
        return False
    by_method = isinstance(node.func, ast.Attribute) and node.func.attr in ("requires_grad_", "retain_grad")
    return by_method or any(one.arg == "requires_grad" for one in node.keywords)
