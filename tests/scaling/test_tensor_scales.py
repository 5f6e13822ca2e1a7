"""FP8 scales: from the amax history, unaffected by bad readings, updated within a step, saved completely."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from narrowgauge.kernels import compute_scale
from narrowgauge.kernels.fp8_formats import FP8_MAX
from narrowgauge.scaling.tensor import TensorScales

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def make_scales(**options):
    return TensorScales({"x": E4M3, "g": E5M2}, "cpu", **options)


def feed(scales, x, g=1.0):
    scales.sites["x"].amax.fill_(x)
    scales.sites["g"].amax.fill_(g)
    scales.update()


@given(st.floats(1e-25, 1e25), st.sampled_from([E4M3, E5M2]), st.integers(0, 4))
def test_a_scale_maps_amax_to_the_largest_number(amax, dtype, margin):
    amax = torch.tensor(amax)
    scale = compute_scale(amax, FP8_MAX[dtype], margin).item()
    assert amax.item() * scale * 2**margin == pytest.approx(FP8_MAX[dtype], rel=1e-6)


@pytest.mark.parametrize("amax", [0.0, math.inf, math.nan])
def test_an_unusable_amax_gives_a_scale_of_one(amax):
    assert compute_scale(torch.tensor(amax), 448.0).item() == 1.0


@pytest.mark.parametrize("bad", [0.0, math.inf, math.nan])
def test_a_bad_amax_does_not_change_scale_and_history(bad):
    scales = make_scales(history=2)
    feed(scales, 3.0)
    before = scales.state_dict()
    for _ in range(5):
        feed(scales, bad)
    assert scales.sites["x"].scale == before["scale"][0]
    assert torch.equal(scales.history[:, 0], before["history"][:, 0])
    assert scales.sites["g"].scale == before["scale"][1]


def test_the_scale_follows_the_maximum_of_the_history():
    scales = make_scales(history=3)
    seen = []
    for amax in (1.0, 100.0, 1.0, 1.0, 1.0):
        feed(scales, amax)
        seen.append(scales.sites["x"].scale.item())
    assert seen == pytest.approx([448.0, 4.48, 4.48, 4.48, 448.0])


def test_amax_recent_uses_only_the_latest_value():
    scales = make_scales(amax="recent")
    feed(scales, 100.0)
    feed(scales, 1.0)
    assert scales.sites["x"].scale == 448.0


def test_a_jump_is_followed_within_one_update():
    scales = make_scales()
    for _ in range(20):
        feed(scales, 1.0)
    feed(scales, 1000.0)
    assert scales.sites["x"].scale.item() * 1000 == pytest.approx(448)


def test_site_views_and_inverse_scales_are_updated():
    scales = make_scales(margin=1)
    site = scales.sites["g"]
    feed(scales, 1.0, 3e-7)
    assert site.scale.item() * site.inv_scale.item() == pytest.approx(1.0, rel=1e-6)
    assert 3e-7 * site.scale.item() * 2 == pytest.approx(57344)
    assert site.amax == 0


def test_scales_are_not_used_before_the_first_update():
    scales = make_scales()
    assert not scales.delayed
    feed(scales, 1.0)
    assert scales.delayed
    assert not make_scales(mode="current").delayed
    fixed = make_scales(mode="none")
    feed(fixed, 100.0)
    assert fixed.delayed
    assert fixed.sites["x"].scale == 1.0


def test_every_field_survives_a_round_trip():
    scales = make_scales(history=4)
    for amax in (2.0, 5.0, 1.0):
        feed(scales, amax, amax / 1000)
    scales.sites["x"].amax.fill_(9.0)
    scales.sites["g"].counts.add_(torch.tensor([3, 2**40]))
    other = make_scales(history=4)
    other.load_state_dict(scales.state_dict())
    for name, value in scales.state_dict().items():
        mine = other.state_dict()[name]
        assert torch.equal(mine, value) if isinstance(value, torch.Tensor) else mine == value
    assert torch.equal(other.inv_scale, scales.inv_scale)


def test_a_state_with_other_sites_and_history_loads_what_matches():
    scales = make_scales(history=2)
    feed(scales, 2.0, 3.0)
    other = TensorScales({"new": E4M3, "g": E5M2}, "cpu", history=5)
    other.load_state_dict(scales.state_dict())
    assert other.sites["g"].scale == scales.sites["g"].scale
    assert other.sites["new"].scale == 1.0
    assert other.history[:, 1].tolist() == [3.0, 0.0, 0.0, 0.0, 0.0]


def test_every_number_passed_to_a_kernel_is_aligned():
    for site in make_scales().sites.values():
        for tensor in (site.scale, site.inv_scale, site.amax, site.counts):
            assert tensor.data_ptr() % 16 == 0
