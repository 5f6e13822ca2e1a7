"""8-bit moments: close, never rounded to zero, and updated even if a change is smaller than a code."""

import pytest
import torch

from narrowgauge.optim import moments


def test_codes_are_near_and_keep_the_largest_exactly():
    generator = torch.Generator().manual_seed(0)
    m = torch.randn(1000, generator=generator) * torch.exp2(torch.randint(-8, 8, (1000,), generator=generator).float())
    codes, scale = moments.encode_first(m)
    back = moments.decode_first(codes, scale)
    assert (codes.dtype, scale.shape) == (torch.int8, (8,))
    spread = scale.repeat_interleave(128)[:1000]
    assert ((back - m).abs() / spread).max() < 0.0080
    assert torch.equal(back.abs().view(-1)[: 7 * 128].view(7, 128).amax(1), scale[:7])
    codes, scale = moments.encode_second(m.square(), 1)
    back = moments.decode_second(codes, scale)
    assert (codes.dtype, int(codes.min())) == (torch.uint8, 1)
    assert (back > 0).all()
    assert ((back.sqrt() - m.abs()).abs() / scale.sqrt().repeat_interleave(128)[:1000]).max() < 0.0080


def test_zeros_stay_zeros_and_extremes_stay_finite():
    for value in (0.0, 1e-38, 1e-30, 3e38):
        m = torch.full((200,), value)
        for codes, scale, decode in (
            (*moments.encode_first(m), moments.decode_first),
            (*moments.encode_second(m, 3), moments.decode_second),
        ):
            back = decode(codes, scale)
            assert torch.isfinite(back).all()
            torch.testing.assert_close(back, m, rtol=1e-5, atol=1e-36)


@pytest.mark.parametrize("target", [0.5, 2.0])
def test_a_second_moment_changes_by_less_than_a_code(target):
    """It moves by a thousandth of the difference per step; codes are up to a hundredth apart."""
    generator = torch.Generator().manual_seed(0)
    start = torch.rand(4096, generator=generator) + 0.5
    start[::128] = 4.0  # the largest of each group, and so the scale, is constant
    exact = start.clone()
    codes, scale = moments.encode_second(start, 0)
    goal = torch.where(start == 4.0, 4.0, start * target)
    for step in range(1, 1001):
        exact += (goal - exact) * 0.001
        v = moments.decode_second(codes, scale)
        codes, scale = moments.encode_second(v + (goal - v) * 0.001, step)
    drift = torch.log2(moments.decode_second(codes, scale) / exact)
    assert drift.mean().abs() < 0.01
    assert drift.std() < 0.05
