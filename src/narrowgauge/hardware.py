"""What GPUs can do according to their datasheets, and which device this machine has.

The table is data (``hardware.toml``). A GPU that is not in it is reported as unknown (``Device.gpu`` is None), never
guessed. Its native formats are still known, as they follow from its compute capability.
"""

from __future__ import annotations

import contextlib
import functools
import os
import platform
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from narrowgauge.errors import UsageError

COMPUTE_FORMATS = ("fp32", "tf32", "fp16", "bf16", "fp8")
"""The formats of matrix products; both FP8 formats run at the same speed."""

CPU_FEATURES = (
    "amx_bf16",
    "amx_fp16",
    "avx512_bf16",
    "avx512_fp16",
    "avx512f",
    "avx2",
    "bf16",
    "i8mm",
    "sve",
    "asimdhp",
)
"""The flags of /proc/cpuinfo that concern matrix products, the most significant first."""

_ARM_PARTS = {
    ("0x41", "0xd0c"): "Neoverse-N1", ("0x41", "0xd40"): "Neoverse-V1", ("0x41", "0xd49"): "Neoverse-N2",
    ("0x41", "0xd4f"): "Neoverse-V2", ("0x41", "0xd84"): "Neoverse-V3", ("0x41", "0xd08"): "Cortex-A72",
    ("0xc0", "0xac3"): "Ampere-1",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Node:
    """The usual node of a GPU. Rates are bytes per second of one GPU, in one direction."""

    gpus: int
    """GPUs per node."""
    linked: int
    """How many of them NVLink connects; 0 without it."""
    pcie: float
    """The rate of PCIe."""
    network: float
    """Its share of the node's network cards."""
    source: str
    """Where the figures come from."""


@dataclass(frozen=True, kw_only=True)
class Interconnect:
    """The fractions of those rates that collectives reach, and the latencies of a ring."""

    nvlink_share: Mapping[str, float] = field(hash=False)
    """By architecture."""
    pcie_share: float
    """The fraction that PCIe reaches."""
    network_share: float
    """The fraction that the network reaches."""
    start_s: float
    """Seconds to start a collective."""
    nvlink_hop_s: float
    """Seconds of latency per step of a ring over NVLink."""
    pcie_hop_s: float
    """The same over PCIe."""
    network_hop_s: float
    """The same over the network."""
    source: str
    """Where the figures come from."""


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """A GPU's datasheet. Peaks are dense, with FP32 accumulation."""

    name: str
    """The name in the table, such as "H200"."""
    aliases: tuple[str, ...]
    """Other names that ``find_gpu`` accepts."""
    architecture: str
    """NVIDIA's name of the architecture, such as "Hopper"."""
    capability: tuple[int, int]
    """CUDA's compute capability."""
    memory_bytes: int
    """Nominal memory; a process can use a little less."""
    bandwidth: float
    """Memory bandwidth in bytes per second."""
    l2_bytes: int
    """Size of the L2 cache."""
    sms: int
    """Number of streaming multiprocessors."""
    shared_memory_bytes: int
    """The most shared memory per SM that a kernel can use."""
    nvlink: float | None
    """Bytes per second to other GPUs, sum of both directions; None without NVLink."""
    peaks: Mapping[str, float] = field(hash=False)
    """FLOP/s by compute format; a format that is absent is not supported."""
    dense: bool
    """Whether the datasheet gives the peaks as dense; if not, they were halved."""
    source: str
    """The datasheet, with its date."""
    note: str
    """Anything else to know about the figures."""
    node: Node
    """The usual node of this GPU."""

    def peak(self, format: str) -> float:
        """The dense peak of a format in FLOP/s.

        Raises:
            UsageError: The format is unknown, or the GPU does not support it.
        """
        key = _compute_format(format)
        if key not in self.peaks:
            raise UsageError(f"{self.name} has no peak for {format}: it computes in {', '.join(self.peaks)}")
        return self.peaks[key]

    def ridge(self, format: str) -> float:
        """The ridge point of a format: the FLOPs per byte above which arithmetic bounds a kernel, not memory."""
        return self.peak(format) / self.bandwidth


@dataclass(frozen=True, kw_only=True)
class Device:
    """A device of this machine."""

    kind: str
    """cuda or cpu."""
    name: str
    """The name that the driver or the system reports."""
    torch_device: str
    """What torch calls it: "cpu" or "cuda:0"."""
    capability: tuple[int, int] | None
    """CUDA's compute capability; None for a CPU."""
    memory_bytes: int | None
    """The most memory that a process can use; None where the system does not report it."""
    native: tuple[str, ...]
    """The compute formats whose matrix products the hardware runs at full speed."""
    gpu: Gpu | None
    """Its datasheet; None for a CPU and for a GPU that is not in the table."""
    features: tuple[str, ...]
    """CPU instructions for matrix products, by the system's names."""


@functools.cache
def gpus() -> tuple[Gpu, ...]:
    """All GPUs of the table."""
    return tuple(_make_gpu(entry) for entry in _table()["gpu"])


@functools.cache
def interconnect() -> Interconnect:
    """The table's figures for links between GPUs."""
    return Interconnect(**_table()["interconnect"])


def _table() -> dict[str, Any]:
    return tomllib.loads(resources.files("narrowgauge").joinpath("hardware.toml").read_text(encoding="utf-8"))


def find_gpu(name: str) -> Gpu:
    """Find a GPU of the table by name.

    Args:
        name: As people write it ("h200", "A100 80GB") or as CUDA does ("NVIDIA A100-SXM4-80GB").

    Raises:
        UsageError: The GPU is not in the table.
    """
    found = lookup_gpu(name)
    if found is None:
        raise UsageError(f"unknown GPU {name!r}: expected one of {', '.join(gpu.name for gpu in gpus())}")
    return found


def lookup_gpu(name: str) -> Gpu | None:
    """Like ``find_gpu``, but returns None for a GPU that is not in the table."""
    return _gpus_by_key().get(_gpu_key(name))


def native_on_gpu(capability: tuple[int, int]) -> tuple[str, ...]:
    """The formats that tensor cores of a compute capability multiply at full speed.

    FP16 from 7.0, TF32 and BF16 from 8.0, FP8 from 8.9.
    """
    formats = {"fp32": (0, 0), "tf32": (8, 0), "fp16": (7, 0), "bf16": (8, 0), "fp8": (8, 9)}
    return tuple(name for name, least in formats.items() if capability >= least)


def native_on_cpu(features: tuple[str, ...]) -> tuple[str, ...]:
    """The formats that a CPU with these features multiplies at full speed.

    ARM's asimdhp (FP16 vectors) does not count: with it torch 2.13 multiplies FP16 at 0.2 GFLOP/s and FP32 at 64 (256 x
    256, Neoverse-N1).
    """
    bf16 = {"amx_bf16", "avx512_bf16", "bf16"}.intersection(features)
    fp16 = {"amx_fp16", "avx512_fp16"}.intersection(features)
    return ("fp32", *(["fp16"] if fp16 else []), *(["bf16"] if bf16 else []))


def read_cpuinfo(text: str) -> tuple[str | None, tuple[str, ...]]:
    """Read the name and features of a CPU from the text of /proc/cpuinfo, x86 or ARM."""
    fields: dict[str, str] = {}
    for line in text.splitlines():
        key, colon, value = line.partition(":")
        if colon:
            fields.setdefault(key.strip().lower(), value.strip())
    flags = set((fields.get("flags") or fields.get("features") or "").split())
    name = fields.get("model name")
    if name is None and "cpu part" in fields:
        implementer, part = fields.get("cpu implementer", "?"), fields["cpu part"]
        name = _ARM_PARTS.get((implementer, part), f"ARM CPU (implementer {implementer}, part {part})")
    return name, tuple(feature for feature in CPU_FEATURES if feature in flags)


_assumed: Device | None = None


@contextlib.contextmanager
def assume(device: Device) -> Iterator[None]:
    """Let ``detect`` return this GPU inside the context, whatever the machine has."""
    global _assumed
    before, _assumed = _assumed, device
    try:
        yield
    finally:
        _assumed = before


def is_assumed() -> bool:
    """Whether the GPU is only assumed to be in this machine, so that nothing can be measured on it."""
    return _assumed is not None


def detect(device: str | None = None) -> Device:
    """Describe a device of this machine.

    Args:
        device: cpu, cuda or cuda:N. None: the GPU if there is one, otherwise the CPU.

    Returns:
        The device. Inside of ``assume`` it is the assumed GPU, unless ``device`` is cpu.

    Raises:
        UsageError: ``device`` is not a valid name, or this machine does not have it.
    """
    text = device.strip().lower() if device is not None else None
    if text is not None and not re.fullmatch(r"cpu(:0)?|cuda(:\d+)?", text):
        raise UsageError(f"unknown device {device!r}: expected cpu, cuda or cuda:N")
    if text and text.startswith("cpu"):
        return _cpu()
    if _assumed is not None:
        return _assumed
    import torch

    if not torch.cuda.is_available():
        if text is None:
            return _cpu()
        why = "this PyTorch was built without CUDA" if torch.version.cuda is None else "PyTorch finds no CUDA GPU"
        raise UsageError(f"device {device!r} does not exist: {why}; omit --device or use cpu")
    count = torch.cuda.device_count()
    index = int(text.partition(":")[2]) if text and ":" in text else torch.cuda.current_device()
    if index >= count:
        raise UsageError(
            f"device {device!r} does not exist: this machine has cuda:0{f' to cuda:{count - 1}' * (count > 1)}"
        )
    properties = torch.cuda.get_device_properties(index)
    # ROCm reports as "cuda" too, but its capability numbers mean something else, so they are not used.
    nvidia = torch.version.hip is None
    return describe_gpu(
        properties.name, index, (properties.major, properties.minor) if nvidia else None, properties.total_memory
    )


def describe_gpu(name: str, index: int, capability: tuple[int, int] | None, memory_bytes: int) -> Device:
    """Make the ``Device`` of a GPU from what CUDA reports about it.

    Args:
        name: The GPU's name.
        index: Its number among the visible GPUs.
        capability: Its compute capability, or None if unknown.
        memory_bytes: Its memory.

    Returns:
        The device, with the datasheet of the GPU if the table has it.
    """
    return Device(
        kind="cuda",
        name=name,
        torch_device=f"cuda:{index}",
        capability=capability,
        memory_bytes=memory_bytes,
        native=native_on_gpu(capability) if capability else ("fp32",),
        gpu=lookup_gpu(name),
        features=(),
    )


def _cpu() -> Device:
    path = Path("/proc/cpuinfo")  # only on Linux: elsewhere the features are unknown, and FP32 is native
    name, features = read_cpuinfo(path.read_text(errors="replace")) if path.is_file() else (None, ())
    return Device(
        kind="cpu",
        name=name or platform.processor() or platform.machine() or "unknown CPU",
        torch_device="cpu",
        capability=None,
        memory_bytes=_host_memory_bytes(),
        native=native_on_cpu(features),
        gpu=None,
        features=features,
    )


def _host_memory_bytes() -> int | None:
    """Memory of the machine, or of the container where that is less; None where the system does not report it."""
    sizes = []
    try:
        sizes.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    except (AttributeError, ValueError, OSError):  # Windows has no sysconf, and some systems lack these names
        return None
    for limit in (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes")):
        try:
            sizes.append(int(limit.read_text()))
        except (OSError, ValueError):  # no container, or "max": no limit
            continue
    return min(sizes)


def _compute_format(format: str) -> str:
    key = "fp8" if format.startswith("fp8") else format
    if key not in COMPUTE_FORMATS:
        raise UsageError(f"unknown compute format {format!r}: expected one of {', '.join(COMPUTE_FORMATS)}")
    return key


def _make_gpu(entry: dict[str, Any]) -> Gpu:
    return Gpu(
        name=entry["name"],
        aliases=tuple(entry["aliases"]),
        architecture=entry["architecture"],
        capability=(entry["capability"][0], entry["capability"][1]),
        memory_bytes=entry["memory_bytes"],
        bandwidth=entry["bandwidth"],
        l2_bytes=entry["l2_bytes"],
        sms=entry["sms"],
        shared_memory_bytes=entry["shared_memory_bytes"],
        nvlink=entry.get("nvlink"),
        peaks=dict(entry["peak"]),
        dense=entry["dense"],
        source=entry["source"],
        note=entry.get("note", ""),
        node=Node(**{"linked": 0, **entry["node"]}, source=entry["node_source"]),
    )


@functools.cache
def _gpus_by_key() -> dict[str, Gpu]:
    return {_gpu_key(name): gpu for gpu in gpus() for name in (gpu.name, *gpu.aliases)}


def _gpu_key(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower()).removeprefix("nvidia")
