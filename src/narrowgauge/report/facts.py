"""What the page knows beside the runs: the number formats and the GPUs of the datasheets, as data for its script."""

from __future__ import annotations

import math
from typing import Any

from narrowgauge.formats import FORMATS
from narrowgauge.hardware import gpus

REGISTER_BYTES = 65536 * 4
"""Registers of an SM: 64 K of 32 bits on every compute capability from 7.0 to 10.0 (CUDA programming guide)."""


def formats() -> dict[str, dict[str, Any]]:
    """Each format's layout, and its window in powers of two: below ``flush`` zero, above ``most`` too large."""
    return {
        name: {
            "title": f.title,
            "exponent_bits": f.exponent_bits,
            "mantissa_bits": f.mantissa_bits,
            "bias": f.bias,
            "has_inf": f.has_inf,
            "bits": f.bits,
            "storage_bits": f.storage_bits,
            "max": f.max,
            "about": f.about,
            "flush": math.log2(f.smallest_subnormal) - 1,
            "normal": math.log2(f.smallest_normal),
            "most": math.log2(f.max),
        }
        for name, f in FORMATS.items()
    }


def machines() -> list[dict[str, Any]]:
    """Each GPU's roofs and its memories, from the registers outwards."""
    return [
        {
            "name": gpu.name,
            "aliases": list(gpu.aliases),
            "architecture": gpu.architecture,
            "memory_bytes": gpu.memory_bytes,
            "bandwidth": gpu.bandwidth,
            "l2_bytes": gpu.l2_bytes,
            "sms": gpu.sms,
            "shared_bytes": gpu.shared_memory_bytes * gpu.sms,
            "register_bytes": REGISTER_BYTES * gpu.sms,
            "nvlink": gpu.nvlink,
            "peaks": dict(gpu.peaks),
            "source": gpu.source,
            "note": gpu.note,
        }
        for gpu in gpus()
    ]
