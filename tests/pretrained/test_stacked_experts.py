"""Experts that are stored one by one are loaded into their stacked parameters without a second copy of the model."""

import itertools

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tiny_folders import MIXTURES, save

import narrowgauge as ng
from narrowgauge.optim.masters import get_other_half, has_master
from narrowgauge.pretrained import load_model, open_folder, tensor_readers
from narrowgauge.pretrained.folder import StoredTensor
from narrowgauge.pretrained.match import match_folder
from narrowgauge.pretrained.stacked_tensors import StackedTensor, find_stacking, stack

FORMS = {  # what is stored, how, and for which recipe it is loaded
    "bf16": (torch.bfloat16, False, "fp8-lean"),
    "fp32 sharded": (torch.float32, True, "bf16-lean"),
    "bf16 sharded to fp32": (torch.bfloat16, True, "fp8"),
}


@pytest.fixture(params=[128, 1 << 20])
def piece(request, monkeypatch):
    """Pieces of less than an expert, and of more; the last one is not full."""
    monkeypatch.setattr(tensor_readers, "PIECE", request.param)
    return request.param


@pytest.mark.parametrize(("name", "form"), list(itertools.product(MIXTURES, FORMS)))
def test_a_loaded_mixture_equals_that_of_transformers(tmp_path, piece, name, form):
    dtype, sharded, recipe = FORMS[form]
    save(tmp_path, name, dtype, fields=MIXTURES[name], sharded=sharded)
    expected = getattr(transformers, name).from_pretrained(tmp_path, dtype=torch.float32)
    lines = []
    model = load_model(open_folder(tmp_path), recipe, "cpu", lines.append)
    assert not lines, "transformers did not load it"
    masters, lean = ng.optim.full_precision(model), ng.recipe(recipe).master != "fp32"
    assert list(masters) == list(expected.state_dict())
    for key, value in expected.state_dict().items():
        assert torch.equal(masters[key].view(torch.int32), value.view(torch.int32)), key
    experts = [parameter for parameter in model.parameters() if parameter.dim() == 3]
    assert experts and all(has_master(parameter) is lean for parameter in experts)
    if lean and dtype is torch.bfloat16:
        assert not any(get_other_half(parameter).values.any() for parameter in experts)
    tokens = torch.arange(32).view(2, 16)
    engine = ng.Engine(model, torch.optim.AdamW(model.parameters(), 1e-3), recipe)
    with engine.forward():
        loss = model(input_ids=tokens, labels=tokens).loss
    engine.backward(loss)
    engine.step()
    torch.testing.assert_close(loss.detach(), expected(input_ids=tokens, labels=tokens).loss, rtol=0.02, atol=0)


def change(folder, edit):
    stored = load_file(folder / "model.safetensors")
    edit(stored)
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda s: s.pop("model.layers.0.mlp.experts.3.up_proj.weight"), "experts.gate_up_proj is missing"),
        (lambda s: s.pop("model.layers.1.mlp.experts.3.down_proj.weight"), r"experts.down_proj is float32 \[3, 32, 16"),
        (
            lambda s: s.update({"model.layers.0.mlp.experts.2.gate_proj.weight": torch.zeros(15, 32)}),
            "experts.gate_up_proj is missing",
        ),
        (
            lambda s: s.update({"model.layers.0.mlp.experts.4.down_proj.weight": torch.zeros(32, 16)}),
            r"experts.down_proj is float32 \[5, 32, 16",
        ),
        (
            lambda s: s.update({"model.layers.7.mlp.experts.0.down_proj.weight": torch.zeros(32, 16)}),
            "the model has no model.layers.7",
        ),
        (
            lambda s: s.update({"model.layers.0.mlp.experts.0.down_proj.weight": torch.zeros(32, 16).half()}),
            "experts.down_proj is missing",
        ),
    ],
)
def test_experts_that_do_not_belong_together_are_refused(tmp_path, edit, words):
    save(tmp_path, "Qwen3MoeForCausalLM", fields=MIXTURES["Qwen3MoeForCausalLM"])
    change(tmp_path, edit)
    with pytest.raises(ng.UsageError, match=words):
        load_model(open_folder(tmp_path), "bf16-lean", "cpu")


def test_a_file_that_shrinks_is_one_line(tmp_path):
    save(tmp_path, "Qwen3MoeForCausalLM", fields=MIXTURES["Qwen3MoeForCausalLM"])
    folder = open_folder(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-5000])
    with pytest.raises(ng.UsageError, match=r"model.safetensors cannot be loaded: it became shorter"):
        load_model(folder, "bf16-lean", "cpu")


def test_every_range_of_values_is_found(tmp_path):
    save(tmp_path, "MixtralForCausalLM", fields=MIXTURES["MixtralForCausalLM"])
    match = match_folder(open_folder(tmp_path))
    stacked = [tensor for tensor in match.stored.values() if isinstance(tensor, StackedTensor)]
    assert len(stacked) == 4 and {len(tensor.parts) for tensor in stacked} == {11, 22}
    tensor = stacked[0]
    size = tensor.parts[0].numel
    for start, stop in ((0, 1), (size - 1, size + 1), (size, 2 * size), (5, 3 * size + 7), (0, tensor.numel)):
        places = list(tensor.locate(start, stop))
        assert sum(count for _, _, count in places) == 4 * (stop - start)
        assert places[0][1] == tensor.parts[start // size].offset + 4 * (start % size)


class Steps:
    def __init__(self, *operations, sources=("a", "b"), targets=("t",)):
        made = [type(name, (), {"dim": dim})() for name, dim in operations]
        self.operations, self.source_patterns, self.target_patterns = made, list(sources), list(targets)


def test_other_operations_are_left_to_transformers():
    merge, join = ("MergeModulelist", 0), ("Concatenate", 1)
    assert find_stacking([Steps(merge, join)], "a") == ["a", "b"]
    assert find_stacking([Steps(merge, sources=["a"])], "a") == ["a"]
    for steps in (
        Steps(merge), Steps(("MergeModulelist", 1), join), Steps(merge, ("Concatenate", 0)), Steps(("Transpose", 0)),
        Steps(merge, join, ("Transpose", 0)), Steps(merge, join, targets=["t", "u"]),
    ):  # fmt: skip
        assert find_stacking([steps], "a") is None
    assert find_stacking([], "a") is None


def test_parts_of_two_dtypes_or_none_are_not_stacked(tmp_path):
    def make(dtype=torch.float32, shape=(2, 3)):
        return StoredTensor(name="x", file=tmp_path / "f", offset=0, dtype=dtype, shape=shape)

    assert stack("x", ["a"], {"a": [make(), make()]}).shape == (2, 2, 3)
    assert stack("x", ["a", "b"], {"a": [make()], "b": [make(shape=(4, 3))]}).shape == (1, 6, 3)
    for found in (
        {}, {"a": [make()]}, {"a": [make()], "b": [make(torch.bfloat16)]}, {"a": [make()], "b": [make(shape=(2, 4))]},
        {"a": [make(shape=())], "b": [make(shape=())]},
    ):  # fmt: skip
        assert stack("x", ["a", "b"], found) is None
