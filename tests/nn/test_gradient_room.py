"""What recomputed blocks keep: as much as gradients will take later, in the order of forward; results do not change."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from model_families import LANGUAGE, make_batch, without_dropout

from narrowgauge import Engine
from narrowgauge.nn.fused import gradient_room, passes
from narrowgauge.nn.fused.gradient_room import GradientRoom


def test_room_is_that_of_the_blocks_so_far():
    room = GradientRoom()
    room.enter("blocks.0", 400)
    assert not room.take(301) and room.take(200)  # 75% of 400
    room.enter("blocks.1", 400)
    assert room.take(400) and not room.take(1)
    room.enter("blocks.0", 400)  # the next forward
    assert room.take(300) and not room.take(1)


def test_a_copy_has_its_own_room():
    room = GradientRoom()
    room.enter("blocks.0", 400)
    assert not copy.deepcopy(room).take(1) and room.take(300)


def run(recipe: str, monkeypatch: pytest.MonkeyPatch) -> tuple[list[float], list[Any], list[int]]:
    """Train two steps of two batches each; return losses, weights, and how much each forward's blocks have kept."""
    kept: list[int] = []
    run_forward = passes.run_forward

    def watch(given: Any) -> Any:
        outputs, left = run_forward(given)
        if given.needed and given.plan.checkpoint == "full":
            kept.append(0 if left.kept is None else 1 if left.kept.u is None else 2)
        return outputs, left

    monkeypatch.setattr("narrowgauge.nn.fused.blocks.run_forward", watch)
    model = without_dropout(LANGUAGE["llama"](num_hidden_layers=4))
    engine = Engine(model, torch.optim.AdamW(model.parameters(), 1e-3), recipe, fused=True, accumulate=2)
    losses = []
    for number in range(4):
        tokens = make_batch(number, rows=3, length=48)
        with engine.forward():
            loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses, [parameter.detach().clone() for parameter in model.parameters()], kept


@pytest.mark.parametrize("name", ["bf16", "fp8[products=all]", "fp8[products=all,master=split,gradients=bf16]"])
def test_what_is_kept_changes_no_result(name, monkeypatch):
    full = name.replace("]", ",checkpoint=full]") if "[" in name else f"{name}[checkpoint=full]"
    losses, weights, _ = run(name, monkeypatch)
    seen = []
    for share in (0.0, 0.75, 4.0, 100.0):
        monkeypatch.setattr(gradient_room, "SHARE", share)
        again, others, kept = run(full, monkeypatch)
        assert again == losses
        assert all(torch.equal(one, other) for one, other in zip(weights, others, strict=True))
        assert kept[4:8] == [0] * 4 and kept[12:] == [0] * 4  # gradients of the first batch exist already
        seen.append(kept[:4])
    assert seen[0] == [0] * 4 and seen[3] == [2] * 4
    assert all(sum(one) <= sum(other) for one, other in itertools.pairwise(seen))
    assert any(0 < sum(one) < 8 for one in seen), seen  # something in between, too
