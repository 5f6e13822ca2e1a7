"""Names in code about mixtures of experts: how many experts there are, what chooses them, what they are assigned to."""

from __future__ import annotations

import ast
import functools
import re
from dataclasses import dataclass

from narrowgauge.lint.interpreter.context import Context
from narrowgauge.lint.interpreter.syntax import words_of

_COUNT = re.compile(r"(^|_)((num|n|nb|nr|number|total)_?(\w+_)?exp(ert)?s?|experts?_(num|count|number))$|^experts?$")
"""``num_experts``, ``n_routed_experts``, ``n_exp``, ``expert_num``; not ``expert_dim``."""
_MIXTURE = re.compile(r"(^|_)(moe|MOE)(_|$)|MoE|n_exp$|router_(logits|probs|scores)|routing_(weights|probs|scores)")
_TOPIC = re.compile(r"(^|_)(experts?|routers?|routes?|routing|routed|gates?|gating|moe)(_|\d|$)")
_CLASS = re.compile(r"Router|Routing|Gating|Expert|Mixture|MoE|MOE|Moe(?![a-z])|Gate(?!d)")
_WRITES_TEXT = re.compile(r"generate|sample|decode|beam")
"""Functions that choose the next token, also in a model with experts."""
_ROUTER = re.compile(r"((\w+_)?router|((moe|expert)_)?(gating|gate))(_(network|net|layer|linear|module))?$")
"""``router``, ``token_router``, ``gate``; not ``forget_gate``."""


@dataclass(frozen=True)
class Place:
    """What is around an expression: the statement, and the classes and functions, the outermost first."""

    statement: ast.AST
    owners: tuple[str, ...]


@functools.lru_cache(maxsize=2)
def _places(tree: ast.Module) -> dict[ast.AST, Place]:
    """Return the place of every expression."""
    found: dict[ast.AST, Place] = {}
    waiting: list[tuple[ast.AST, tuple[str, ...]]] = [(tree, ())]
    while waiting:
        node, owners = waiting.pop()
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                waiting.append((child, (*owners, child.name)))
            elif isinstance(child, ast.expr) or (isinstance(child, ast.stmt) and not hasattr(child, "body")):
                place = Place(child, owners)
                found.update(dict.fromkeys(ast.walk(child), place))
            else:
                waiting.append((child, owners))
    return found


def place_of(context: Context, node: ast.AST) -> Place:
    """Return the place of an expression of the script."""
    return _places(context.tree).get(node, Place(node, ()))


@functools.lru_cache(maxsize=2)
def has_experts(tree: ast.Module) -> bool:
    """Return whether a name in the script speaks of experts."""
    return any("expert" in word.lower() or _MIXTURE.search(word) for word in words_of(tree))


def only_runs(context: Context) -> bool:
    """Return whether the line is in a test, or in a script that runs a trained model: its formats are given."""
    is_inference = "inference_mode" in context.words and not {"backward", "optimizer", "training"} & context.words
    return context.is_in_test or is_inference


def is_about_experts(context: Context, node: ast.AST) -> bool:
    """Return whether an expression is about experts, by the words in its statement, or by its class and function."""
    if not has_experts(context.tree):
        return False
    place = place_of(context, node)
    if any(_TOPIC.search(word.lower()) for word in words_of(place.statement)):
        return True
    names = place.owners
    if any(_WRITES_TEXT.search(name) for name in names):
        return False
    return any(_CLASS.search(name) if name[:1].isupper() else _TOPIC.search(name) for name in names)


def is_count(node: ast.expr | None) -> bool:
    """Return whether an expression is the number of experts: ``config.num_experts``, ``len(self.experts)``."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "len" and node.args:
        return _last_word(node.args[0]).endswith("experts")
    return _COUNT.search(_last_word(node)) is not None


def is_count_text(text: str) -> bool:
    """Return whether an expression, given as text, is the number of experts."""
    return bool(text) and is_count(ast.parse(text, mode="eval").body)


def is_router(node: ast.expr | None) -> bool:
    """Return whether an expression has the name of a router: ``self.router``, ``block.moe.gate``."""
    word = _last_word(node)
    return _ROUTER.match(word) is not None and "shared" not in word


def is_router_class(name: str) -> bool:
    """Return whether a class has the name of a router."""
    return re.search(r"Router|Gating|Gate$", name.split(".")[-1]) is not None


def _last_word(node: ast.expr | None) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr.lower()
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):  # config["num_experts"]
        return str(node.slice.value).lower()
    return node.id.lower() if isinstance(node, ast.Name) else ""


def name_given(statement: ast.AST) -> str:
    """Return the name that a statement gives to its value: of a target, or the first argument of register_buffer."""
    if isinstance(statement, ast.Assign | ast.AnnAssign):
        return _last_word(statement.targets[0] if isinstance(statement, ast.Assign) else statement.target)
    call = statement.value if isinstance(statement, ast.Expr) else None
    if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.args:
        first = call.args[0]
        if call.func.attr in ("register_buffer", "register_parameter") and isinstance(first, ast.Constant):
            return str(first.value).lower()
    return ""
