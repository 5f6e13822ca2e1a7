"""Rules that need the whole script: what never happens, what shares a loop, what only matters in some formats."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from narrowgauge.findings import NOTE
from narrowgauge.lint import engine_ends
from narrowgauge.lint.custom_ops import unseen_functions
from narrowgauge.lint.flow import Follower
from narrowgauge.lint.names import FRAMEWORKS, FUSED_ATTENTION
from narrowgauge.lint.notebook import Event, Notebook, has_modulo
from narrowgauge.lint.padding import padded
from narrowgauge.lint.values import Const, Tensor

_NORM_NAMES = ("norm", "bn", "ln")
LEAST, LARGE = 256, 1024
"""Dimensions of scripts below the first are not worth a word, from the second on worth a warning."""


def conclude(follower: Follower) -> None:
    """Complete the notebook: judge what needs the whole script, and clear what does not matter in it."""
    book = follower.notebook
    names = _words(follower.tree)
    _scalers(book)
    _bf16_scalers(book)
    _accumulation(book)
    _reading(book)
    _tied(book)
    _dimensions(book)
    _attention(follower, book, names)
    _truthy(follower.tree, book)
    follower.evaluator.casts.conclude()
    engine_ends.conclude(follower)
    unseen_functions(follower)
    for event in book.of("true-precision"):
        if {"fit", "backward", "setup"} & names:
            precision, _, bits = event.text.partition(": ")
            detail = f"precision='{precision}' trains in {bits} alone, without FP32 weights"
            mixed = "bf16-mixed" if bits == "BF16" else "16-mixed"
            book.judge("bf16-true", event.node, True, detail, f"precision='{mixed}'")
    _clear(book, names, imported(follower.tree))


def _clear(book: Notebook, names: set[str], libraries: set[str]) -> None:
    """Take back what does not matter in this script."""
    trains = bool(book.of("backward", "step", "scaler-step"))
    kept = bool(book.of("norms-kept")) or any(
        event.text.endswith(" fp32") and event.text.lower().startswith(_NORM_NAMES) for event in book.of("cast-part")
    )
    scaled = any("scaler" in name.lower() for name in names) or not libraries.isdisjoint(FRAMEWORKS)
    steps = book.of("step", "scaler-step")
    several = len({event.optimizer for event in steps}) > 1
    for (rule, _, _), verdict in book.verdicts.items():
        if (
            (rule == "half-norms" and (kept or not trains))
            or (rule == "fp16-without-scaler" and (scaled or not steps))
            or (rule == "clip-after-step" and several)
            or (rule == "nan-mask" and "fp16" not in book.formats)
            or (rule == "log-softmax" and not book.computes_low)
        ):
            verdict.good = True


def _scalers(book: Notebook) -> None:
    """A scaler that steps and is never updated; a checkpoint without it."""
    updated = {event.scaler for event in book.of("update")}
    for event in book.of("scaler-step"):
        known = event.scaler in book.scalers and event.scaler not in book.escaped
        if known and event.scaler not in updated and updated <= set(book.scalers):
            book.judge("scaler-without-update", event.node, True, "no update() of this scaler anywhere in the script")
    saved = book.of("optimizer-state")
    used = {event.scaler for event in book.of("scale")}
    if saved and used and not book.of("scaler-state") and not (used & book.escaped):
        detail = "optimizer.state_dict() is saved, and the scaler's is not"
        book.judge("scaler-not-saved", saved[0].node, True, detail)


def _bf16_scalers(book: Notebook) -> None:
    """A loss that comes from elsewhere is scaled, and all that the script casts to is BF16."""
    active = [cast for cast in book.autocasts if cast.active]
    if not active or any(cast.dtype != "bf16" for cast in active):
        return
    for event in book.of("scale-unknown"):
        place = book.scalers.get(event.scaler) if event.scaler is not None else None
        if place is not None and all(event.text in ("", cast.enabled) for cast in active):
            detail = "every autocast of the script is in BF16, and the loss is scaled all the same"
            book.judge("scaler-with-bf16", place, True, detail)


def _accumulation(book: Notebook) -> None:
    """Gradients of several batches: unscaled in each of them, or not divided by their number."""
    for unscale in book.of("unscale"):
        updates = [event for event in book.of("update") if event.scaler == unscale.scaler]
        rare = [event for event in updates if event.loop == unscale.loop and has_modulo(event.guards)]
        if unscale.loop and not unscale.guards and updates and len(rare) == len(updates):
            detail = (
                f"unscale_() runs for every batch, update() only for some of them (line {_line(updates[0])}): the "
                "second batch finds gradients that are unscaled already"
            )
            book.judge("unscale-twice", unscale.node, True, detail)
            book.verdicts["unscale-twice", _line(unscale), _column(unscale)].good = False
    for backward in book.of("backward"):
        loss = backward.value
        steps = [event for event in book.of("step", "scaler-step") if event.loop == backward.loop]
        if not backward.loop or backward.guards or not steps or not all(_every_so_many(step) for step in steps):
            continue
        if isinstance(loss, Tensor) and loss.loss not in ("", "summed") and not loss.divided:
            detail = f"backward() runs for every batch, the step in line {_line(steps[0])} for every so many"
            book.judge("accumulate-undivided", backward.node, True, detail)


def _every_so_many(event: Event) -> bool:
    """Whether a step is taken at every n-th batch: one test, ``... % n == ...``, with an n that is not 1."""
    tests = [test for test in event.guards if has_modulo([test])]
    for test in tests:
        for node in ast.walk(test):
            if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod):
                return not (isinstance(node.right, ast.Constant) and node.right.value == 1)
    return False


def _reading(book: Notebook) -> None:
    """The loss is read in every turn of the loop that goes backward."""
    told: set[int] = set()
    for event in book.of("item"):
        for backward in book.of("backward"):
            name = event.text.removesuffix(".detach()")
            same = name and (backward.text == name or f"({name})" in backward.text)
            if event.loop and event.loop == backward.loop and not event.guards and same and event.loop not in told:
                told.add(event.loop)
                book.judge("sync-in-loop", event.node, True, f"{event.text} is read for every batch")


def _tied(book: Notebook) -> None:
    ties = [(event.text.split(), _line(event)) for event in book.of("tie")]
    casts = book.of("cast-part")
    for (first, second), line in ties:
        for event in casts:
            name, dtype = event.text.split()
            other = {first: second, second: first}.get(name)
            low = dtype in ("fp16", "bf16")
            if other is not None and low and all(one.text != f"{other} {dtype}" for one in casts):
                detail = f"{name} is cast to {dtype.upper()}, and its weight is {other}'s too (line {line})"
                book.judge("tied-formats", event.node, True, detail)


def _dimensions(book: Notebook) -> None:
    if not book.computes_low:
        return
    multiple = 16 if "fp8" in book.formats else 8
    for event in book.of("dimension-0", "dimension-1"):
        size = event.value.value if isinstance(event.value, Const) else None
        if isinstance(size, int) and size >= LEAST and size % multiple:
            detail = f"{event.text} is {size:,}, not a multiple of {multiple}"
            best = padded(size)
            added = (best - size) / size
            fix = f"pad it to {best:,} ({added:.2%} more)"
            book.judge("off-multiple", event.node, True, detail, fix, None if size >= LARGE else NOTE)


def _attention(follower: Follower, book: Notebook, names: set[str]) -> None:
    """Attention by hand; not where the script has the fused one too, nor where the weights are wanted."""
    if any(part in name for name in names for part in FUSED_ATTENTION):
        return
    tensors = follower.evaluator.tensors
    escaped = tensors.escapes()
    for frame, node in tensors.attention:
        if frame not in escaped:
            detail = "softmax of q @ k.transpose is multiplied with v, the scores written out in between"
            book.judge("manual-attention", node, True, detail)


def _truthy(tree: ast.Module, book: Notebook) -> None:
    for node in ast.walk(tree):
        if isinstance(node, ast.If | ast.While | ast.IfExp | ast.Assert):
            test = node.test.operand if isinstance(node.test, ast.UnaryOp) else node.test
            asked = test.func.attr if isinstance(test, ast.Call) and isinstance(test.func, ast.Attribute) else ""
            if asked in ("_found_inf_per_device", "_check_inf_per_device"):
                book.judge("found-inf-truthy", test, True, f"a test asks whether {asked}(...) is true")


def _words(tree: ast.Module) -> set[str]:
    """Every name and attribute of the script."""
    return set(_all_words(tree))


def _all_words(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.alias):
            yield node.name


def imported(tree: ast.Module) -> set[str]:
    """The libraries a script imports."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.split(".")[0])
    return found


def _line(event: Event) -> int:
    return int(getattr(event.node, "lineno", 0))


def _column(event: Event) -> int:
    return int(getattr(event.node, "col_offset", 0))
