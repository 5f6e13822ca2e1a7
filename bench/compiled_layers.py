"""Measures FP8 layer by layer under torch.compile: models whose blocks are not recognized, against compiled BF16.

For each model: how long until the first compiled step is done, with empty caches, and how long a step takes. Blocks are
not looked for, so that these models stand for those that narrowgauge does not know.

usage: python bench/compiled_layers.py [PART...]      parts: gpt-plain gpt-fp8 gpt-eager qwen-plain qwen-fp8 profile
"""

import contextlib
import os
import subprocess
import sys
import tempfile
import time

import torch
import torch.nn.functional as F
from torch import nn

LIMIT_S = 200
GPT = {"layers": 12, "width": 768, "heads": 12, "vocabulary": 50304, "batch": 64, "time": 1024}
QWEN = {"layers": 10, "width": 2048, "heads": 16, "vocabulary": 151936, "batch": 8, "time": 2048}


class GptBlock(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        batch, length, width = x.shape
        parts = self.qkv(self.norm_1(x)).split(width, dim=2)
        q, k, v = (part.view(batch, length, self.heads, -1).transpose(1, 2) for part in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class QwenBlock(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads, self.groups, size = heads, heads // 2, width // heads
        self.norm_1, self.norm_2 = nn.RMSNorm(width, eps=1e-6), nn.RMSNorm(width, eps=1e-6)
        self.q_norm, self.k_norm = nn.RMSNorm(size, eps=1e-6), nn.RMSNorm(size, eps=1e-6)
        self.q_proj = nn.Linear(width, width, bias=False)
        self.k_proj, self.v_proj = (nn.Linear(width, self.groups * size, bias=False) for _ in range(2))
        self.o_proj = nn.Linear(width, width, bias=False)
        self.gate_proj, self.up_proj = (nn.Linear(width, 3 * width, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(3 * width, width, bias=False)

    def forward(self, x):
        batch, length, width = x.shape
        y = self.norm_1(x)
        q = self.q_norm(self.q_proj(y).view(batch, length, self.heads, -1)).transpose(1, 2)
        k = self.k_norm(self.k_proj(y).view(batch, length, self.groups, -1)).transpose(1, 2)
        v = self.v_proj(y).view(batch, length, self.groups, -1).transpose(1, 2)
        q, k, v = rotate(q).to(v.dtype), rotate(k).to(v.dtype), v
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o_proj(y.transpose(1, 2).reshape(batch, length, width))
        y = self.norm_2(x)
        return x + self.down_proj(F.silu(self.gate_proj(y)) * self.up_proj(y))


def rotate(x):
    half = x.shape[-1] // 2
    angles = torch.arange(x.shape[-2], device=x.device)[:, None] * (
        10000.0 ** (-torch.arange(half, device=x.device) / half)
    )
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], dim=-1)


class Model(nn.Module):
    def __init__(self, block, layers, width, heads, vocabulary):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, ids, targets):
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).float().flatten(0, 1), targets.flatten())


def make_model(kind):
    sizes = dict(GPT if kind == "gpt" else QWEN)
    batch, length = sizes.pop("batch"), sizes.pop("time")
    torch.manual_seed(0)
    model = Model(GptBlock if kind == "gpt" else QwenBlock, **sizes).cuda()
    ids = torch.randint(0, sizes["vocabulary"], (4, batch, length), device="cuda")
    return model, ids


def make_plain_step(model, optimizer):
    compiled = torch.compile(model)

    def step(ids):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = compiled(ids, ids.roll(-1, 1))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def make_fp8_step(model, optimizer, compile):
    import narrowgauge as ng
    from narrowgauge.nn import convert
    from narrowgauge.nn.blocks.find import FoundBlocks

    convert._find_blocks = lambda *_: FoundBlocks({}, {})
    engine = ng.Engine(model, optimizer, "fp8", clip_norm=1.0, compile=compile)
    print(f"  {engine.conversion.summary()}; compiled: {engine.compiled}", flush=True)

    def step(ids):
        with engine.forward():
            loss = engine.model(ids, ids.roll(-1, 1))
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step


def run(part):
    kind, how = part.split("-")
    model, ids = make_model(kind)
    begin = time.perf_counter()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    step = make_plain_step(model, optimizer) if how == "plain" else make_fp8_step(model, optimizer, how != "eager")
    torch.cuda.synchronize()
    print(f"  made in {time.perf_counter() - begin:.1f} s", flush=True)
    losses, begin = [], time.perf_counter()
    for index in range(4):
        losses.append(step(ids[index % 4]))
        torch.cuda.synchronize()
        print(f"  step {index + 1} done after {time.perf_counter() - begin:.1f} s", flush=True)
    torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(6):
        begin = time.perf_counter()
        losses += [step(ids[index % 4]) for index in range(5)]
        torch.cuda.synchronize()
        times.append((time.perf_counter() - begin) / 5 * 1e3)
    from torch._dynamo.utils import counters

    print(
        f"{part}: {sorted(times)[len(times) // 2]:.1f} ms ({min(times):.1f} to {max(times):.1f}), "
        f"peak {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB, graphs {counters['stats']['unique_graphs']}, "
        f"losses {' '.join(f'{losses[i].item():.4f}' for i in (0, 1, 2, 3, 10, 20, -1))}",
        flush=True,
    )
    return lambda: step(ids[0])


def profile(part):
    step = run(part)
    from torch.profiler import ProfilerActivity

    with torch.profiler.profile(activities=[ProfilerActivity.CUDA]) as recorded:
        for _ in range(3):
            step()
        torch.cuda.synchronize()
    totals = {}
    for event in recorded.events():
        if event.device_time_total:
            time_us, count = totals.get(event.name, (0.0, 0))
            totals[event.name] = time_us + event.device_time_total, count + 1
    for name, (time_us, count) in sorted(totals.items(), key=lambda item: -item[1][0])[:32]:
        print(f"  {time_us / 3e3:8.3f} ms {count / 3:6.1f} x  {name[:110]}", flush=True)


def main(parts):
    for part in parts or ["gpt-plain", "gpt-fp8", "gpt-eager", "qwen-plain", "qwen-fp8", "profile"]:
        with tempfile.TemporaryDirectory() as cache, contextlib.suppress(subprocess.TimeoutExpired):
            begin = time.perf_counter()
            environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache, "TRITON_CACHE_DIR": f"{cache}/triton"}
            command = [sys.executable, "-u", __file__, "--run", part]
            done = subprocess.run(command, env=environment, timeout=LIMIT_S, check=False)
            print(f"[{part} ended with {done.returncode} after {time.perf_counter() - begin:.0f} s]", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--run"]:
        profile("gpt-fp8") if sys.argv[2] == "profile" else run(sys.argv[2])
    else:
        main(sys.argv[1:])
