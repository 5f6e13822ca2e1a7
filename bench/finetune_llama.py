"""Measures fine-tuning steps of transformers' Llama-3.1-8B: tokens per second, memory of weights, peak.

usage: python bench/finetune_llama.py PART... [layers=32] [batch=4] [documents=6] [rounds=4]

    full           fp8-lean, all weights trained
    full-fast      the same without recomputation
    liger          plain BF16 weights, Liger's kernels, gradient checkpointing
    lora           LoRA rank 16 on all linear layers, fp8 with the frozen weights in FP8
    lora-bf16      the same in bf16 with frozen weights in BF16
    lora-plain     the same with PEFT, BF16 autocast and torch.compile
    profile        after each part, where a step's time goes

Weights are random. Rows of 2,048 tokens hold ``documents`` documents each (0: one text, without positions). All parts
of a call run in one process; several are timed in turns. JSON goes to $OUT/finetune-llama-PARTS.json where
OUT is set. liger-kernel and peft have to be importable.
"""

import gc
import json
import os
import statistics
import sys
import time
import traceback
from pathlib import Path

import torch
import transformers

T, VOCABULARY, RANK, ALPHA = 2048, 128256, 16, 32
options = {"layers": 32, "batch": 4, "documents": 6, "rounds": 4}
parts = []
for argument in sys.argv[1:]:
    name, equals, value = argument.partition("=")
    if equals:
        options[name] = int(value)
    else:
        parts.append(name)


def say(*words):
    print(*words, flush=True)


def make_model(dtype=torch.bfloat16):
    config = transformers.LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=options["layers"], num_attention_heads=32,
        num_key_value_heads=8, vocab_size=VOCABULARY, max_position_embeddings=8192, use_cache=False,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
    )  # fmt: skip
    torch.manual_seed(0)
    torch.set_default_dtype(dtype)
    try:
        with torch.device("cuda"):
            return transformers.LlamaForCausalLM(config).train()
    finally:
        torch.set_default_dtype(torch.float32)


def make_batches(count=2):
    """Return rows of documents of random lengths: tokens, and positions that start again with each."""
    generator = torch.Generator().manual_seed(1)
    batches = []
    for _ in range(count):
        ids = torch.randint(0, 4096, (options["batch"], T), generator=generator)
        given = {"input_ids": ids.cuda(), "labels": ids.cuda(), "use_cache": False}
        if options["documents"]:
            positions = torch.arange(T).repeat(options["batch"], 1)
            for row in positions:
                cuts = torch.randperm(T - 1, generator=generator)[: options["documents"] - 1] + 1
                for cut in sorted(cuts.tolist()):
                    row[cut:] = torch.arange(T - cut)
            given["position_ids"] = positions.cuda()
        batches.append(given)
    return batches


def add_adapters(model, dtype):
    import peft

    config = peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules="all-linear")
    adapted = peft.get_peft_model(model, config)
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)
    return adapted


def list_trained(model):
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def count_weight_bytes(model):
    frozen = (*model.parameters(), *model.buffers())
    return sum(tensor.numel() * tensor.element_size() for tensor in frozen)


def find_graphs(model):
    from narrowgauge.nn.fused.modules import FusedBlock
    from narrowgauge.nn.module_changes import find_change

    return next(change.graphs for change in (find_change(m, FusedBlock) for m in model.modules()) if change is not None)


def with_engine(model, recipe, learning_rate):
    import narrowgauge

    optimizer = torch.optim.AdamW(list_trained(model), learning_rate, fused=True)
    engine = narrowgauge.Engine(model, optimizer, recipe, clip_norm=1.0)
    say("  ", recipe, engine.conversion.summary()[:160], *list(engine.conversion.unfused.values())[:1])
    graphs[recipe] = find_graphs(model)

    def step(batch):
        with engine.forward():
            loss = model(**batch).loss
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step, model


def without_engine(model, run, learning_rate, autocast):
    optimizer = torch.optim.AdamW(list_trained(model), learning_rate, fused=True)

    def step(batch):
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            loss = run(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(list_trained(model), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step, model


def make_liger():
    from liger_kernel.transformers import apply_liger_kernel_to_llama

    model = make_model()
    apply_liger_kernel_to_llama(model=model)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return without_engine(model, model, 1e-5, False)


def make_plain_lora():
    model = add_adapters(make_model(), torch.float32)
    return without_engine(model, torch.compile(model), 2e-4, True)


PARTS = {
    "full": lambda: with_engine(make_model(torch.float32), "fp8-lean", 1e-5),
    "full-fast": lambda: with_engine(make_model(torch.float32), "fp8-lean[checkpoint=none]", 1e-5),
    "full-selective": lambda: with_engine(make_model(torch.float32), "fp8-lean[checkpoint=selective]", 1e-5),
    "liger": make_liger,
    "lora": lambda: with_engine(add_adapters(make_model(), torch.float32), "fp8[frozen=fp8]", 2e-4),
    "lora-bf16": lambda: with_engine(add_adapters(make_model(), torch.float32), "bf16[frozen=bf16]", 2e-4),
    "lora-plain": make_plain_lora,
}
graphs = {}
batches = make_batches()
steps, results = {}, {"options": options, "gpu": torch.cuda.get_device_name(), "parts": {}}
for name in parts:
    if name not in PARTS:
        continue
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before, begin = torch.cuda.memory_allocated(), time.perf_counter()
    try:
        step, model = PARTS[name]()
        made = torch.cuda.max_memory_allocated() - before
        losses = [step(batches[0]).item()]
        ready = time.perf_counter() - begin
        losses += [step(batches[number % 2]).item() for number in range(1, 7)]
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        step(batches[0])
        torch.cuda.synchronize()
    except Exception as error:
        say(f"{name}: FAILED {type(error).__name__}: {str(error)[:400]}")
        traceback.print_exc(limit=-4)
        continue
    steps[name] = step
    found = results["parts"][name] = {
        "weights_gb": count_weight_bytes(model) / 1e9,
        "peak_gb": (torch.cuda.max_memory_allocated() - before) / 1e9,
        "making_gb": made / 1e9,
        "ready_s": ready,
        "losses": losses,
        "ms": [],
    }
    say(name, {key: round(value, 2) if isinstance(value, float) else value for key, value in found.items()})
    if "profile" in parts:
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            step(batches[0])
            torch.cuda.synchronize()
        say(seen.key_averages().table(sort_by="self_cuda_time_total", row_limit=45, max_name_column_width=90))
for _ in range(options["rounds"]):
    for name, step in steps.items():
        step(batches[0])
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for number in range(3):
            step(batches[number % 2])
        torch.cuda.synchronize()
        results["parts"][name]["ms"].append((time.perf_counter() - begin) / 3 * 1e3)
for name in steps:
    found = results["parts"][name]
    found["step_ms"] = statistics.median(found["ms"])
    found["tokens_per_s"] = options["batch"] * T / found["step_ms"] * 1e3
    say(
        f"RESULT {name} {found['step_ms']:.1f} ms {found['tokens_per_s']:,.0f} tokens/s, weights "
        f"{found['weights_gb']:.2f} GB, peak {found['peak_gb']:.1f} GB, ready after {found['ready_s']:.0f} s"
    )
for recipe, found in graphs.items():
    say(f"{recipe}: {found.recorded} forwards recorded; the GPU waited {found._idle} of {found._measured} times")
if os.environ.get("OUT"):
    (Path(os.environ["OUT"]) / f"finetune-llama-{'-'.join(parts)}.json").write_text(json.dumps(results, indent=1))
