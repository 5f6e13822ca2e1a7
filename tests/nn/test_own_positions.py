"""Models of transformers that make their positions themselves search them for documents once, not in every forward."""

import copy

import pytest
import torch
import transformers
from model_families import LANGUAGE, without_dropout
from torch import nn
from transformers import masking_utils

from narrowgauge import Engine
from narrowgauge.nn.convert import convert
from narrowgauge.nn.module_changes import apply_change, find_change, remove_changes
from narrowgauge.nn.own_positions import OwnPositions, skip_search

IDS = torch.arange(32).view(2, 16) % 50


@pytest.fixture
def searches(monkeypatch):
    """Count searches of transformers' own function."""
    found, search = [], masking_utils.find_packed_sequence_indices
    search = getattr(search, "__wrapped__", search)

    def count(position_ids):
        found.append(position_ids.shape)
        return search(position_ids)

    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", count)
    return found


def make(family="llama"):
    return without_dropout(LANGUAGE[family]())


def run(model, **more):
    return model(input_ids=IDS, use_cache=False, **more).logits


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "gemma2", "gpt-neox", "phi3", "gpt2"])
def test_own_positions_are_searched_once(family, searches):
    model = make(family)
    assert skip_search(model)
    made = [run(model) for _ in range(3)]
    assert len(searches) <= 1 and torch.equal(made[0], made[2])


def test_positions_that_are_given_are_always_searched(searches):
    model = make()
    plain = copy.deepcopy(model)
    assert skip_search(model) == ["model"]
    packed = torch.cat([torch.arange(5), torch.arange(11)]).expand(2, -1)
    straight = torch.arange(16).expand(2, -1)
    for positions in (None, packed, None, straight, packed):
        found, expected = (run(one, position_ids=positions) for one in (model, plain))
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert len(searches) == 5 + 4, "of the unchanged model all, of the changed one the first and those given"
    by_place = model.model(IDS, None, packed, use_cache=False)[0]
    assert torch.equal(by_place, plain.model(IDS, None, packed, use_cache=False)[0])


class Restarting(nn.Module):
    """A model whose own positions are two documents."""

    def forward(self, x, position_ids=None):
        return masking_utils.find_packed_sequence_indices(torch.arange(4).repeat(2)[None])


def test_own_positions_with_documents_are_always_searched(searches):
    skip_search(make())  # transformers' function asks from now on
    model, change = Restarting(), OwnPositions(1)
    apply_change(model, change)
    assert all(model(IDS)[0].tolist() == [0] * 4 + [1] * 4 for _ in range(3))
    assert len(searches) == 3 and change.has_none is False


def test_engines_convert_and_restore(searches):
    model = make()
    engine = Engine(model, torch.optim.AdamW(model.parameters()), "fp8")
    assert find_change(model.model, OwnPositions) is not None
    for _ in range(3):
        with engine.forward():
            loss = engine.model(input_ids=IDS, labels=IDS, use_cache=False).loss
        engine.backward(loss)
        engine.step()
    assert len(searches) == 1
    remove_changes(model)
    run(model), run(model)
    assert len(searches) == 3


def test_copies_keep_the_answer_and_other_models_are_not_asked(searches):
    model = make()
    convert(model, "bf16")
    run(model)
    again = copy.deepcopy(model)
    run(again)
    assert len(searches) == 1
    run(make())
    assert len(searches) == 2
    assert isinstance(model, transformers.LlamaForCausalLM)
