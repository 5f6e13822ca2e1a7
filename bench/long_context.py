"""Measures steps of transformers' Llama-3.1-8B on long sequences in fp8-lean: predicted and measured peaks, tokens/s.

usage: python bench/long_context.py [T=16384,65536,131072] [layers=32] [budget=240] [variants=tiles,offload,plain]

    plain      the MLP in one piece, and large chunks of logits
    tiles      the default: MLP and head in tiles and small chunks, where a sequence is long enough
    offload    the same with offload=activations

One process, one engine, batch 1, random weights and tokens. A part that would exceed the budget, in seconds, is left
out: its time is estimated by that of an earlier one. Predictions are made meanwhile by processes without the GPU.
JSON goes to $OUT/long-context.json where OUT is set, after each part.
"""

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

BEGIN = time.perf_counter()
os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")  # sizes differ from part to part

import torch  # noqa: E402

from narrowgauge.nn.fused import head, tiles  # noqa: E402

VOCABULARY = 128256
options = {"T": "16384,65536,131072", "layers": "32", "budget": "240", "variants": "tiles,offload,plain", "predict": ""}
for argument in sys.argv[1:]:
    name, equals, value = argument.partition("=")
    if name not in options or not equals:
        sys.exit(f"{argument}: expected NAME=VALUE with a name of {', '.join(options)}")
    options[name] = value
LENGTHS = [int(length) for length in options["T"].split(",")]
LAYERS, BUDGET, VARIANTS = int(options["layers"]), float(options["budget"]), options["variants"].split(",")
SETTINGS = (tiles.TILE_BYTES, head.CHUNK_BYTES)
CONFIG = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": LAYERS, "num_attention_heads": 32,
    "num_key_value_heads": 8, "vocab_size": VOCABULARY, "max_position_embeddings": max(LENGTHS), "use_cache": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
}  # fmt: skip


def say(*words):
    print(f"[{time.perf_counter() - BEGIN:5.0f} s]", *words, flush=True)


def set_variant(variant):
    """Choose whether there are tiles."""
    tiles.TILE_BYTES, head.CHUNK_BYTES = (1 << 60, head.WIDE_CHUNK_BYTES) if variant == "plain" else SETTINGS


def predict(length, variant):
    """Return the predicted peak, and the bytes that go to the host."""
    from narrowgauge import hardware
    from narrowgauge.forecast.run import Scenario
    from narrowgauge.recipe import parse
    from narrowgauge.tasks import user_model

    set_variant(variant)
    recipe = "fp8-lean[offload=activations]" if variant == "offload" else "fp8-lean"
    fields = {name: value for name, value in CONFIG.items() if name != "rope_parameters"}
    task = user_model.make_task("transformers:LlamaForCausalLM", fields, 1, length, small=False)
    memory = Scenario(task=task, gpu=hardware.find_gpu("h200")).predict_memory(parse(recipe))
    return {"peak": memory.total, "host": memory.host, "when": str(memory.when)}


def start_predictions():
    """Predict each part in a process of its own, without a GPU."""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    found = {}
    for length in LENGTHS:
        for variant in VARIANTS:
            command = [sys.executable, __file__, f"T={length}", f"layers={LAYERS}", f"predict={variant}"]
            found[length, variant] = subprocess.Popen(
                command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
            )
    return found


def read_prediction(process):
    """Return what a process predicted, or None if it failed."""
    output, _ = process.communicate()
    return json.loads(output.splitlines()[-1]) if process.returncode == 0 else None


def make_engine():
    import transformers

    import narrowgauge

    torch.manual_seed(0)
    with torch.device("cuda"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**CONFIG)).train()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-5, fused=True)
    return narrowgauge.Engine(model, optimizer, "fp8-lean", clip_norm=1.0)


def set_offload(engine, wanted):
    from narrowgauge.nn.fused.modules import FusedBlock
    from narrowgauge.nn.module_changes import find_change

    for module in engine.inner.modules():
        change = find_change(module, FusedBlock)
        if change is not None:
            change.plan = replace(change.plan, offload=wanted)


def run_step(engine, ids):
    with engine.forward():
        loss = engine.model(input_ids=ids, labels=ids, use_cache=False).loss
    engine.backward(loss)
    engine.step()
    return loss.detach()


def count_steps(length):
    """Return how many steps run before those that are timed, and how many of these."""
    return (1, 3) if length <= 32768 else (0, 1)


def warm_up(engine, ids, variant):
    """Run a step of the first layer alone, which times the products of this length, and pin host memory."""
    config = engine.inner.config
    layers, config.num_hidden_layers = config.num_hidden_layers, 1
    run_step(engine, ids)
    config.num_hidden_layers = layers
    if variant == "offload":
        from narrowgauge.nn.fused import offload

        pool = offload._get_offloader(ids.device, False).pool
        pool.give_back(pool.take(layers * ids.numel() * 4096 * 2))
    torch.cuda.synchronize()


def measure(engine, length, variant):
    """Return seconds, peak and loss of a step; the peak is that of all steps at this length."""
    set_variant(variant)
    set_offload(engine, variant == "offload")
    torch.cuda.empty_cache()
    ids = torch.randint(0, 4096, (1, length), generator=torch.Generator().manual_seed(1)).cuda()
    rest, timed = count_steps(length)
    begin = time.perf_counter()
    warm_up(engine, ids, variant)
    warmed = time.perf_counter() - begin
    torch.cuda.reset_peak_memory_stats()
    for _ in range(rest):
        run_step(engine, ids)
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(timed):
        loss = run_step(engine, ids)
    torch.cuda.synchronize()
    seconds = (time.perf_counter() - begin) / timed
    return {
        "seconds": seconds,
        "tokens_per_s": length / seconds,
        "peak": torch.cuda.max_memory_allocated(),
        "loss": loss.item(),
        "warm_up_seconds": warmed,
    }


def estimate_seconds(found, length):
    """Return about how long a part takes, from what was measured: time grows at most with the square of the length."""
    known = [part for part in found if "seconds" in part]
    if not known:
        return 0.0
    nearest = min(known, key=lambda part: abs(part["T"] - length))
    growth = max(1.0, (length / nearest["T"]) ** 2)
    return nearest["seconds"] * growth * sum(count_steps(length)) + nearest["warm_up_seconds"]


def save(results):
    if os.environ.get("OUT"):
        (Path(os.environ["OUT"]) / "long-context.json").write_text(json.dumps(results, indent=1))


def main():
    predictions = start_predictions()
    results = {"gpu": torch.cuda.get_device_name(), "config": CONFIG, "parts": []}
    engine = make_engine()
    torch.cuda.synchronize()
    say(f"engine made, {torch.cuda.memory_allocated() / 1e9:.1f} GB; {engine.conversion.summary()[:150]}")
    warm = torch.randint(0, 4096, (1, 2048)).cuda()
    for _ in range(2):  # the first step finds FP8 scales, and makes the optimizer's state
        run_step(engine, warm)
    torch.cuda.synchronize()
    say(f"two steps of 2,048 tokens, {torch.cuda.memory_allocated() / 1e9:.1f} GB between steps")
    order = [(length, variant) for variant in VARIANTS if variant != "plain" for length in LENGTHS]
    order = sorted(order, key=lambda one: one[0]) + [(length, "plain") for length in LENGTHS if "plain" in VARIANTS]
    for length, variant in order:
        needed, left = estimate_seconds(results["parts"], length), BUDGET - (time.perf_counter() - BEGIN)
        part = {"T": length, "variant": variant}
        results["parts"].append(part)
        if needed > left:
            say(f"T={length} {variant}: left out, as it would take about {needed:.0f} s of {left:.0f}")
            continue
        try:
            part.update(measure(engine, length, variant))
        except torch.OutOfMemoryError as error:
            part["error"] = str(error)[:200]
            engine.inner.zero_grad(set_to_none=True)
            say(f"T={length} {variant}: out of memory")
            continue
        say(
            f"T={length} {variant}: {part['seconds']:.2f} s, {part['tokens_per_s']:,.0f} tokens/s, peak "
            f"{part['peak'] / 1e9:.2f} GB, loss {part['loss']:.4f}"
        )
        save(results)
    for part in results["parts"]:
        predicted = part["predicted"] = read_prediction(predictions[part["T"], part["variant"]])
        if predicted is not None and "peak" in part:
            error = predicted["peak"] / part["peak"] - 1
            say(
                f"RESULT T={part['T']} {part['variant']}: predicted {predicted['peak'] / 1e9:.2f} GB, measured "
                f"{part['peak'] / 1e9:.2f} ({error:+.1%}), host {predicted['host'] / 1e9:.1f} GB, "
                f"{part['tokens_per_s']:,.0f} tokens/s"
            )
    save(results)


if options["predict"]:
    print(json.dumps(predict(LENGTHS[0], options["predict"])))
else:
    main()
