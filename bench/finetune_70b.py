"""Measures a LoRA step on a model of Llama-3.1-70B's shapes, whose frozen weights are FP8, on one GPU.

usage: python bench/finetune_70b.py [layers=80] [batch=1] [context=2048] [steps=6] [recipe=fp8-lean]

The weights are random, and take the way of those in files: the loader reads them piece by piece, and stores them as
``frozen=fp8`` says. Only what reads the files is replaced. JSON goes to $OUT/finetune-70b.json where OUT is set.
"""

import json
import os
import statistics
import sys
import tempfile
import time
import zlib
from pathlib import Path

import torch
import transformers

from narrowgauge import Engine
from narrowgauge.pretrained import adapters
from narrowgauge.pretrained.folder import PretrainedFolder, StoredTensor
from narrowgauge.pretrained.load import fill
from narrowgauge.pretrained.lora_options import parse_lora
from narrowgauge.pretrained.match import Match
from narrowgauge.pretrained.transformers_model import FoundModel

options = {"layers": 80, "batch": 1, "context": 2048, "steps": 6, "width": 8192, "hidden": 28672, "vocabulary": 128256}
recipe, device = "fp8-lean", torch.device("cuda" if torch.cuda.is_available() else "cpu")
for argument in sys.argv[1:]:
    name, _, value = argument.partition("=")
    if name == "recipe":
        recipe = value
    else:
        options[name] = int(value)
recipe = recipe.replace("]", ",frozen=fp8]") if "[" in recipe else f"{recipe}[frozen=fp8]"
PIECE = 1 << 26


class RandomReader:
    """Gives normal numbers in BF16; those of one tensor are the same at each reading."""

    def list_pieces(self, tensor):
        for start in range(0, tensor.numel, PIECE):
            yield start, min(start + PIECE, tensor.numel)

    def read(self, tensor, start, stop):
        generator = torch.Generator(device).manual_seed(zlib.crc32(f"{tensor.name}:{start}".encode()))
        values = torch.randn(stop - start, generator=generator, device=device, dtype=torch.bfloat16)
        return values.mul_(0.02) if len(tensor.shape) > 1 else torch.ones_like(values)


def match_random_weights(folder):
    heads = options["width"] // 128
    config = transformers.LlamaConfig(
        hidden_size=options["width"], intermediate_size=options["hidden"], num_hidden_layers=options["layers"],
        num_attention_heads=heads, num_key_value_heads=max(1, heads // 8), vocab_size=options["vocabulary"],
        max_position_embeddings=8192, use_cache=False, rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
    )  # fmt: skip
    found = FoundModel("llama", transformers.LlamaForCausalLM, config, None)
    model = found.make_on_meta()
    expected = model.state_dict(keep_vars=True)
    stored = {
        name: StoredTensor(name=name, file=folder, offset=0, dtype=torch.bfloat16, shape=tuple(tensor.shape))
        for name, tensor in expected.items()
    }
    opened = PretrainedFolder(path=folder, option="llama", config={}, tensors=stored, quantization=None)
    return Match(found=found, folder=opened, model=model, stored=stored, expected=expected)


def get_peak():
    return torch.cuda.max_memory_allocated() / 1e9 if device.type == "cuda" else 0.0


begin = time.perf_counter()
lora = parse_lora("rank=16,alpha=32,targets=all-linear")
with tempfile.TemporaryDirectory() as empty:
    match = match_random_weights(Path(empty))
    adapters.inject(match.model, lora)
    model = fill(match, recipe, device, RandomReader(), lambda line: print(line, flush=True))
adapters.allocate(model, device)
adapters.initialize(model, lora)
trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
optimizer = torch.optim.AdamW(trained, 2e-4, fused=device.type == "cuda")
held = sum(t.numel() * t.element_size() for t in (*model.parameters(), *model.buffers())) / 1e9
count = sum(parameter.numel() for parameter in model.parameters())
print(f"{count / 1e9:.2f}B parameters in {held:.2f} GB after {time.perf_counter() - begin:.0f} s", flush=True)
print(f"loading took a peak of {get_peak():.2f} GB", flush=True)
engine = Engine(model, optimizer, recipe, clip_norm=1.0)
print(engine.conversion.summary()[:200], *list(engine.conversion.unfused.values())[:1], flush=True)
loading_peak = get_peak()
if device.type == "cuda":
    torch.cuda.reset_peak_memory_stats()
losses, times = [], []
tokens = torch.randint(
    0,
    min(4096, options["vocabulary"]),
    (options["batch"], options["context"]),
    generator=torch.Generator().manual_seed(1),
)
tokens = tokens.to(device)
for _ in range(options["steps"]):
    start = time.perf_counter()
    with engine.forward():
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    engine.backward(loss)
    engine.step()
    losses.append(loss.item())
    times.append(time.perf_counter() - start)
    print(f"loss {losses[-1]:.4f}, {times[-1] * 1e3:.0f} ms, peak {get_peak():.2f} GB", flush=True)
step_s = statistics.median(times[len(times) // 2 :])
result = {
    **options, "recipe": recipe, "parameters": count, "weights_gb": held, "loading_peak_gb": loading_peak,
    "peak_gb": get_peak(), "step_ms": step_s * 1e3, "tokens_per_s": tokens.numel() / step_s, "losses": losses,
}  # fmt: skip
print(f"RESULT {result['tokens_per_s']:,.0f} tokens/s, peak {result['peak_gb']:.1f} GB", flush=True)
if os.environ.get("OUT"):
    (Path(os.environ["OUT"]) / "finetune-70b.json").write_text(json.dumps(result, indent=1))
