"""Measures attention of packed documents: kernels with a mask and with bounds, and training steps of a Llama.

The step times compare the same model with and without the path for documents (nn/fused/documents.py), in turns.

usage: python bench/documents.py [kernels] [steps]
"""

import sys
import time

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

B, T, HEADS, KEYS, SIZE = 4, 2048, 32, 8, 128
ROUNDS, REPEATS = 5, 4


def make_positions(documents):
    """Return positions [B, T] of so many documents of equal length in each row."""
    return (torch.arange(T, device="cuda") % (T // documents)).expand(B, T).contiguous()


def time_ms(call, repeats=20):
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(repeats):
        call()
    torch.cuda.synchronize()
    return (time.perf_counter() - begin) / repeats * 1e3


def measure_kernels():
    from narrowgauge.kernels.document_attention import attend_documents

    qkv = torch.randn(B, T, (HEADS + 2 * KEYS) * SIZE, device="cuda", dtype=torch.bfloat16)
    grad = torch.randn(B, HEADS, T, SIZE, device="cuda", dtype=torch.bfloat16)
    sizes = [HEADS * SIZE, KEYS * SIZE, KEYS * SIZE]
    parts = [
        part.view(B, T, -1, SIZE).transpose(1, 2).detach().requires_grad_() for part in qkv.split(sizes, -1)
    ]  # fmt: skip

    def run(attend):
        output = attend(*parts)
        torch.autograd.grad(output, parts, grad)

    for documents in (1, 4, 16):
        numbers = torch.arange(T, device="cuda") // (T // documents)
        mask = (numbers[:, None] == numbers) & torch.ones(T, T, dtype=torch.bool, device="cuda").tril()
        mask = mask.expand(B, 1, T, T).contiguous()
        bounds = torch.arange(0, B * T + 1, T // documents, dtype=torch.int32, device="cuda")

        def masked(q, k, v, mask=mask):
            with sdpa_kernel([SDPBackend.CUDNN_ATTENTION]):
                return F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)

        def by_bounds(q, k, v, bounds=bounds, longest=T // documents):
            return attend_documents(q, k, v, bounds, longest)

        one, two = time_ms(lambda f=masked: run(f)), time_ms(lambda f=by_bounds: run(f))
        print(f"{documents:3d} documents a row: mask {one:.3f} ms, bounds {two:.3f} ms", flush=True)


def measure_steps():
    import transformers

    import narrowgauge as ng
    from narrowgauge.nn.fused import modules

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=HEADS * SIZE, intermediate_size=14336, num_hidden_layers=4, num_attention_heads=HEADS,
        num_key_value_heads=KEYS, vocab_size=32000,
    )  # fmt: skip
    with torch.device("cuda"):
        model = transformers.LlamaForCausalLM(config).train()
    engine = ng.Engine(model, torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True), "fp8", clip_norm=1.0)
    ids, find_documents = torch.randint(0, 32000, (B, T), device="cuda"), modules.find_documents

    def step(positions):
        with engine.forward():
            loss = engine.model(input_ids=ids, labels=ids, position_ids=positions, use_cache=False).loss
        engine.backward(loss)
        engine.step()

    for _ in range(2):  # the first steps compile kernels and choose algorithms: half a minute on a new machine
        step(make_positions(1))
    torch.cuda.synchronize()
    print(f"ready: {engine.conversion.summary()}", flush=True)
    for documents in (1, 4, 16):
        positions, times = make_positions(documents), ([], [])
        for _ in range(ROUNDS):
            for taken, find in zip(times, (lambda *_: None, find_documents), strict=True):
                modules.find_documents = find
                taken.append(time_ms(lambda p=positions: step(p), REPEATS))
        masked, ours = (sorted(taken)[ROUNDS // 2] for taken in times)
        rate = B * T / ours * 1e3
        print(
            f"{documents:3d} documents a row: mask {masked:.1f} ms, bounds {ours:.1f} ms, {rate:,.0f} tokens/s",
            flush=True,
        )


if __name__ == "__main__":
    for part in sys.argv[1:] or ["kernels", "steps"]:
        print(part, flush=True)
        {"kernels": measure_kernels, "steps": measure_steps}[part]()
