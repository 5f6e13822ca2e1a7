"""Gradients of a fused block are compared with the original's, those of large matrices by a few products."""

import pytest
import torch

from narrowgauge.nn.fused import verify


@pytest.fixture
def condensed(monkeypatch):
    monkeypatch.setattr(verify, "LARGE", 0)


def gradients(change):
    gradient = torch.randn(256, 192, generator=torch.Generator().manual_seed(0))
    expected = {"the gradient of weight": verify._condense(gradient)}
    change(gradient)
    return verify._compare(expected, {"the gradient of weight": verify._condense(gradient)}, verify.TOLERANCE)


def change_one_value(gradient):
    gradient[17, 5] *= -1


def change_one_row(gradient):
    gradient[100] *= 1.01


def swap_columns(gradient):
    gradient[:, [3, 4]] = gradient[:, [4, 3]]


def transpose_a_part(gradient):
    gradient[:64, :64] = gradient[:64, :64].T.clone()


@pytest.mark.parametrize("change", [change_one_value, change_one_row, swap_columns, transpose_a_part])
def test_condensed_gradients_show_a_difference(condensed, change):
    assert gradients(change) == "the gradient of weight"


def test_condensed_gradients_ignore_rounding(condensed):
    assert gradients(lambda gradient: gradient.mul_(1 + 2e-6)) is None


def test_condensed_gradients_are_small(condensed):
    assert verify._condense(torch.randn(256, 192)).numel() == 4 * 256
