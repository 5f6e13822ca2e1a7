"""Reference data of the page: the number formats and the GPUs with their datasheet numbers."""

from __future__ import annotations

import math
from typing import Any

from narrowgauge.formats import FORMATS
from narrowgauge.hardware import gpus

REGISTER_BYTES = 65536 * 4
"""Register file of an SM: 64 K registers of 32 bits on compute capabilities 7.0 to 10.0 (CUDA programming guide)."""


def describe_formats() -> dict[str, dict[str, Any]]:
    """Each format's layout and its range in powers of two: zero below ``flush``, overflow above ``most``."""
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


def describe_gpus() -> list[dict[str, Any]]:
    """Each GPU's peaks and its memory hierarchy, from the registers to HBM."""
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
