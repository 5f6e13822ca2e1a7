"""Events of fused code: every product, copy and launch is reported, at almost no cost without a listener."""

from __future__ import annotations

import ast
import re
import timeit
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import narrowgauge
from narrowgauge import events, hardware, tasks
from narrowgauge.engine import Engine
from narrowgauge.forecast.trace.trace_step import trace_steps
from narrowgauge.models.llama import Llama, LlamaConfig
from narrowgauge.nn.convert import convert
from narrowgauge.recipe import EMULATED, NAMED, parse
from narrowgauge.task import Task

H200 = hardware.find_gpu("h200")
PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "_scaled_mm"}
SOURCE = Path(narrowgauge.__file__).parent
UNCONVERTED = ["fp32", "tf32", "fp16"]
CONVERTED = [
    *(name for name in NAMED if name not in (*UNCONVERTED, *EMULATED)),
    "fp8[products=all]", "fp8[scaling=current]", "fp8[checkpoint=selective]", "bf16[checkpoint=full]",
    "fp8[master=split,gradients=released]",
]  # fmt: skip


class ProductLog(TorchDispatchMode, events.Listener):
    """Compares the products that the dispatcher runs with those that are reported."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # no wrapper that doubles the cost of every op: nothing is compiled inside

    def __init__(self) -> None:
        super().__init__()
        self.reported: list[tuple[str, str]] = []
        self.unreported: list[str] = []
        self.copies: list[tuple[int, tuple[torch.dtype, ...]]] = []
        self.launches: list[str] = []
        self.scopes: list[str] = []
        self.depth = 0
        self._open: list[tuple[str, str]] = []
        self._runs: Counter[int] = Counter()

    def begin_product(self, product: str, path: str) -> None:
        assert not self._open, "products do not nest"
        self._open.append((product, path))
        self.reported.append((product, path))

    def end_product(self) -> None:
        self._open.pop()
        assert self._runs[len(self.reported)] == 1, (
            f"{self.reported[-1]} is reported, and the dispatcher saw no product"
        )

    def enter_scope(self, path: str) -> None:
        self.scopes.append(path)
        self.depth += 1

    def leave_scope(self) -> None:
        self.depth -= 1

    def report_copy(self, weights: Any, copies: Any) -> None:
        self.copies.append((len(weights), tuple(copy.dtype for copy in copies)))

    def report_launch(self, kernel: str, reads: Any, writes: Any) -> None:
        self.launches.append(kernel)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name.split("::")[1] in PRODUCTS:
            if self._open:
                self._runs[len(self.reported)] += 1
            else:
                self.unreported.append(f"{func} on {[tuple(a.shape) for a in args if isinstance(a, Tensor)]}")
        return func(*args, **(kwargs or {}))


class Mlp(nn.Module):
    """Linear layers that are converted one by one: with and without bias, and one that needs no grad_input."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(256, 256), nn.Linear(256, 256, bias=False)])
        self.last = nn.Linear(256, 128)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.relu(block(x))
        return self.last(x)


def mlp() -> Task:
    return Task(
        model=Mlp, batch=lambda step, split: torch.zeros(256, 256), loss=lambda m, x: m(x).float().square().mean(),
        name="mlp", items_per_batch=256,
    )  # fmt: skip


def llama() -> Task:
    config = LlamaConfig(layers=2, width=128, heads=2, kv_heads=1, hidden=256, context=64, vocab=512)
    tokens = torch.zeros(4, 64, dtype=torch.long)
    return Task(
        model=lambda: Llama(config), batch=lambda step, split: (tokens, tokens),
        loss=lambda model, batch: model(*batch), name="llama", items_per_batch=256,
    )  # fmt: skip


TASKS = {"gpt": lambda: tasks.find("gpt:2x128", batch=4, context=64), "llama": llama, "mlp": mlp}


def simulate(task: Task, recipe: str) -> ProductLog:
    log = ProductLog()
    with log, events.listening(log):
        trace_steps(task, parse(recipe), H200, compile=False)
    return log


# Named recipes with both models, each option with one.
FUSED = [
    (name, recipe)
    for number, recipe in enumerate(CONVERTED)
    for name in (("gpt", "llama") if recipe in NAMED else (("gpt", "llama")[number % 2],))
]


@pytest.mark.parametrize(("name", "recipe"), FUSED)
def test_every_product_of_fused_blocks_and_head_is_reported(name: str, recipe: str) -> None:
    log = simulate(TASKS[name](), recipe)
    assert not log.unreported and log.depth == 0
    assert {product for product, _ in log.reported} == set(events.PRODUCTS)
    layers = [
        f"blocks.{i}.{part}" for i in (0, 1) for part in ("qkv", "out", "gate" if name == "llama" else "up", "down")
    ]
    assert {path for _, path in log.reported} == {*layers, "lm_head"}
    counts = Counter(log.reported)
    chosen, again = parse(recipe), ("up", "gate")
    if chosen.gradients != "fp32":  # attention is kept beside FP32 gradients, but not beside smaller ones
        again = ("up", "gate", "qkv", "out")
    times = 2 if chosen.checkpoint == "full" else 0
    if chosen.checkpoint == "none" and chosen.compute == "fp8" and chosen.scaling == "delayed":
        times = 1  # the first step has no scales, and recomputes its blocks
    for layer in layers:
        assert counts["grad_input", layer] == counts["grad_weight", layer] == 2
        assert counts["output", layer] == 2 + (times if layer.endswith(again) else 0)  # of two steps
    assert {"blocks.0", "blocks.1", "lm_head"} <= set(log.scopes)


@pytest.mark.parametrize("recipe", ["fp8[products=all]", "fp8[products=all,scaling=current]"])
def test_every_product_of_a_converted_linear_is_reported(recipe: str) -> None:
    log = simulate(mlp(), recipe)
    assert not log.unreported
    expected = {(product, path) for path in ("blocks.0", "blocks.1", "last") for product in events.PRODUCTS}
    assert set(log.reported) == expected - {("grad_input", "blocks.0")}, "the batch needs no gradient"


@pytest.mark.parametrize("recipe", UNCONVERTED)
def test_recipes_that_convert_nothing_report_no_products(recipe: str) -> None:
    log = simulate(mlp(), recipe)
    assert not log.reported and log.unreported, "hooks on modules see these products"


@pytest.mark.parametrize("name", ["gpt", "mlp"])
def test_products_on_a_real_device_are_reported_too(name: str) -> None:
    task = tasks.find("gpt:1x64", batch=2, context=16) if name == "gpt" else mlp()
    model = task.model()
    engine = Engine(model, torch.optim.AdamW(model.parameters()), "fp8[products=all]")
    batch = task.batch(0, "train")
    log = ProductLog()
    with log, events.listening(log):
        with engine.forward():
            loss = task.loss(engine.model, batch)
        engine.backward(loss)
        engine.step()
    assert not log.unreported and {product for product, _ in log.reported} == set(events.PRODUCTS)


def test_copies_and_launches_are_reported() -> None:
    log = simulate(TASKS["llama"](), "fp8[products=all]")
    stacked = [dtypes for weights, dtypes in log.copies if weights == 2]
    assert stacked and set(stacked[0]) == {torch.float8_e4m3fn}, "gate and up are one weight"
    assert {"adamw", "gradient_norms", "rescale"} <= set(log.launches)


def test_products_are_computed_in_one_place_only() -> None:
    """Code that multiplies by other means than the three reporting functions would run unreported."""
    allowed = {"nn/products/gemm.py", "nn/products/choose_formats.py"}  # the second one times them
    names = {"multiply_fp8", "multiply_bf16", "_scaled_mm"}
    for path in (
        path for room in ("nn", "models", "engine", "optim", "ranks") for path in (SOURCE / room).rglob("*.py")
    ):
        calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
        called = {getattr(call.func, "attr", getattr(call.func, "id", "")) for call in calls}
        assert not called & names or str(path.relative_to(SOURCE)) in allowed, path
    assert names <= {name for path in allowed for name in re.findall(r"\w+", (SOURCE / path).read_text())}, "renamed?"


def test_listeners_get_events_until_their_context_ends() -> None:
    first, second = ProductLog(), ProductLog()
    with events.listening(first):
        with events.listening(second):
            events.report_launch("a", (), ())
        events.report_launch("b", (), ())
    events.report_launch("c", (), ())
    assert first.launches == ["a", "b"] and second.launches == ["a"] and not events.is_listening()


def test_a_scope_is_left_after_an_error() -> None:
    log = ProductLog()
    with events.listening(log), pytest.raises(ZeroDivisionError):
        events.run_in_scope("block", lambda: 1 // 0)
    assert log.scopes == ["block"] and log.depth == 0


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's own tracing does
def test_compiled_code_has_no_events_and_no_guard_on_listeners() -> None:
    model = Mlp()
    convert(model, "fp8[products=all]")
    graphs: list[Any] = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(model, backend=backend, fullgraph=True)
    x, log = torch.randn(16, 256), ProductLog()
    with torch.no_grad():
        compiled(x)
        with events.listening(log):
            compiled(x)
            assert len(graphs) == 1 and not log.reported
            torch._dynamo.reset()
            compiled(x)
        compiled(x)
    assert len(graphs) == 2 and not log.reported, "a graph that is traced under a listener is the same"


def test_an_event_costs_little_without_a_listener() -> None:
    """It takes 0.1 to 0.2 microseconds; the bound leaves room for a loaded machine."""
    nothing = min(timeit.repeat("pass", number=20_000, repeat=20))
    check = min(timeit.repeat(events.is_listening, number=20_000, repeat=20)) - nothing
    assert check / 20_000 < 1e-6
