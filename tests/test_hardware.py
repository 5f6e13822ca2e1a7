"""The table of GPUs is consistent, and devices are recognized from what the system reports."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from narrowgauge import hardware
from narrowgauge.errors import UsageError
from narrowgauge.hardware import describe_gpu, detect, find_gpu, gpus, native_on_cpu, native_on_gpu, read_cpuinfo

AMX = """processor\t: 0
vendor_id\t: GenuineIntel
model name\t: Intel(R) Xeon(R) Platinum 8481C CPU @ 2.70GHz
flags\t\t: fpu vme avx2 avx512f avx512_bf16 avx512_fp16 amx_bf16 amx_tile amx_int8

processor\t: 1
model name\t: a second core, which is ignored
flags\t\t: fpu
"""
ZEN4 = "model name\t: AMD EPYC 9654\nflags\t\t: fpu avx2 avx512f avx512_bf16\n"
HASWELL = "model name\t: Intel(R) Xeon(R) CPU E5-2690 v3\nflags\t\t: fpu avx2 f16c\n"
NEOVERSE_N1 = "processor\t: 0\nFeatures\t: fp asimd fphp asimdhp asimddp\nCPU implementer\t: 0x41\nCPU part\t: 0xd0c\n"
NEOVERSE_V2 = "Features\t: fp asimd asimdhp sve i8mm bf16\nCPU implementer\t: 0x41\nCPU part\t: 0xd4f\n"
STRANGE_ARM = "Features\t: fp asimd\nCPU implementer\t: 0x99\nCPU part\t: 0x123\n"


@pytest.mark.parametrize(
    ("name", "ridge"),
    [("A100-80GB", 153), ("H100", 295), ("H200", 206), ("V100", None), ("T4", None)],
)
def test_bf16_ridge_points(name: str, ridge: float | None) -> None:
    gpu = find_gpu(name)
    if ridge is None:
        with pytest.raises(UsageError, match="has no peak for bf16"):
            gpu.ridge("bf16")
    else:
        assert gpu.ridge("bf16") == pytest.approx(ridge, abs=0.6)


@pytest.mark.parametrize("gpu", gpus(), ids=lambda gpu: gpu.name)
def test_each_entry_is_plausible(gpu: hardware.Gpu) -> None:
    assert gpu.dense and gpu.source
    assert set(gpu.peaks) == set(native_on_gpu(gpu.capability))  # a peak for every native format, and for no other
    assert 15 * 2**30 < gpu.memory_bytes < 300 * 2**30 and gpu.memory_bytes % 2**30 == 0
    assert 2e11 < gpu.bandwidth < 1e13
    assert 4 * 2**20 <= gpu.l2_bytes < 2**28 and 40 <= gpu.sms <= 160
    # Per SM and clock a tensor core generation does a fixed number of FLOPs; a sparse figure would be twice that.
    ratios = {"fp16": gpu.peaks["fp16"] / gpu.peaks["fp32"], "fp8": gpu.peaks.get("fp8", 0) / gpu.peaks["fp16"]}
    assert 1.9 < ratios["fp16"] < (32 if gpu.capability[0] == 10 else 17)
    if "bf16" in gpu.peaks:
        assert gpu.peaks["bf16"] == gpu.peaks["fp16"]
        assert gpu.peaks["tf32"] * 2 == pytest.approx(gpu.peaks["fp16"], rel=0.03)
    if "fp8" in gpu.peaks:
        assert ratios["fp8"] == pytest.approx(2, rel=0.03)


@pytest.mark.parametrize("gpu", gpus(), ids=lambda gpu: gpu.name)
def test_each_node_is_plausible_and_names_its_source(gpu: hardware.Gpu) -> None:
    node = gpu.node
    assert node.gpus in (4, 8) and node.linked in (0, 2, 8) and bool(node.linked) == (gpu.nvlink is not None)
    assert node.pcie in (15.75e9, 31.5e9, 63e9) and 3e9 < node.network <= 50e9
    assert "datasheet" in node.source or node.source.startswith("assumed")
    assert gpu.architecture in hardware.interconnect().nvlink_share or gpu.nvlink is None


def test_links_reach_less_than_their_rates_and_hops_take_microseconds() -> None:
    links = hardware.interconnect()
    assert all(0.5 < share <= 1 for share in (*links.nvlink_share.values(), links.pcie_share, links.network_share))
    assert 1e-6 < links.nvlink_hop_s < links.pcie_hop_s < links.network_hop_s < 2e-5 and links.start_s < 2e-5
    assert "NCCL" in links.source and "assumed" in links.source


def test_dense_peaks_that_are_often_quoted_wrong() -> None:
    for name in ("H100 SXM", "H200"):
        assert find_gpu(name).peak("tf32") == 494.7e12
        assert find_gpu(name).peak("fp8_e4m3") == find_gpu(name).peak("fp8") == 1978.9e12
    assert find_gpu("RTX 4090").peak("fp16") == 165.2e12  # with FP32 accumulation; 330 is with FP16 accumulation
    with pytest.raises(UsageError, match="unknown compute format 'int8'"):
        find_gpu("H200").peak("int8")


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("NVIDIA H200", "H200"),
        ("h200", "H200"),
        ("NVIDIA A100-SXM4-80GB", "A100-SXM4-80GB"),
        ("NVIDIA A100 80GB PCIe", "A100 80GB PCIe"),
        ("a100 40gb", "A100-SXM4-40GB"),
        ("NVIDIA H100 80GB HBM3", "H100 SXM"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("Tesla V100-SXM2-32GB", "V100-SXM2-32GB"),
        ("Tesla T4", "T4"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("rtx_3090", "RTX 3090"),
        ("NVIDIA B200", "B200"),
        ("NVIDIA L40S", "L40S"),
    ],
)
def test_gpus_are_found_by_common_names_and_by_cuda_names(given: str, name: str) -> None:
    assert find_gpu(given).name == name


def test_names_are_unambiguous_and_the_table_hashes() -> None:
    keys = [hardware._gpu_key(name) for gpu in gpus() for name in {gpu.name, *gpu.aliases}]
    assert len(keys) == len(set(keys))
    assert len(set(gpus())) == len(gpus())


@pytest.mark.parametrize("given", ["NVIDIA H100 NVL", "NVIDIA A10G", "RTX 5090", "H2000", ""])
def test_an_unknown_gpu_is_not_guessed(given: str) -> None:
    with pytest.raises(UsageError, match=r"unknown GPU .*expected one of .*H200"):
        find_gpu(given)
    device = describe_gpu(given, 1, (9, 0), 94 * 2**30)
    assert device.gpu is None and device.torch_device == "cuda:1"
    assert device.native == ("fp32", "tf32", "fp16", "bf16", "fp8")


@pytest.mark.parametrize(
    ("capability", "native"),
    [
        ((6, 1), ("fp32",)),
        ((7, 0), ("fp32", "fp16")),
        ((7, 5), ("fp32", "fp16")),
        ((8, 0), ("fp32", "tf32", "fp16", "bf16")),
        ((8, 6), ("fp32", "tf32", "fp16", "bf16")),
        ((8, 9), ("fp32", "tf32", "fp16", "bf16", "fp8")),
        ((9, 0), ("fp32", "tf32", "fp16", "bf16", "fp8")),
        ((12, 0), ("fp32", "tf32", "fp16", "bf16", "fp8")),
    ],
)
def test_native_formats_follow_from_the_capability(capability: tuple[int, int], native: tuple[str, ...]) -> None:
    assert native_on_gpu(capability) == native


def test_a_gpu_without_a_capability_has_only_fp32() -> None:
    assert describe_gpu("AMD Instinct MI300X", 0, None, 2**37).native == ("fp32",)


@pytest.mark.parametrize(
    ("text", "name", "features", "native"),
    [
        (AMX, "Intel(R) Xeon(R) Platinum 8481C CPU @ 2.70GHz", ("amx_bf16", "avx512_bf16"), ("fp32", "fp16", "bf16")),
        (ZEN4, "AMD EPYC 9654", ("avx512_bf16",), ("fp32", "bf16")),
        (HASWELL, "Intel(R) Xeon(R) CPU E5-2690 v3", ("avx2",), ("fp32",)),
        (NEOVERSE_N1, "Neoverse-N1", ("asimdhp",), ("fp32",)),
        (NEOVERSE_V2, "Neoverse-V2", ("bf16", "sve"), ("fp32", "bf16")),
        (STRANGE_ARM, "ARM CPU (implementer 0x99, part 0x123)", (), ("fp32",)),
        ("", None, (), ("fp32",)),
    ],
)
def test_cpus_are_read_from_cpuinfo(text: str, name: str | None, features: tuple[str, ...], native: tuple[str]) -> None:
    found_name, found = read_cpuinfo(text)
    assert found_name == name
    assert set(features) <= set(found)
    assert native_on_cpu(found) == native


def test_detect_describes_this_machines_cpu() -> None:
    device = detect("cpu")
    assert (device.kind, device.torch_device, device.capability, device.gpu) == ("cpu", "cpu", None, None)
    assert device.name and device.native[0] == "fp32"
    assert device.memory_bytes is None or device.memory_bytes > 2**28
    assert dataclasses.replace(device) == device and hash(device) == hash(detect("CPU"))
    if not torch.cuda.is_available():
        assert detect() == device


@pytest.mark.parametrize("name", ["tpu", "cuda:x", "mps", "", "cuda:-1", "cuda:999"])
def test_a_device_that_does_not_exist_is_rejected(name: str) -> None:
    with pytest.raises(UsageError, match=r"unknown device|does not exist"):
        detect(name)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_cuda_without_a_gpu_is_rejected() -> None:
    with pytest.raises(UsageError, match=r"device 'cuda' does not exist: .*use cpu"):
        detect("cuda")
