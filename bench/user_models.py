"""Time training steps of models that users bring: plain BF16 with torch.compile against narrowgauge, in one process.

usage: python bench/user_models.py MODEL [CONTESTANT...]       (default contestants: plain fp8 bf16; JSON on stdout)
       MODEL: qwen3, llama-1b, gpt2, bert-large, vit-large, or nanogpt:PATH with the path of nanoGPT's model.py

Contestants take turns. Each has its own model with the same weights, fused AdamW, and clipping to a norm of 1.
"""

from __future__ import annotations

import gc
import importlib.util
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# transformers looks for a package named kernels, and must not find the script of that name beside this one.
sys.path.remove(str(Path(__file__).resolve().parent))

import torch
import transformers
from torch import Tensor, nn

ROUNDS, STEPS = 5, 5
LANGUAGE: dict[str, tuple[str, str, tuple[int, int], dict[str, Any]]] = {
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", (8, 2048), {
        "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 10, "num_attention_heads": 16,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
    }),
    "llama-1b": ("LlamaForCausalLM", "LlamaConfig", (8, 2048), {
        "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 128256, "tie_word_embeddings": True,
    }),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", (64, 1024), {}),
    "bert-large": ("BertForMaskedLM", "BertConfig", (64, 512), {
        "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16,
    }),
}  # fmt: skip
Case = tuple[nn.Module, tuple[int, ...], int, Callable[[nn.Module, Tensor, Tensor], Tensor]]
"""A model, the shape of a batch, its vocabulary, and its loss."""


def make_case(name: str) -> Case:
    """Build a model with the same random weights at every call."""
    torch.manual_seed(0)
    if name.startswith("nanogpt:"):
        spec = importlib.util.spec_from_file_location("nanogpt", name.partition(":")[2])
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        config = module.GPTConfig(block_size=1024, vocab_size=50304, dropout=0.0, bias=False)
        return module.GPT(config).cuda(), (64, 1024), 50257, lambda model, x, y: model(x, y)[1]
    with torch.device("cuda"):
        if name == "vit-large":
            sizes = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16}
            vit = transformers.ViTForImageClassification(transformers.ViTConfig(**sizes, num_labels=1000)).train()
            images = torch.randn(64, 3, 224, 224)
            return vit, (64,), 1000, lambda model, x, y: model(pixel_values=images, labels=x).loss
        model, config, shape, sizes = LANGUAGE[name]
        made = getattr(transformers, model)(getattr(transformers, config)(**sizes)).train()
    return made, shape, made.config.vocab_size, lambda model, x, y: model(input_ids=x, labels=x).loss


def make_step(name: str, contestant: str) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a training step: of plain PyTorch, or of an engine with the recipe that the contestant names."""
    model, _, _, loss_of = make_case(name)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-4, fused=True)
    if contestant == "plain":
        compiled: Any = torch.compile(model)

        def step(x: Tensor, y: Tensor) -> Tensor:
            with torch.autocast("cuda", torch.bfloat16):
                loss = loss_of(compiled, x, y)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            return loss.detach()

        return step
    from narrowgauge import Engine

    engine = Engine(model, optimizer, contestant, clip_norm=1.0)
    print(contestant, engine.conversion.summary(), *engine.conversion.explain_unfused(), file=sys.stderr, flush=True)

    def engine_step(x: Tensor, y: Tensor) -> Tensor:
        with engine.forward():
            loss = loss_of(engine.model, x, y)
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return engine_step


def race(name: str, contestants: list[str]) -> dict[str, Any]:
    """Return milliseconds of a step, seconds until the first one was done, peak GiB and losses of each contestant."""
    _, shape, vocab, _ = make_case(name)
    gc.collect()
    generator = torch.Generator("cuda").manual_seed(1)
    batches = [torch.randint(0, vocab, shape, device="cuda", generator=generator) for _ in range(2)]
    data = [(x, x.roll(-1, -1)) for x in batches]
    steps, result = {}, {}
    for contestant in contestants:
        before, begin = torch.cuda.memory_allocated(), time.perf_counter()
        step = make_step(name, contestant)
        losses = [step(*data[0]).item()]
        ready = time.perf_counter() - begin
        losses += [step(*data[number % 2]).item() for number in range(6)]
        torch.cuda.reset_peak_memory_stats()
        step(*data[0])
        torch.cuda.synchronize()
        steps[contestant] = step
        peak = (torch.cuda.max_memory_allocated() - before) / 2**30
        result[contestant] = {"ready_s": round(ready, 1), "peak_gib": round(peak, 1), "losses": losses}
        print(contestant, result[contestant], file=sys.stderr, flush=True)
    times: dict[str, list[float]] = {contestant: [] for contestant in steps}
    for _ in range(ROUNDS):
        for contestant, step in steps.items():
            step(*data[0])
            torch.cuda.synchronize()
            begin = time.perf_counter()
            for number in range(STEPS):
                step(*data[number % 2])
            torch.cuda.synchronize()
            times[contestant].append((time.perf_counter() - begin) / STEPS * 1e3)
    plain = statistics.median(times.get("plain", [float("nan")]))
    for contestant, seen in times.items():
        ms = statistics.median(seen)
        result[contestant] |= {"ms": round(ms, 2), "all_ms": [round(t, 2) for t in seen], "ratio": round(plain / ms, 3)}
    label = name.partition(":")[0]
    return {"model": label, "batch": shape, "device": torch.cuda.get_device_name(), "contestants": result}


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    print(json.dumps(race(sys.argv[1], sys.argv[2:] or ["plain", "fp8", "bf16"])))
