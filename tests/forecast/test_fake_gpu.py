"""The simulated GPU: code runs as if on it, nothing is allocated, and everything is restored afterwards."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from narrowgauge import hardware, kernels
from narrowgauge.forecast.trace.cuda_rules import Rules
from narrowgauge.forecast.trace.fake_gpu import simulate_gpu
from narrowgauge.forecast.trace.trace_step import trace_steps
from narrowgauge.kernels import adamw, dry_run
from narrowgauge.nn.products import choose_formats
from narrowgauge.nn.step_context import BACKENDS
from narrowgauge.recipe import parse
from narrowgauge.task import Task

H200 = hardware.find_gpu("h200")
GLOBALS = [
    (torch, "compile"), (torch, "clear_autocast_cache"), (F, "dropout"), (F, "scaled_dot_product_attention"),
    (torch.cuda, "is_available"), (torch.cuda, "Event"), (torch.cuda, "_initialized"),
    (hardware, "_assumed"), (dry_run, "_is_dry"), (hardware, "detect"), (kernels, "HAVE_TRITON"),
    (choose_formats, "measure_costs"), (adamw, "make_block_table"), (adamw, "_adamw_kernel"),
]  # fmt: skip


def test_tensors_of_the_simulated_gpu_have_no_data_and_report_cuda() -> None:
    with simulate_gpu(H200):
        with torch.device("cuda"):
            layer = torch.nn.Linear(1 << 16, 1 << 16)  # 17 GB
        x = torch.zeros(4, 1 << 16).to("cuda")
        y = layer(x)
        assert (y.device.type, y.is_cuda, y.is_meta, y.get_device()) == ("cuda", True, False, 0)
        assert torch.ones(2).device.type == "cpu", "the host stays the host"
        assert torch.zeros(2, device=y.device).is_cuda and y.new_zeros(2).is_cuda
    assert y.device.type == "meta"


def test_values_read_from_it_are_zeros_and_counted() -> None:
    with simulate_gpu(H200) as simulated:
        x = torch.ones(3, device="cuda")
        assert x.sum().item() == 0 and not x.any() and float(x[0]) == 0.0 and x.tolist() == [0.0, 0.0, 0.0]
        assert torch.empty(3, pin_memory=True).copy_(x).sum() == 0
        assert x.cpu().device.type == "cpu" and x.to("cpu", torch.float64).dtype is torch.float64
        assert simulated.values_read == 7


def test_torch_and_hardware_describe_the_gpu_of_the_table() -> None:
    with simulate_gpu(hardware.find_gpu("a100")):
        found = hardware.detect()
        assert (found.kind, found.gpu, found.capability) == ("cuda", hardware.find_gpu("A100-SXM4-80GB"), (8, 0))
        assert torch.cuda.is_available() and torch.cuda.get_device_properties(0).multi_processor_count == 108
        assert choose_formats.measure_costs(1, 1, 1, found) is None


def test_everything_is_restored_even_after_an_error() -> None:
    before = [getattr(owner, name) for owner, name in GLOBALS]
    with pytest.raises(ZeroDivisionError), simulate_gpu(H200):
        changed = [getattr(owner, name) is not old for (owner, name), old in zip(GLOBALS, before, strict=True)]
        assert all(changed[:6]) and all(changed[7:9]), "torch's answers, and narrowgauge's two switches"
        assert not any(changed[9:]), "nothing of narrowgauge's own is replaced"
        raise ZeroDivisionError
    assert [getattr(owner, name) for owner, name in GLOBALS] == before
    assert torch.zeros(1).device.type == "cpu" and torch._C._len_torch_function_stack() == 0


def test_gradients_flow_and_python_in_backward_sees_the_gpu() -> None:
    seen: list[bool] = []

    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):  # type: ignore[no-untyped-def]
            return x * 2

        @staticmethod
        def backward(ctx, grad):  # type: ignore[no-untyped-def]
            seen.append(grad.is_cuda)
            return grad * 2

    with simulate_gpu(H200):
        x = torch.ones(4, device="cuda", requires_grad=True)
        Double.apply(x).sum().backward()
        assert x.grad is not None and x.grad.is_cuda
    assert seen == [True]


def test_autocast_behaves_as_on_cuda() -> None:
    with simulate_gpu(H200), torch.autocast("cuda", torch.bfloat16):
        x, weight = torch.ones(4, 8, device="cuda"), torch.nn.Parameter(torch.ones(8, 8, device="cuda"))
        y = x @ weight
        assert y.dtype is torch.bfloat16 and F.linear(y, weight).dtype is torch.bfloat16
        assert F.layer_norm(y, (8,)).dtype is torch.float32 and y.exp().dtype is torch.float32
        assert (y + x).dtype is torch.float32 and F.gelu(y).dtype is torch.bfloat16
        assert F.cross_entropy(y, torch.zeros(4, dtype=torch.long, device="cuda")).dtype is torch.float32
        with torch.autocast("cuda", enabled=False):
            assert (x @ weight).dtype is torch.float32


def test_autocast_casts_a_parameter_once_and_clears_its_cache_at_the_end() -> None:
    made: list[torch.Tensor] = []
    with simulate_gpu(H200) as simulated:
        simulated.rules.on_cast = lambda parameter, copy: made.append(copy)
        weight = torch.nn.Parameter(torch.ones(8, 8, device="cuda"))
        for _ in range(2):
            with torch.autocast("cuda", torch.bfloat16):
                for _ in range(3):
                    F.linear(torch.ones(4, 8, device="cuda"), weight)
    assert len(made) == 2


@pytest.mark.parametrize(
    ("dtype", "size", "allowed", "mask", "expected"),
    [
        (torch.bfloat16, 64, ("cudnn", "flash", "efficient", "math"), False, "cudnn"),
        (torch.float32, 64, ("cudnn", "flash", "efficient", "math"), False, "efficient"),
        (torch.bfloat16, 256, ("cudnn", "flash", "efficient"), False, "flash"),
        (torch.float16, 64, ("flash", "math"), True, "math"),
        (torch.bfloat16, 64, ("math",), False, "math"),
    ],
)
def test_attention_uses_the_backend_that_torch_would(
    dtype: torch.dtype, size: int, allowed: tuple[str, ...], mask: bool, expected: str
) -> None:
    from torch.nn.attention import sdpa_kernel

    query = torch.empty(2, 4, 16, size, dtype=dtype, device="meta")
    with sdpa_kernel([BACKENDS[name] for name in allowed], set_priority=True):
        found = Rules((9, 0))._backend(query, query, torch.empty(16, 16) if mask else None)
    assert found is BACKENDS[expected]


def test_a_mask_with_strides_in_its_last_dimension_is_for_the_math_backend() -> None:
    query = torch.empty(2, 4, 16, 64, dtype=torch.bfloat16, device="meta")
    bias = torch.empty(16, 16, 4, dtype=torch.bfloat16).permute(2, 0, 1)[None]  # T5's, as its embedding makes it
    assert Rules((9, 0))._backend(query, query, bias) is BACKENDS["math"]
    assert Rules((9, 0))._backend(query, query, bias.contiguous()) is BACKENDS["cudnn"]


def test_attention_that_no_backend_supports_raises_torchs_error() -> None:
    from torch.nn.attention import sdpa_kernel

    query = torch.empty(2, 4, 16, 64, device="meta")
    with sdpa_kernel(BACKENDS["flash"]), pytest.raises(RuntimeError, match="No available kernel"):
        Rules((9, 0)).attention(query, query, query)


def test_dropout_keeps_a_mask_of_bytes() -> None:
    with simulate_gpu(H200):
        x = torch.ones(8, 8, device="cuda", requires_grad=True)
        out = F.dropout(x, 0.1)
        assert "NativeDropout" in type(out.grad_fn).__name__
        assert torch.nn.Dropout(0.1).eval()(x) is not None
    assert "Dropout" not in type(F.dropout(torch.ones(2, requires_grad=True), 0.0).grad_fn).__name__


def test_torchs_own_python_functions_use_fused_attention() -> None:
    with simulate_gpu(H200), torch.device("cuda"), torch.autocast("cuda", torch.bfloat16):
        layer = torch.nn.MultiheadAttention(64, 2, batch_first=True)
        x = torch.ones(2, 16, 64)
        out, _ = layer(x, x, x, need_weights=False)
        assert out.dtype is torch.bfloat16 and out.shape == x.shape


@pytest.mark.parametrize("recipe", ["bf16", "fp8"])
def test_logits_that_nobody_reads_are_not_part_of_a_forecast(recipe):
    """Also on a machine without CUDA, where autograd ends the process for a tensor on a CUDA device."""
    hf = pytest.importorskip("transformers")
    config = hf.GPT2Config(n_layer=2, n_embd=256, n_head=4, vocab_size=9216, bos_token_id=0, eos_token_id=0)

    def find_logits(loss):
        task = Task(
            model=lambda: hf.GPT2LMHeadModel(config), name="head", loss=loss,
            batch=lambda *_: torch.zeros(8, 512, dtype=torch.long),
        )  # fmt: skip
        traced = trace_steps(task, parse(recipe), H200, compile=False)
        sizes = [piece.bytes for op in traced.trace.ops for piece in op.writes]
        return [size for size in sizes if size >= 4 * 8 * 512 * 9216]  # in FP32

    def own_loss(model, ids):
        return nn.functional.cross_entropy(model(input_ids=ids).logits.flatten(0, 1), ids.flatten())

    assert find_logits(lambda model, ids: model(input_ids=ids).logits.float().square().mean())
    assert not find_logits(own_loss)
    assert not find_logits(lambda model, ids: model(input_ids=ids, labels=ids).loss)
