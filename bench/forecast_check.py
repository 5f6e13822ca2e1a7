"""Measures the peak memory and the step time of a T5 and of a mixture of experts next to their forecasts.

    python bench/forecast_check.py [--models t5,moe] [--recipes bf16,fp8]

Few layers of real widths, random weights, eager. Takes less than two minutes on an H200. Results are printed line by
line, and written to $OUT/forecast-check.json if OUT is set. Without a GPU only the forecasts are printed.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import torch

from narrowgauge import hardware
from narrowgauge.forecast.memory.estimate import predict_memory
from narrowgauge.forecast.run import Scenario
from narrowgauge.forecast.time.measure import measure_run
from narrowgauge.forecast.time.reachable_rates import ReachableRates
from narrowgauge.forecast.time.roofline import predict_time
from narrowgauge.recipe import parse
from narrowgauge.tasks import user_model

MODELS: dict[str, tuple[str, dict[str, Any], int, int]] = {
    # T5-large's widths: 1024, 16 heads of 64, feed-forward 4096
    "t5": (
        "transformers:T5ForConditionalGeneration",
        {"d_model": 1024, "d_ff": 4096, "d_kv": 64, "num_heads": 16, "num_layers": 6, "num_decoder_layers": 6},
        16,
        512,
    ),
    # Qwen3-30B-A3B's widths, two of its 48 layers, 64 of its 128 experts
    "moe": (
        "transformers:Qwen3MoeForCausalLM",
        {
            "hidden_size": 2048, "moe_intermediate_size": 768, "num_experts": 64, "num_experts_per_tok": 8,
            "num_hidden_layers": 2, "num_attention_heads": 32, "num_key_value_heads": 4,
            "vocab_size": 32000,
        },
        8,
        1024,
    ),
}  # fmt: skip


def check(name: str, recipe: str, gpu: hardware.Gpu, device: hardware.Device) -> dict[str, Any]:
    """Predict, and measure where there is a GPU."""
    spec, fields, rows, tokens = MODELS[name]
    task = user_model.make_task(spec, fields, rows, tokens, small=False)
    traced = Scenario(task=task, gpu=gpu, compile=False).trace(parse(recipe))
    memory, roofline = predict_memory(traced), predict_time(traced, ReachableRates(gpu))
    found: dict[str, Any] = {
        "model": name, "recipe": recipe, "parameters": traced.parameters, "predicted_bytes": memory.total,
        "first_step_bytes": memory.first_step, "components": memory.components(), "when": str(memory.when),
        "predicted_ms": roofline.step_ms, "by_kind": roofline.by_kind, "notes": [*memory.notes, *roofline.notes],
    }  # fmt: skip
    print(f"{name} {recipe}: predicted {memory.total / 1e9:.3f} GB, {roofline.step_ms:.1f} ms", flush=True)
    if device.kind == "cuda":
        torch.cuda.empty_cache()
        measured = measure_run(task, parse(recipe), device, compile=False)
        found |= {
            "measured_bytes": measured.peak_bytes,
            "measured_ms": measured.step_ms,
            "memory_error": memory.total / measured.peak_bytes - 1,
            "time_error": roofline.step_ms / measured.step_ms - 1,
        }
        print(
            f"  measured {measured.peak_bytes / 1e9:.3f} GB ({found['memory_error']:+.2%}), "
            f"{measured.step_ms:.1f} ms ({found['time_error']:+.1%})",
            flush=True,
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--recipes", default="bf16,fp8")
    args = parser.parse_args()
    device = hardware.detect(None)
    gpu = device.gpu or hardware.find_gpu("h200")
    start, rows = time.monotonic(), []
    for name in args.models.split(","):
        for recipe in args.recipes.split(","):
            try:
                rows.append(check(name, recipe, gpu, device))
            except Exception as error:  # the other cases still run
                rows.append({"model": name, "recipe": recipe, "failed": f"{type(error).__name__}: {error}"[:500]})
                print(f"{name} {recipe}: failed: {rows[-1]['failed']}", flush=True)
            if os.environ.get("OUT"):
                text = json.dumps({"gpu": gpu.name, "torch": torch.__version__, "rows": rows}, indent=1)
                Path(os.environ["OUT"], "forecast-check.json").write_text(text + "\n")
    print(f"{time.monotonic() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
