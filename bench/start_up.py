"""Where the time goes from making a model to its second step, with empty and with filled caches of kernels.

usage: python bench/start_up.py [TASK...] [recipe=fp8]     (default gpt2-124m gpt:8x4096; JSON to $OUT/start-up.json)

Each task runs twice in processes of its own that share a folder for Triton's compiled kernels, empty at first. Times:

    import    narrowgauge and torch
    weights   the model is made on the GPU
    engine    Engine(...): blocks are recognized and verified, layers converted
    step 1    compiles kernels, and chooses algorithms of matrix products
    step 2    with FP8, the first step whose scales are known
    step 3    for comparison

and, as part of these: kernels that Triton compiled or loaded, and products whose algorithms were timed.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

LIMIT_S = 150


def run(spec: str, recipe: str) -> dict[str, float]:
    begin = time.perf_counter()
    found: dict[str, float] = {}

    def lap(name: str) -> None:
        nonlocal begin
        if "torch" in sys.modules and torch.cuda.is_initialized():
            torch.cuda.synchronize()
        found[name] = time.perf_counter() - begin
        print(f"  {name:8s} {found[name]:6.2f} s", flush=True)
        begin = time.perf_counter()

    import torch
    import triton

    from narrowgauge import Engine, tasks
    from narrowgauge.kernels import cublas

    lap("import")
    spent = {"kernels": [0, 0.0], "algorithms": [0, 0.0]}

    def timed(name: str, function):
        def call(*args, **kwargs):
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                spent[name][0] += 1
                spent[name][1] += time.perf_counter() - start

        return call

    triton.compiler.compile = timed("kernels", triton.compiler.compile)
    cublas._choose_algorithm = timed("algorithms", cublas._choose_algorithm)
    torch.zeros(1, device="cuda")
    lap("cuda")
    task = tasks.find(spec)
    batches = [tuple(tensor.cuda() for tensor in task.batch(number, "train")) for number in range(2)]
    lap("data")
    with torch.device("cuda"):
        model = task.model()
    lap("weights")
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=True)
    engine = Engine(model, optimizer, recipe, clip_norm=1.0)
    lap("engine")
    for number in range(1, 5):
        with engine.forward():
            loss = task.loss(engine.model, batches[number % 2])
        engine.backward(loss)
        engine.step()
        lap(f"step {number}")
    for name, (count, seconds) in spent.items():
        print(f"  {name}: {count} in {seconds:.2f} s", flush=True)
        found |= {name: count, f"{name} seconds": seconds}
    found["to step 2"] = found["engine"] + found["step 1"] + found["step 2"]
    print(f"  Engine to the end of step 2: {found['to step 2']:.1f} s", flush=True)
    return found


def main() -> None:
    recipe = next((word.partition("=")[2] for word in sys.argv[1:] if word.startswith("recipe=")), "fp8")
    names = [word for word in sys.argv[1:] if "=" not in word] or ["gpt2-124m", "gpt:8x4096"]
    results: dict[str, dict[str, float]] = {}
    for name in names:
        with tempfile.TemporaryDirectory() as cache:
            for how in ("cold", "warm"):
                print(f"{name} {recipe}, {how}", flush=True)
                path = Path(cache) / "times.json"
                environment = {**os.environ, "TRITON_CACHE_DIR": f"{cache}/triton", "TIMES": str(path)}
                command = [sys.executable, "-u", __file__, "--run", name, recipe]
                subprocess.run(command, env=environment, timeout=LIMIT_S, check=False)
                if path.exists():
                    results[f"{name} {how}"] = json.loads(path.read_text())
                    path.unlink()
        if os.environ.get("OUT"):
            (Path(os.environ["OUT"]) / "start-up.json").write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--run"]:
        Path(os.environ["TIMES"]).write_text(json.dumps(run(*sys.argv[2:4])))
    else:
        main()
