"""Compares torch.compile options on gpt2-124m in BF16, in one process, three rounds each.

usage: python bench/compile_options.py OPTION...     (default coordinate_descent_tuning max_autotune)
"""

import sys

import torch

from narrowgauge import bench, hardware, tasks
from narrowgauge.recipe import parse

device = hardware.detect()
task = tasks.find("gpt2-124m")
settings = bench.Settings(compile=True, rounds=6, steps=5)
for options in [[], *([name] for name in sys.argv[1:] or ["coordinate_descent_tuning", "max_autotune"]), []]:
    torch._dynamo.reset()
    for name in ("coordinate_descent_tuning", "max_autotune"):
        setattr(torch._inductor.config, name, name in options)
    rows = bench.measure(task, [parse("bf16")], [], device, settings, lambda line: None)
    row = rows[0]
    spread = f"{row.step_ms_low:.2f}-{row.step_ms_high:.2f}"
    print(f"{'+'.join(options) or 'default':40s} {row.step_ms:8.2f} ms  ({spread})", flush=True)
