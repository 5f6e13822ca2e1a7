"""A rehearsal finds the kernels that the next steps launch, and changes nothing."""

from __future__ import annotations

import copy
import importlib
import pkgutil
import warnings
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from narrowgauge import hardware, kernels, tasks
from narrowgauge.forecast.trace.trace_step import trace_steps
from narrowgauge.kernels import launch, rehearsal
from narrowgauge.kernels.experts import activation, products, rows, slots, wide
from narrowgauge.nn.experts.run import _Experts
from narrowgauge.nn.fused import rehearse, verify
from narrowgauge.recipe import parse
from narrowgauge.scaling.tensor import TensorScales
from narrowgauge.task import Task
from narrowgauge.tasks import user_model

OUTSIDE = {"_adamw_kernel", "_squares_kernel", "_norms_kernel", "rescale_kernel", "add_rows_kernel"}
"""Kernels outside of blocks and head."""


EXPERT_OPS = {
    slots: ["_assign"], rows: ["_gather_cast", "_sum_slots"], activation: ["_activate", "_backward"],
    products: ["_multiply", "_multiply_slots"], wide: ["_gather", "_activate", "_backward"],
}  # fmt: skip


class Launches:
    """The variants of kernels that were rehearsed, and those that were launched."""

    def __init__(self) -> None:
        self.rehearsed: set[Any] = set()
        self.launched: list[Any] = []
        self.unforeseen: list[Any] = []
        """Launches that no rehearsal had foreseen."""

    def launch(self, kernel: Any, grid: Any, *args: Any, **constants: Any) -> None:
        key = kernel.__name__, tuple(map(classify, args)), tuple(sorted(constants.items()))
        if rehearsal.noted is not None:
            self.rehearsed.add(key)
            return
        self.launched.append(key)
        if key not in self.rehearsed:
            self.rehearsed.add(key)
            self.unforeseen.append(key)


def classify(value: Any) -> Any:
    if isinstance(value, tuple):
        return value[0].dtype, value[1]
    if isinstance(value, Tensor):
        return value.dtype
    return (value == 1, value % 16 == 0) if type(value) is int else None if value is None else type(value)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    """Note launches on a simulated GPU, where the Python around kernels runs as on a real one."""
    made = Launches()
    names = [module.name for module in pkgutil.walk_packages(kernels.__path__, "narrowgauge.kernels.")]
    for module in map(importlib.import_module, names):
        for launcher in ("launch_kernel", "launch_tiled"):
            if hasattr(module, launcher) and not module.__name__.endswith("launch"):
                monkeypatch.setattr(module, launcher, made.launch)
        if hasattr(module, "can_bypass_op") and not module.__name__.endswith("cublas"):
            monkeypatch.setattr(module, "can_bypass_op", lambda *tensors: True)
    for module, ops in EXPERT_OPS.items():  # run the Python around their kernels, and not what stands for it
        for name in ops:
            monkeypatch.setattr(module, f"{name}_op", getattr(module, name))
    monkeypatch.setattr(products, "_count_programs", lambda tensor: 132)
    monkeypatch.setattr(rehearse, "_has_data", lambda x: True)
    monkeypatch.setattr(rehearse, "is_dry_run", lambda: False)
    monkeypatch.setattr(rehearse.events, "is_listening", lambda: False)
    monkeypatch.setattr(rehearse, "get_random_state", lambda device: None)
    monkeypatch.setattr(rehearse, "set_random_state", lambda state, device: None)
    monkeypatch.setattr(rehearse, "_done", set())
    monkeypatch.setattr(rehearse, "_places", {})
    return made


HF_LLAMA = {
    "vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip


HF_MIXTRAL = {
    "vocab_size": 512, "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "num_local_experts": 4, "output_router_logits": True,
}  # fmt: skip


def make_task(kind: str) -> Task:
    if kind == "transformers":
        return user_model.make_task("transformers:LlamaForCausalLM", HF_LLAMA, 8, 256, small=False)
    return tasks.find(kind, batch=8, context=256)


@pytest.mark.parametrize(
    ("kind", "recipe"),
    [
        *(("gpt:3x256", recipe) for recipe in ("fp8", "bf16", "fp8-lean", "fp8[activations=8bit]")),
        *(("transformers", recipe) for recipe in ("fp8", "fp8-lean[activations=8bit,checkpoint=none]")),
    ],
)
def test_what_blocks_and_head_launch_was_rehearsed(kind: str, recipe: str, launches: Launches) -> None:
    parsed = parse(recipe)
    parsed = parsed.replace(products="all") if parsed.compute == "fp8" else parsed
    trace_steps(make_task(kind), parsed, hardware.find_gpu("h200"))
    assert len(launches.rehearsed) > 4
    missed = Counter(key[0] for key in launches.unforeseen if key[0] not in OUTSIDE)
    # The last norm of transformers' models is outside as well: forward and backward, in the first step and later ones.
    most = 6 if kind == "transformers" else 0
    assert missed.keys() <= {"forward_kernel", "backward_kernel", "sum_kernel"} and missed.total() <= most


@pytest.mark.parametrize(
    ("recipe", "some"),
    [
        ("fp8", {"_multiply_experts_kernel", "_multiply_slots_kernel", "_activate_experts_backward_kernel"}),
        ("fp8-lean", {"_multiply_experts_kernel", "_gather_cast_kernel"}),
        ("fp8[scaling=current]", {"_multiply_slots_kernel", "_activate_experts_kernel"}),
        ("fp8[gradients_format=e4m3]", {"_multiply_slots_kernel", "_sum_slots_kernel"}),
        ("bf16", {"_gather_kernel", "_activate_wide_kernel", "_activate_wide_backward_kernel", "_assign_kernel"}),
        ("bf16-lean", {"_gather_kernel", "_sum_slots_kernel"}),
    ],
)
@pytest.mark.parametrize("kind", ["moe-tiny", "mixtral"])
def test_what_experts_launch_was_rehearsed(kind: str, recipe: str, some: set[str], launches: Launches) -> None:
    """Forward and backward, in the first step and later ones, in both formats of gradients."""
    parsed = parse(recipe)
    parsed = parsed.replace(products="all") if parsed.compute == "fp8" else parsed
    if kind == "mixtral":
        pytest.importorskip("transformers")
        task = user_model.make_task("transformers:MixtralForCausalLM", HF_MIXTRAL, 8, 256, small=False)
    else:
        task = tasks.find(kind, batch=8, context=256)
    trace_steps(task, parsed, hardware.find_gpu("h200"))
    assert some <= {key[0] for key in launches.launched}
    of_experts = {kernel for module in EXPERT_OPS for kernel in vars(module) if kernel.endswith("_kernel")}
    assert not of_experts & {key[0] for key in launches.unforeseen}


def test_equal_experts_are_rehearsed_once(launches: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[tuple[bool, bool]] = []
    original = _Experts.forward

    def count(ctx: Any, *args: Any) -> Any:
        if rehearsal.noted is not None:
            runs.append((args[-2].scales.delayed, all(args[-1])))
        return original(ctx, *args)

    monkeypatch.setattr(_Experts, "forward", count)
    trace_steps(tasks.find("moe-tiny", batch=8, context=256), parse("fp8[products=all]"), hardware.find_gpu("h200"))
    assert runs == [(False, True), (True, True)]  # without scales, and with them


def test_a_rehearsal_of_experts_reads_nothing_out_of_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots that no kernel has written are indices of what torch reads."""
    monkeypatch.setattr(slots, "use_triton", lambda tensor: True)
    monkeypatch.setattr(slots, "launch_kernel", lambda *args, **constants: None)
    filled = torch.empty
    monkeypatch.setattr(slots.torch, "empty", lambda *size, **kwargs: filled(*size, **kwargs).fill_(10**6))
    index = torch.tensor([[0, 1], [2, 1]])
    monkeypatch.setattr(rehearsal, "noted", {})
    assert not slots._assign(index, 4)[0].any()
    monkeypatch.setattr(rehearsal, "noted", None)
    assert slots._assign(index, 4)[0].all()


def test_equal_blocks_are_rehearsed_once(launches: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[str] = []
    original = rehearse._run_block
    monkeypatch.setattr(
        rehearse, "_run_block", lambda given, *rest: runs.append(given.plan.path) or original(given, *rest)
    )
    trace_steps(make_task("gpt:3x256"), parse("fp8"), hardware.find_gpu("h200"))
    assert runs == ["blocks.0", "blocks.0", "blocks.1", "blocks.1"]  # each without scales, and with them


def test_nothing_that_is_recorded_counts() -> None:
    scales = TensorScales({"a": torch.float8_e4m3fn, "b": torch.float8_e5m2}, "cpu")
    before = copy.deepcopy([scales.amax, scales.counts, scales.siteless_amax])
    with scales.unrecorded(True):
        assert scales.delayed
        scales.sites["b"].amax.fill_(7.0)
        scales.sites["a"].counts.fill_(3)
        scales.sites["a"].pending.fill_(3)
        scales.note_amax(torch.tensor(9.0))
    assert not scales.delayed and not scales.sites["a"].pending.any()
    assert all(
        torch.equal(*pair) for pair in zip([scales.amax, scales.counts, scales.siteless_amax], before, strict=True)
    )


def test_a_launch_in_a_rehearsal_is_noted_and_nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    noted: list[dict[Any, rehearsal.Variant]] = []
    monkeypatch.setattr(rehearsal, "start_compiling", noted.append)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)

    class Kernel:
        device_caches: Any = None

        def __getitem__(self, grid: Any) -> Any:
            raise AssertionError("launched")

    kernel, x = Kernel(), torch.zeros(64)
    with rehearsal.rehearsing():
        for rows in (16, 32, 33):
            launch.launch_kernel(kernel, (1,), x, rows, 1.5, None, BLOCK=64)
        launch.launch_kernel(kernel, (1,), x[1:], 16, 1.5, None, BLOCK=64)  # not aligned
    (found,) = noted
    assert [variant.args for variant in found.values()] == [
        (torch.float32, 16, 1.5, None),
        (torch.float32, 33, 1.5, None),
    ]
    assert all(variant.constants == {"BLOCK": 64} for variant in found.values())
    assert rehearsal.noted is None


def test_steps_whose_memory_is_measured_rehearse_nothing(launches: Launches) -> None:
    with rehearse.suspended():
        trace_steps(make_task("gpt:3x256"), parse("fp8"), hardware.find_gpu("h200"))
    assert not launches.rehearsed.difference(launches.unforeseen)


def test_nothing_that_is_traced_is_rehearsed() -> None:
    x = torch.ones(2)
    assert rehearse._has_data(x) and rehearse._has_data(torch.nn.Parameter(x))
    with verify._DropoutInOrder():
        assert rehearse._has_data(x)
    with FlopCounterMode(display=False), verify._DropoutInOrder():
        assert not rehearse._has_data(x)
    with FakeTensorMode() as mode:
        assert not rehearse._has_data(mode.from_tensor(x))
    assert not rehearse._has_data(mode.from_tensor(x))


def test_another_recipe_for_the_same_blocks_is_rehearsed(launches: Launches) -> None:
    """As in a benchmark of several recipes, and after blocks were compared with the originals in FP32: all have one
    description."""
    for recipe in ("bf16", "fp8"):
        trace_steps(make_task("gpt:3x256"), parse(recipe), hardware.find_gpu("h200"))
    assert {key[0] for key in launches.unforeseen} <= OUTSIDE


@pytest.mark.parametrize(("error", "warns"), [(torch.OutOfMemoryError("full"), False), (RuntimeError("a\nb"), True)])
def test_training_continues_without_a_rehearsal_that_fails(
    error: Exception, warns: bool, launches: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any) -> None:
        raise error

    monkeypatch.setattr(rehearse, "_run_block", fail)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        trace_steps(make_task("gpt:3x256"), parse("fp8"), hardware.find_gpu("h200"))
    told = [str(one.message) for one in found if "rehearsal" in str(one.message)]
    assert told == ["kernels are compiled one after the other: a rehearsal failed (RuntimeError: a b)"] * 2 * warns
    assert rehearsal.noted is None
