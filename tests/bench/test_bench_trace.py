"""Traces: kernel names give the kind of work and tensor core use; the profile of a tiny model adds up."""

import gzip
import json
from pathlib import Path

import pytest

from narrowgauge import UsageError
from narrowgauge.bench import trace
from narrowgauge.cli import main
from narrowgauge.recipe import parse

pytestmark = pytest.mark.usefixtures("modules_are_not_collected")

COPY = "at::native::direct_copy_kernel_cuda(at::TensorIteratorBase&)::{lambda()#3}::operator()() const"
FUSED_ADAM = "at::native::(anonymous namespace)::FusedAdamMathFunctor<float, 4, (at::native::ADAM_MODE)1, false>"
NAMES = {
    "nvjet_sm90_qrtst_128x160_128x5_2x1_v_bz_coopA_algo2_TNT": "gemm",
    "nvjet_tst_192x192_64x4_1x2_h_bz_coopB_TNN": "gemm",
    "ampere_sgemm_128x64_tn": "gemm",
    "ampere_bf16_s16816gemm_bf16_128x256_ldg8_f2f_stages_64x3_tn": "gemm",
    "void cutlass::Kernel2<cutlass_80_tensorop_s1688gemm_128x128_32x3_tn_align4>(Params)": "gemm",
    "void cutlass::Kernel2<cutlass_80_simt_sgemm_128x32_8x5_tn_align1>(Params)": "gemm",
    "sm90_xmma_gemm_f32f32_tf32f32_f32_tn_n_tilesize128x128x32_warpgroupsize1x1x1_execute_kernel__5x_cublas": "gemm",
    "sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize32x32x8_stage3_ffma_aligna4_execute_kernel__5x_cublas": "gemm",
    "void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16, float>(Params)": "gemm",
    "triton_tem_fused_mm_3": "gemm",
    "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128_4x1x1_kernel0_0": "attention",
    "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_26_64x64x64_1x4x1_cga1x1x": "attention",
    "void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<Flash_traits<64>>(Params)": "attention",
    "fmha_cutlassF_bf16_aligned_64x64_rf_sm80(PyTorchMemEffAttention::AttentionKernel::Params)": "attention",
    "forward_kernel": "norm",
    "backward_kernel": "norm",
    "sum_kernel": "norm",
    "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<float, float, false>(int, float)": "norm",
    "triton_per_fused__to_copy_add_native_layer_norm_native_layer_norm_backward_12": "norm",
    "pointwise_kernel": "activation",
    "swiglu_backward_kernel": "activation",
    "void at::native::vectorized_elementwise_kernel<4, at::native::GeluCUDAKernelImpl(at::TensorIteratorBase&)>": (
        "activation"
    ),
    "_cast_kernel": "cast",
    "_transpose_kernel": "cast",
    "_max_abs_kernel": "cast",
    f"void at::native::elementwise_kernel<128, 4, at::native::gpu_kernel_impl<{COPY}>>(int, int)": "cast",
    "triton_poi_fused__to_copy_3": "cast",
    "Memcpy DtoD (Device -> Device)": "cast",
    "Memset (Device)": "cast",
    f"void at::native::(anonymous namespace)::multi_tensor_apply_kernel<TensorListMetadata<4>, {FUSED_ADAM}>()": (
        "optimizer"
    ),
    "_adamw_kernel": "optimizer",
    "_squares_kernel": "optimizer",
    "_norms_kernel": "optimizer",
    "statistics_kernel": "loss",
    "grad_logits_fp8_kernel": "loss",
    "void (anonymous namespace)::cunn_SoftMaxForward<4, float, float, LogSoftMaxForwardEpilogue>()": "loss",
    "void at::native::(anonymous namespace)::nll_loss_forward_reduce_cuda_kernel_2d<float, float, long>()": "loss",
    "_stats_kernel": "gauges",
    "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)": "communication",
    "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>(int)": "other",
    "void at::native::elementwise_kernel<128, 2, at::native::BinaryFunctor<float>>(int)": "other",
    "aten::mm": "gemm",
    "aten::addmm": "gemm",
    "aten::mkldnn_convolution": "gemm",
    "aten::convolution_backward": "gemm",
    "aten::_scaled_dot_product_flash_attention_for_cpu": "attention",
    "aten::native_layer_norm_backward": "norm",
    "aten::threshold_backward": "activation",
    "aten::copy_": "cast",
    "narrowgauge::cast_transpose": "cast",
    "aten::_log_softmax_backward_data": "loss",
    "aten::_fused_adamw_": "optimizer",
    "aten::linalg_vector_norm": "optimizer",
    "Optimizer.step#AdamW.step": "optimizer",
    "aten::embedding": "other",
    "autograd::engine::evaluate_function: ConvolutionBackward0": "other",
    "aten::scatter_": "other",
}
PLAIN = ("sgemm", "splitK", "ffma")


@pytest.mark.parametrize("name", NAMES)
def test_name_gives_the_kind_of_work(name):
    assert trace.kind_of(name) == NAMES[name]


@pytest.mark.parametrize("name", [name for name, kind in NAMES.items() if kind in ("gemm", "attention")])
def test_name_shows_whether_tensor_cores_were_used(name):
    if not name.startswith("aten::"):
        assert trace.on_tensor_cores(name) is not any(word in name for word in PLAIN)


def test_gpu_trace_is_summarized_by_kernels(tmp_path):
    events = [
        ("kernel", "nvjet_tst_192x192_64x4_1x2_h_bz_coopB_TNN", 3000),
        ("kernel", "ampere_sgemm_128x64_tn", 1000),
        ("kernel", "forward_kernel", 500),
        ("gpu_memset", "Memset (Device)", 500),
        ("gpu_user_annotation", "Optimizer.step#AdamW.step", 9000),
        ("cpu_op", "aten::mm", 7000),
    ]
    path = tmp_path / "trace.json.gz"
    rows = [{"cat": cat, "name": name, "dur": dur} for cat, name, dur in events]
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": [*rows, {"name": "process_name"}]}).encode()))
    found = trace.summarize(trace.read_kernels(path), 2, path, on_gpu=True)
    assert found.total_ms == 2.5
    assert {kind: share for kind, share in found.shares.items() if share} == {"gemm": 0.8, "norm": 0.1, "cast": 0.1}
    assert found.tensor_cores == 0.75
    assert trace.summarize([], 2, path, on_gpu=True).tensor_cores is None


def test_bench_verb_profiles_a_tiny_model(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["bench", "gpt:1x64", "--batch", "2", "--context", "16", "--device", "cpu", "--steps", "1", "--rounds", "1"]
    assert main([*words, "--recipes", "fp32", "--json", "--profile", "traces"]) == 0
    found = json.loads(capsys.readouterr().out)["profile"]["fp32"]
    assert set(found["shares"]) == set(trace.NAMES)
    assert sum(found["shares"].values()) == pytest.approx(1)
    assert all(found["shares"][kind] > 0 for kind in ("gemm", "attention", "norm", "activation", "loss", "optimizer"))
    assert found["shares"]["communication"] == 0
    assert found["total_ms"] > 0
    assert found["tensor_cores"] is None
    assert Path(found["trace"]) == Path("traces/trace-fp32.json.gz")
    events = json.loads(gzip.decompress(Path(found["trace"]).read_bytes()))["traceEvents"]
    assert any(event.get("name") == "aten::mm" for event in events)
    Path("file").touch()
    assert main([*words, "--recipes", "fp32", "--profile", "file/x.json"]) == 2
    assert capsys.readouterr().err.strip().splitlines()[-1].startswith("narrowgauge: --profile file/x.json: ")
    assert main(["bench", "--profile", "digits"]) == 2
    assert "that is a task" in capsys.readouterr().err


def test_trace_paths():
    lean = parse("bf16[checkpoint=full,keep=a*]")
    assert trace.choose_trace_paths("", "out", [parse("fp32")]) == {parse("fp32"): Path("out/trace-fp32.json.gz")}
    assert trace.choose_trace_paths("", None, [lean]) == {lean: Path("trace-bf16-keep=a-checkpoint=full.json.gz")}
    assert trace.choose_trace_paths("x.json", "out", [lean]) == {lean: Path("x.json")}
    with pytest.raises(UsageError, match="need a folder"):
        trace.choose_trace_paths("x.json", None, [lean, parse("fp32")])
