"""Which models are compiled block by block, and which layers compute logits."""

import pytest
import torch
from torch import nn

from narrowgauge.nn.equal_blocks import find_equal_blocks
from narrowgauge.nn.find_heads import find_heads


def make_block(width=16):
    return nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))


def find(model):
    return list(find_equal_blocks(model, find_heads(model).values()))


@pytest.mark.parametrize("container", [nn.ModuleList, lambda blocks: nn.Sequential(*blocks)])
def test_equal_neighbours_in_a_list_are_blocks(container):
    model = nn.ModuleDict({"embedding": nn.Embedding(4000, 16), "layers": container([make_block() for _ in range(4)])})
    assert find(model) == [f"layers.{number}" for number in range(4)]


def test_a_tied_head_does_not_count_as_a_part_of_the_model():
    model = nn.ModuleDict({
        "embedding": nn.Embedding(4000, 16),
        "layers": nn.ModuleList(make_block() for _ in range(4)),
        "head": nn.Linear(16, 4000, bias=False),
    })  # fmt: skip
    assert find(model) == []
    model["head"].weight = model["embedding"].weight
    assert len(find(model)) == 4
    assert list(find_heads(model)) == ["head"]


def test_models_that_are_not_mostly_equal_blocks_are_compiled_as_one():
    assert find(nn.Sequential(*(make_block(16 * width) for width in (1, 2, 3, 4)))) == []
    assert find(nn.ModuleList(make_block() for _ in range(2))) == []
    assert find(nn.ModuleList(nn.Linear(16, 16) for _ in range(8))) == []
    assert find(nn.ModuleDict({"few": nn.ModuleList(make_block() for _ in range(3)), "much": make_block(64)})) == []


def test_stages_with_equal_blocks_inside_are_found():
    stages = nn.Sequential(*(nn.Sequential(*(make_block(width) for _ in range(3))) for width in (16, 32)))
    assert find(stages) == [f"{stage}.{block}" for stage in range(2) for block in range(3)]


def test_frozen_blocks_and_blocks_of_another_dtype_are_not_equal_to_others():
    blocks = nn.ModuleList(make_block() for _ in range(6))
    blocks[0].requires_grad_(False)
    blocks[1].to(torch.bfloat16)
    assert find(blocks) == []
    blocks.extend([make_block() for _ in range(40)])
    assert len(find(blocks)) == 44


def test_wide_layers_of_blocks_are_no_heads():
    wide = nn.Linear(16, 8192)
    assert list(find_heads(nn.ModuleDict({"head": wide}))) == ["head"]
    assert list(find_heads(nn.ModuleList([nn.ModuleDict({"up": wide})]))) == []
