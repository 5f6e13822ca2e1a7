"""Families on a GPU: blocks are found, losses agree with plain BF16 in every recipe, repeated launches are right."""

from __future__ import annotations

import copy
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from narrowgauge import Engine
from narrowgauge.kernels import cast, norm
from narrowgauge.kernels.launch import _compiled
from narrowgauge.nn.blocks.find import find_blocks
from narrowgauge.nn.fused.verify import find_difference
from narrowgauge.nn.products.gemm import multiply_bf16, multiply_fp8

sys.path.append(str(Path(__file__).parents[1] / "nn"))
from model_families import BLOCKS, LANGUAGE, OTHERS, VOCAB, without_dropout

DEVICE = torch.device("cuda")
pytestmark = pytest.mark.filterwarnings("ignore:.*defaults to a non-deterministic algorithm")


@pytest.mark.parametrize("family", LANGUAGE | OTHERS)
def test_blocks_are_found_on_a_gpu_as_on_a_cpu(family: str) -> None:
    model = (LANGUAGE | OTHERS)[family]()
    on_cpu = find_blocks(model, torch.device("cpu"), find_difference)
    on_gpu = find_blocks(model.to(DEVICE), DEVICE, find_difference)
    assert on_cpu.specs and on_cpu.specs == on_gpu.specs and on_cpu.reasons == on_gpu.reasons


def tokens(seed: int) -> Tensor:
    return torch.randint(3, VOCAB, (4, 128), generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def train(model: nn.Module, recipe: str, fused: bool | None, count: int = 2) -> list[float]:
    engine = Engine(model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True), recipe, fused=fused)
    assert len(engine.conversion.blocks) == (0 if fused is False else count), engine.conversion.unfused
    losses = []
    for step in range(20):
        torch.manual_seed(step)
        batch = tokens(step % 3)
        with engine.forward():
            loss = model(input_ids=batch, labels=batch).loss
        engine.backward(loss)
        assert engine.step().applied
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("family", LANGUAGE)
@pytest.mark.parametrize("recipe", ["bf16", "fp8[products=all]", "bf16-lean", "fp8-lean"])
def test_losses_agree_with_plain_bf16(family: str, recipe: str) -> None:
    model = without_dropout(LANGUAGE[family]()).to(DEVICE).train()
    expected = train(copy.deepcopy(model), "bf16", False)
    found = train(model, recipe, None, BLOCKS.get(family, 2))
    assert found == pytest.approx(expected, rel=0.01 if recipe == "bf16" else 0.03)


@pytest.mark.parametrize("family", ["gpt2", "bert", "opt", "bart"])
@pytest.mark.parametrize(("recipe", "tolerance"), [("bf16", 0.01), ("fp8[products=all]", 0.03)])
def test_dropout_draws_the_numbers_of_the_unfused_model(family: str, recipe: str, tolerance: float) -> None:
    model = LANGUAGE[family]().to(DEVICE).train()
    expected = train(copy.deepcopy(model), "bf16", False)
    assert expected != train(without_dropout(copy.deepcopy(model)), "bf16", False)
    assert train(model, recipe, None, BLOCKS.get(family, 2)) == pytest.approx(expected, rel=tolerance)


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("rows", [4096, 37])
def test_products_with_a_bias(fp8: bool, rows: int) -> None:
    a, b = torch.randn(rows, 1024, device=DEVICE), torch.randn(4096, 1024, device=DEVICE)
    bias = torch.randn(4096, device=DEVICE).bfloat16() * 30
    one = torch.ones((), device=DEVICE)
    dtype = torch.float8_e4m3fn if fp8 else torch.bfloat16
    a, b = a.to(dtype), b.to(dtype)
    for _ in range(2):  # the second product repeats the algorithm that the first one has found
        made = multiply_fp8(a, b, one, one, bias=bias) if fp8 else multiply_bf16(a, b.t(), bias=bias)
        torch.testing.assert_close(made.float(), a.float() @ b.float().t() + bias.float(), rtol=2**-7, atol=0.5)


def test_repeated_launches_use_the_variant_that_fits() -> None:
    """The same kernel with other dtypes, alignments and sizes, in turns."""
    scale = torch.ones((), device=DEVICE)
    wide = torch.randn(66, 257, device=DEVICE)
    cases = [wide[:, :256].contiguous(), wide[:64, :256].bfloat16(), wide.flatten()[1:16385].view(64, 256), wide[:1]]
    for _ in range(3):
        for x in cases:
            made = cast.cast(x, scale, torch.float8_e4m3fn)
            assert torch.equal(made.float(), x.float().to(torch.float8_e4m3fn).float())
            weight = torch.ones(x.shape[1], device=DEVICE)
            out = norm.norm(x, weight, eps=1e-5).out
            expected = torch.nn.functional.layer_norm(x.float(), x.shape[1:], weight)
            torch.testing.assert_close(out.float(), expected, rtol=2**-7, atol=2**-7)
    assert len(_compiled) >= 4 and None not in _compiled.values()


def test_launches_on_another_stream() -> None:
    x, scale = torch.randn(4096, 4096, device=DEVICE), torch.ones((), device=DEVICE)
    expected = cast.cast(x, scale, torch.float8_e4m3fn)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        y = x * 1.0
        made = cast.cast(y, scale, torch.float8_e4m3fn)
    torch.cuda.current_stream().wait_stream(stream)
    assert torch.equal(made.view(torch.uint8), expected.view(torch.uint8))
