"""Mixtures of experts of transformers: FP8 beside compiled BF16 with grouped products, taking turns in one process.

usage: python bench/experts.py olmoe|mixtral [LAYERS] [ROUNDS] [STEPS] [RECIPE ...] [fresh] [masked] [profile]
(JSON to $OUT/experts-SHAPE.json where OUT is set; default: 4 or 2 layers, 3 rounds of 4 steps, fp8)

olmoe has the widths of OLMoE-1B-7B (64 experts of 1,024, of which a token has 8), mixtral those of Mixtral 8x7B (8
experts of 14,336, of which a token has 2), both with fewer layers, random weights and 16,384 tokens in a step.

Compiled BF16 is autocast and torch.compile with torch's grouped product of BF16 copies of the experts' weights. As
transformers writes it, FP32 weights would be multiplied expert by expert under torch.compile. Its attention is causal
without a mask. As transformers writes it, a compiled model makes a mask before torch 2.14, and attention computes all
of it: ``masked`` measures that. The losses of all steps are compared, and one step runs in torch's mode that raises an
error where the host waits for the GPU.

Four batches of equally frequent tokens are repeated, so that a loss falls by learning them by heart, which FP8 does
more slowly than BF16. ``fresh``: no batch comes twice, and a token is the less frequent the higher its number
(1 / (number + 10)), so that the loss falls by learning how frequent they are, as at the beginning of a training.
"""

import functools
import json
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import narrowgauge as ng

TOKENS, CONTEXT, CLIP = 16384, 4096, 1.0
BATCHES, VOCABULARY = 4, 32000
RATES = {"olmoe": 1e-4, "mixtral": 3e-5 if "fresh" in sys.argv else 1e-5}
"""Learning rates. With 1e-4 and repeated batches, Mixtral's loss falls from 11 to 4 in four steps."""
WARM_UP = 4
OPTIONS = "fresh", "masked", "profile"
Step = Callable[[Tensor], Tensor]
PLAIN = "compiled BF16"


def make_model(shape: str, layers: int) -> Any:
    common = {"num_hidden_layers": layers, "use_cache": False, "max_position_embeddings": CONTEXT}
    with torch.device("cuda"):
        if shape == "olmoe":
            config = transformers.OlmoeConfig(**common, intermediate_size=1024)  # transformers' default is 2,048
            return transformers.OlmoeForCausalLM(config).train()
        config = transformers.MixtralConfig(**common, sliding_window=None)
        return transformers.MixtralForCausalLM(config).train()


def run_grouped(self: Any, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """Compute experts in BF16 with grouped products, as transformers does for weights in BF16."""
    count = index.shape[-1]
    chosen, order = torch.sort(index.reshape(-1))
    counts = torch.histc(chosen.int(), bins=self.num_experts, min=0, max=self.num_experts - 1)
    ends = torch.cumsum(counts, 0, dtype=torch.int32)
    tokens = hidden[order // count].bfloat16()
    gate_up = torch._grouped_mm(tokens, self.gate_up_proj.bfloat16().transpose(-2, -1), offs=ends)
    gate, up = gate_up.chunk(2, -1)
    made = torch._grouped_mm(self.act_fn(gate) * up, self.down_proj.bfloat16().transpose(-2, -1), offs=ends)
    made = made * weights.reshape(-1)[order].unsqueeze(-1)
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order), device=order.device)
    return made[back].view(len(hidden), count, -1).sum(1).to(hidden.dtype)


def attend_causally(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any) -> Any:
    return sdpa_attention_forward(module, query, key, value, None, **options)


def make_plain_step(model: Any, optimizer: Any) -> Step:
    ALL_EXPERTS_FUNCTIONS.register("grouped_bf16", run_grouped)
    model.set_experts_implementation("grouped_bf16")
    if "masked" not in sys.argv:
        ALL_ATTENTION_FUNCTIONS.register("causal", attend_causally)
        model.set_attn_implementation("causal")
    model.compile()

    def step(ids: Tensor) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            loss: Tensor = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def make_own_step(recipe: str, model: Any, optimizer: Any) -> Step:
    engine = ng.Engine(model, optimizer, recipe=recipe, clip_norm=CLIP)
    print(f"  {engine.conversion.summary()}", *engine.conversion.explain_unfused(), sep="\n  ", flush=True)

    def step(ids: Tensor) -> Tensor:
        with engine.forward():
            loss: Tensor = engine.model(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step


def draw_batch(number: int) -> Tensor:
    size = TOKENS // CONTEXT, CONTEXT
    if "fresh" not in sys.argv:
        generator = torch.Generator("cuda").manual_seed(number % BATCHES)
        return torch.randint(0, VOCABULARY, size, generator=generator, device="cuda")
    generator = torch.Generator("cuda").manual_seed(number)
    frequencies = 1 / torch.arange(10, VOCABULARY + 10, device="cuda")
    return torch.multinomial(frequencies, TOKENS, replacement=True, generator=generator).view(size)


class Contestant:
    """A training step with its times, losses and memory."""

    def __init__(self, name: str, shape: str, layers: int) -> None:
        self.name, self.times, self.losses, self.peak = name, [], [], 0  # type: ignore[var-annotated]
        torch.cuda.empty_cache()
        before, begin = torch.cuda.memory_allocated(), time.perf_counter()
        torch.manual_seed(0)
        model = make_model(shape, layers)
        optimizer = torch.optim.AdamW(model.parameters(), RATES[shape], betas=(0.9, 0.95), fused=True)
        make = make_plain_step if name == PLAIN else functools.partial(make_own_step, name)
        self._step = make(model, optimizer)
        for number in range(WARM_UP):
            self.run(number)
            if number == 1:
                torch.cuda.synchronize()
                self.ready_s = time.perf_counter() - begin
        torch.cuda.synchronize()
        self.own = torch.cuda.memory_allocated() - before
        print(
            f"  ready after {self.ready_s:.0f} s, {sum(p.numel() for p in model.parameters()) / 1e6:,.0f}M", flush=True
        )

    def run(self, number: int) -> None:
        self.losses.append(self._step(draw_batch(number)))

    def measure(self, first: int, steps: int) -> None:
        torch.cuda.reset_peak_memory_stats()
        others = torch.cuda.memory_allocated() - self.own
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for number in range(first, first + steps):
            self.run(number)
        end.record()
        torch.cuda.synchronize()
        self.times.append(start.elapsed_time(end) / steps)
        self.peak = max(self.peak, torch.cuda.max_memory_allocated() - others)

    def find_waiting(self) -> str | None:
        """Return what waits for the GPU in a step, or None."""
        torch.cuda.synchronize()
        batch = draw_batch(0)
        torch.cuda.set_sync_debug_mode("error")
        try:
            self._step(batch)
        except RuntimeError as error:
            frames = traceback.extract_tb(error.__traceback__)[-4:]
            return " < ".join(f"{Path(one.filename).name}:{one.lineno} {one.line}" for one in reversed(frames))
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return None

    def profile(self) -> None:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as made:
            for number in range(3):
                self.run(number)
            torch.cuda.synchronize()
        found = sorted(((e.device_time_total / 3e3, e.count // 3, e.key) for e in made.key_averages()), reverse=True)
        print(f"{self.name}: {sum(ms for ms, _, _ in found):.1f} ms of kernels in a step")
        for ms, count, key in found[:30]:
            print(f"{ms:9.3f} ms {count:5d} x {key[:110]}", flush=True)


def main() -> None:
    shape, *rest = sys.argv[1:] or ["olmoe"]
    numbers = [int(argument) for argument in rest if argument.isdigit()]
    layers, rounds, steps = (*numbers, *(4 if shape == "olmoe" else 2, 3, 4)[len(numbers) :])[:3]
    recipes = [one for one in rest if not one.isdigit() and one not in OPTIONS] or ["fp8"]
    field = []
    for name in (PLAIN, *recipes):
        print(name, flush=True)
        field.append(Contestant(name, shape, layers))
    for number in range(rounds):
        for one in field:
            one.measure(WARM_UP + number * steps, steps)
        print(f"round {number + 1}: " + ", ".join(f"{one.name} {one.times[-1]:.1f} ms" for one in field), flush=True)
    plain, *own = field
    rows = []
    for one in field:
        apart = [abs(float(a) - float(b)) / float(b) for a, b in zip(one.losses, plain.losses, strict=True)]
        ratio = statistics.median(a / b for a, b in zip(plain.times, one.times, strict=True))
        waits = one.find_waiting() if one in own else None
        rows.append({
            "name": one.name, "step_ms": statistics.median(one.times), "times_ms": one.times, "ratio": ratio,
            "tokens_per_s": TOKENS / statistics.median(one.times) * 1e3, "peak_bytes": one.peak,
            "ready_s": one.ready_s, "losses": [float(loss) for loss in one.losses], "largest_relative_gap": max(apart),
            "waits": waits,
        })  # fmt: skip
        print(
            f"{one.name:16s} {rows[-1]['step_ms']:8.2f} ms  {rows[-1]['tokens_per_s']:9,.0f} /s  "
            f"{one.peak / 2**30:6.1f} GiB  {ratio:.3f} x {PLAIN}  losses apart by {max(apart):.2%}  "
            f"{'' if one not in own else waits or 'nothing waits'}",
            flush=True,
        )
    print("losses", *(f"{one.name}: " + " ".join(f"{float(x):.4f}" for x in one.losses) for one in field), sep="\n  ")
    if "OUT" in os.environ:
        found: dict[str, Any] = {
            "shape": shape,
            "layers": layers,
            "tokens": TOKENS,
            "learning_rate": RATES[shape],
            "options": [one for one in OPTIONS if one in sys.argv],
            "device": torch.cuda.get_device_name(),
            "rows": rows,
        }
        (Path(os.environ["OUT"]) / f"experts-{'-'.join([shape, *found['options']])}.json").write_text(
            json.dumps(found, indent=1)
        )
    if "profile" in sys.argv:
        for one in field:
            one.profile()


if __name__ == "__main__":
    main()
