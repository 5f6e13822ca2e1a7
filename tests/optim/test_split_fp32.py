"""Split masters: every number round-trips, the model has the nearest BF16 number, and any two halves are valid."""

import numpy
import torch

from narrowgauge.optim.split_fp32 import CARRIES, compute_remainder, is_rounded_from, join, split

EDGES = (
    0x00000000, 0x00000001, 0x00007FFF, 0x00008000, 0x00008001, 0x0000FFFF, 0x00010000, 0x007FFFFF, 0x00800000,
    0x3F800000, 0x3F807FFF, 0x3F808000, 0x3F808001, 0x3F818000, 0x7F7F7FFF, 0x7F7F8000, 0x7F7FFFFF, 0x7F800000,
    0x7F800001, 0x7F807FFF, 0x7F808000, 0x7FC00000, 0x7FFE7FFF, 0x7FFE8000, 0x7FFEFFFF, 0x7FFF0000, 0x7FFF7FFF,
    0x7FFF8000, 0x7FFFFFFF,
)  # fmt: skip


def from_bits(patterns):
    return torch.tensor([p - (1 << 32) if p >= 1 << 31 else p for p in patterns], dtype=torch.int32).view(torch.float32)


def round_trips(values):
    """Return whether values round-trip bit for bit. NaNs from 0x7FFF8000 may become another NaN."""
    found, wanted = join(*split(values)).view(torch.int32), values.view(torch.int32)
    carries = (wanted & 0x7FFFFFFF) >= CARRIES
    return torch.equal(found[~carries], wanted[~carries]) and bool(found[carries].view(torch.float32).isnan().all())


def test_special_values_round_trip():
    values = from_bits([*EDGES, *(pattern | 0x80000000 for pattern in EDGES)])
    weight, remainder = split(values)
    assert (weight.dtype, remainder.dtype) == (torch.bfloat16, torch.int16)
    assert round_trips(values)


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
    assert round_trips(bits.view(torch.float32))


def test_thirty_million_random_patterns_round_trip():
    generator = numpy.random.default_rng(0)
    for _ in range(15):
        bits = numpy.frombuffer(generator.bytes(8_000_000), numpy.int32)
        assert round_trips(torch.from_numpy(bits.copy()).view(torch.float32))


def test_the_weight_is_the_nearest_bf16_number_with_ties_away():
    values = torch.randn(1_000_000, generator=torch.Generator().manual_seed(1)) * 0.02
    weight, _ = split(values)
    error = (weight.double() - values.double()).abs()
    assert (error <= (values.to(torch.bfloat16).double() - values.double()).abs()).all()
    ties = from_bits([0x3F808000, 0xBF808000, 0x3F818000])
    assert split(ties)[0].tolist() == from_bits([0x3F810000, 0xBF810000, 0x3F820000]).tolist()


def check_pairs(high, low):
    """Check that pairs are finite if the weight is, have its sign, and are within half a step of it."""
    weight = high.to(torch.int16).view(torch.bfloat16)
    joined = join(weight, low.to(torch.int16))
    finite = torch.isfinite(weight)
    assert torch.isfinite(joined[finite]).all()
    assert torch.equal(torch.signbit(joined[finite]), torch.signbit(weight[finite]))
    size = (high & 0x7FFF).double()
    apart = (joined.view(torch.int32) & 0x7FFFFFFF).double() - size * 65536
    assert (apart[finite].abs() <= 0x8000).all()
    crossed = (size == 0) & (low < 0)
    assert torch.equal(apart[finite & ~crossed], low.double()[finite & ~crossed])
    assert (apart[crossed] == 0).all()


def test_any_weight_with_any_remainder_is_a_number_near_the_weight():
    """All weights with extreme remainders, and all remainders with extreme weights."""
    every = torch.arange(-0x8000, 0x8000, dtype=torch.int32)
    for edge in (0, 1, 0x7FFE, 0x7FFF, -1, -2, -0x7FFF, -0x8000, 0x1234, -0x1234):
        check_pairs(every, torch.full_like(every, edge))
    for edge in (0, 1, 2, 0x7F, 0x80, 0x3F80, 0x7F7E, 0x7F7F, 0x7F80, 0x7F81, 0x7FC0, 0x7FFF):
        check_pairs(torch.full_like(every, edge), every)
        check_pairs(torch.full_like(every, edge - 0x8000), every)


def test_an_fp32_copy_is_valid_only_for_the_weight_it_rounds_to():
    values = torch.cat([torch.randn(100_000, generator=torch.Generator().manual_seed(2)), from_bits(EDGES[:18])])
    for weight in (split(values)[0], values.to(torch.bfloat16)):  # ties away from zero, and ties to even
        assert is_rounded_from(weight, values).all()
        apart = (join(weight, compute_remainder(weight, values)).view(torch.int32) - values.view(torch.int32)).abs()
        assert apart.max() <= 1 and (apart[:100_000] == 0).float().mean() > 0.999
    bits = split(values)[0].view(torch.int16)
    clear = ((values.view(torch.int32) & 0xFFFF) != 0x8000) & (values.abs() > 1e-30)  # no ties, no zeros
    for other in (bits + 1, bits - 1, bits ^ -0x8000):
        assert not is_rounded_from(other.view(torch.bfloat16), values)[clear].any()
