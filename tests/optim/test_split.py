"""Split masters: every pattern of 32 bits survives, and the model's half is the nearest BF16 number."""

import numpy
import torch

from narrowgauge.optim.split import join, split

EDGES = (
    0x00000000, 0x00000001, 0x00007FFF, 0x00008000, 0x00008001, 0x0000FFFF, 0x00010000, 0x007FFFFF, 0x00800000,
    0x3F800000, 0x3F807FFF, 0x3F808000, 0x3F808001, 0x3F818000, 0x7F7F7FFF, 0x7F7F8000, 0x7F7FFFFF, 0x7F800000,
    0x7F800001, 0x7F807FFF, 0x7F808000, 0x7FC00000, 0x7FFE7FFF, 0x7FFE8000, 0x7FFEFFFF, 0x7FFF0000, 0x7FFF7FFF,
    0x7FFF8000, 0x7FFFFFFF,
)  # fmt: skip


def from_bits(patterns):
    return torch.tensor([p - (1 << 32) if p >= 1 << 31 else p for p in patterns], dtype=torch.int32).view(torch.float32)


def same_bits(a, b):
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


def test_special_values_survive():
    values = from_bits([*EDGES, *(pattern | 0x80000000 for pattern in EDGES)])
    weight, remainder = split(values)
    assert (weight.dtype, remainder.dtype) == (torch.bfloat16, torch.int16)
    assert same_bits(join(weight, remainder), values)


def test_nan_stays_nan_for_the_model_and_infinity_infinite():
    values = from_bits([0x7FC00000, 0x7FFFFFFF, 0xFFC00000, 0xFFFFFFFF, 0x7F800000, 0xFF800000])
    weight, remainder = split(values)
    assert torch.isnan(weight[:4]).all()
    assert weight[4:].tolist() == [float("inf"), -float("inf")]
    assert remainder[4:].tolist() == [0, 0]


def test_every_high_half_with_the_low_halves_around_a_tie():
    high = torch.arange(1 << 16, dtype=torch.int32)
    lows = [0, 1, 0x7FFE, 0x7FFF, 0x8000, 0x8001, 0xFFFE, 0xFFFF]
    bits = torch.stack([(high << 16) | low for low in lows])
    values = bits.view(torch.float32)
    assert same_bits(join(*split(values)), values)


def test_a_hundred_million_random_patterns_survive():
    generator = numpy.random.default_rng(0)
    for _ in range(50):
        bits = numpy.frombuffer(generator.bytes(8_000_000), numpy.int32)
        values = torch.from_numpy(bits.copy()).view(torch.float32)
        assert same_bits(join(*split(values)), values)


def test_the_weight_is_the_nearest_bf16_number_with_ties_away():
    values = torch.randn(1_000_000, generator=torch.Generator().manual_seed(1)) * 0.02
    weight, _ = split(values)
    error = (weight.double() - values.double()).abs()
    assert (error <= (values.to(torch.bfloat16).double() - values.double()).abs()).all()
    ties = from_bits([0x3F808000, 0xBF808000, 0x3F818000])
    assert split(ties)[0].tolist() == from_bits([0x3F810000, 0xBF810000, 0x3F820000]).tolist()
