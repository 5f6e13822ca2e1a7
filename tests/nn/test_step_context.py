"""Which of torch's attention backends a step may use."""

import pytest
import torch
from torch.backends import cuda
from torch.nn.attention import SDPBackend, sdpa_kernel

from narrowgauge.nn.step_context import BACKENDS, ENABLED, StepContext
from narrowgauge.recipe import parse


def make_context(monkeypatch, recipe="bf16"):
    monkeypatch.setattr("narrowgauge.nn.step_context.settle_attention_order", lambda device: None)
    return StepContext(parse(recipe), torch.device("cuda"), emulated=False)


def find_allowed():
    return [name for name, is_enabled in ENABLED.items() if is_enabled()]


@pytest.mark.parametrize("recipe", ["bf16", "fp16", "fp8", "bf16-lean", "fp8-lean"])
def test_auto_allows_all_backends(recipe, monkeypatch):
    with make_context(monkeypatch, recipe).attention():
        assert find_allowed() == list(BACKENDS)


@pytest.mark.parametrize("left", [["flash"], ["math"], ["efficient", "math"], ["cudnn", "flash"]])
def test_auto_leaves_off_what_the_user_turned_off(left, monkeypatch):
    context = make_context(monkeypatch)
    with sdpa_kernel([BACKENDS[name] for name in left]):
        with context.attention():
            assert find_allowed() == left
        assert find_allowed() == left
    cuda.enable_cudnn_sdp(False)
    try:
        with context.attention():
            assert "cudnn" not in find_allowed()
        assert "cudnn" not in find_allowed()
    finally:
        cuda.enable_cudnn_sdp(True)


@pytest.mark.parametrize("warn_only", [False, True])
def test_deterministic_algorithms_leave_cudnn_out(warn_only, monkeypatch):
    context = make_context(monkeypatch)
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    try:
        with context.attention():
            assert find_allowed() == ["flash", "efficient", "math"]
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION), context.attention():
            assert find_allowed() == ["cudnn"]  # nothing else is left, and torch says why it does not fit
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_named_backend_is_the_only_one(monkeypatch):
    with make_context(monkeypatch, "bf16[attention=flash]").attention():
        assert find_allowed() == ["flash"]
    with make_context(monkeypatch, "bf16[attention=any]").attention(), sdpa_kernel(SDPBackend.MATH):
        assert find_allowed() == ["math"]
