"""Readback: scalars arrive in order, with their tags and exact values."""

import torch

from narrowgauge.device_readback import Readback


def test_pushes_arrive_in_order_with_tags_and_exact_values():
    readback = Readback()
    for step in range(5):
        readback.push(
            step, {"loss": torch.tensor(0.1) * step, "count": torch.tensor(2**40 + step), "ok": torch.tensor(True)}
        )
    arrived = readback.ready()
    assert [tag for tag, _ in arrived] == list(range(5))
    assert arrived[3][1] == {"loss": (torch.tensor(0.1) * 3).item(), "count": 2**40 + 3, "ok": 1.0}
    assert readback.ready() == []


def test_later_changes_of_a_tensor_do_not_affect_a_push():
    readback, value = Readback(), torch.tensor(1.0)
    readback.push("a", {"value": value})
    value.fill_(9.0)
    assert readback.drain() == [("a", {"value": 1.0})]


def test_tensors_that_require_grad_can_be_pushed():
    readback = Readback()
    readback.push(0, {"loss": (torch.ones(3, requires_grad=True) * 2).sum()})
    assert readback.drain()[0][1] == {"loss": 6.0}
