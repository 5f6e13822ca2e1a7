"""Ten thousand FP8 steps of a small model with an outlier every 500 steps: outliers are counted, weights stay finite.

usage: python bench/fp8_soak.py [STEPS]
"""

import sys

import torch

from narrowgauge import Engine
from narrowgauge.models.gpt import GPT, GPTConfig

steps = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
with torch.device(device):
    model = GPT(GPTConfig(layers=2, width=128, heads=2, vocab=256, context=64))
engine = Engine(model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True), "fp8[products=all]", clip_norm=1.0)
scales = engine.conversion.scales
assert scales is not None
for step in range(1, steps + 1):
    tokens = torch.randint(0, 256, (8, 65), device=device)
    before = scales.counts[:, 0].sum().item() if step % 500 == 0 else 0
    with engine.forward():
        factor = 1000.0 if step % 500 == 0 else 1.0
        block = model.blocks[0]
        if factor != 1.0:
            with torch.no_grad():
                block.norm1.weight.mul_(factor)
        loss = model(tokens[:, :-1], tokens[:, 1:])
    engine.backward(loss)
    engine.step()
    if factor != 1.0:
        with torch.no_grad():
            block.norm1.weight.div_(factor)
        counted = scales.counts[:, 0].sum().item() - before
        finite = all(bool(torch.isfinite(p).all()) for p in model.parameters())
        print(f"step {step}: loss {loss.item():.4f}, {counted} values saturated, weights finite: {finite}", flush=True)
        assert finite and counted > 0
print(f"{steps} steps, skipped {engine.skipped}, last loss {loss.item():.4f}")
