"""Muon on models that others wrote: which parameters it gets, and that they train."""

from __future__ import annotations

import re
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import narrowgauge as ng

transformers = pytest.importorskip("transformers")
BASE = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64,
}  # fmt: skip
ATTENTION = [f"model.layers.*.self_attn.{name}_proj.weight" for name in "qkvo"]
MLP = [f"model.layers.*.mlp.{name}_proj.weight" for name in ("gate", "up", "down")]


def make_llama() -> nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**BASE))


def make_qwen3() -> nn.Module:
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**BASE, tie_word_embeddings=True))


def make_gpt2() -> nn.Module:
    sizes = {"n_layer": 2, "n_embd": 64, "n_head": 4, "vocab_size": 128, "n_positions": 64}
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = transformers.GPT2Config(**sizes, **dropout, bos_token_id=0, eos_token_id=0)
    return transformers.GPT2LMHeadModel(config)


def make_vit() -> nn.Module:
    sizes = {k: BASE[k] for k in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")}
    return transformers.ViTForImageClassification(transformers.ViTConfig(**sizes, image_size=16, patch_size=8))


def make_mixture() -> nn.Module:
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "decoder_sparse_step": 1}
    return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**BASE, **sizes))


def make_mamba() -> nn.Module:
    sizes = {"vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 2, "state_size": 8}
    return transformers.MambaForCausalLM(transformers.MambaConfig(**sizes))


class NanoGPT(nn.Module):
    """As in nanoGPT: a ModuleDict with a ModuleList, and a head that is tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        block = lambda: nn.ModuleDict(  # noqa: E731
            {"ln": nn.LayerNorm(64), "c_fc": nn.Linear(64, 256), "c_proj": nn.Linear(256, 64)}
        )
        self.transformer = nn.ModuleDict(
            {"wte": nn.Embedding(128, 64), "wpe": nn.Embedding(64, 64), "h": nn.ModuleList([block(), block()])}
        )
        self.lm_head = nn.Linear(64, 128, bias=False)
        self.transformer["wte"].weight = self.lm_head.weight

    def forward(self, ids: Tensor) -> Tensor:
        parts: Any = self.transformer
        x = parts["wte"](ids) + parts["wpe"](torch.arange(ids.shape[1]))
        for block in parts["h"]:
            x = x + block["c_proj"](nn.functional.gelu(block["c_fc"](block["ln"](x))))
        logits: Tensor = self.lm_head(x)
        return logits


class Swin(nn.Module):
    """A block with a table of position biases, as Swin's, and a head in a Sequential."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        self.blocks[0].relative_position_bias_table = nn.Parameter(torch.zeros(9, 4))
        self.head = nn.Sequential(nn.Dropout(), nn.Linear(8, 3))


CASES: dict[str, tuple[Any, list[str]]] = {
    "Llama": (make_llama, [*ATTENTION, *MLP]),
    "Qwen3, tied": (make_qwen3, [*ATTENTION, *MLP]),
    "GPT-2, Conv1D": (make_gpt2, [f"transformer.h.*.{name}.weight" for name in
                                  ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")]),
    "ViT": (make_vit, [*(f"vit.layers.*.attention.{name}_proj.weight" for name in "qkvo"),
                       "vit.layers.*.mlp.fc*.weight"]),
    "stacked experts": (make_mixture, [*ATTENTION, "model.layers.*.mlp.gate.weight"]),
    "Mamba": (make_mamba, [f"backbone.layers.*.mixer.{name}.weight" for name in
                           ("in_proj", "x_proj", "dt_proj", "out_proj")]),
    "nanoGPT": (NanoGPT, ["transformer.h.*.c_fc.weight", "transformer.h.*.c_proj.weight"]),
    "table and head in Sequential": (Swin, ["blocks.*.weight"]),
    "plain Sequential": (lambda: nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 2)), ["*.weight"]),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_muon_gets_the_matrices_of_blocks(name: str) -> None:
    make, expected = CASES[name]
    model = make()
    names = {id(p): re.sub(r"\d+", "*", path) for path, p in model.named_parameters()}
    inner, *others = ng.optim.split_for_muon(model)
    assert inner["rule"] == "muon"
    assert {names[id(p)] for p in inner["params"]} == set(expected)
    assert all(group["rule"] == "adamw" for group in others)
    assert sum(len(group["params"]) for group in (inner, *others)) == len(list(model.parameters()))


def test_the_last_layer_of_a_sequential_is_a_head() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 2))
    inner = ng.optim.split_for_muon(model)[0]["params"]
    assert [tuple(p.shape) for p in inner] == [(8, 4), (8, 8)]
    single = nn.Sequential(nn.Linear(4, 8))
    assert ng.optim.split_for_muon(single)[0]["rule"] == "muon"
    blocks = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8)) for _ in range(3)))
    assert len(ng.optim.split_for_muon(blocks)[0]["params"]) == 3


class Attributes(nn.Module):
    """Layers that are attributes of the model, with a head that has the shape of another matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(32, 8)
        self.recurrent = nn.LSTM(8, 8)
        self.lm_head = nn.Linear(8, 32)


class Named(nn.Module):
    """Two heads in a list; heads of attention inside of a block; a gate with one output, a scale with one row."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            [nn.ModuleDict({"heads": nn.ModuleList([nn.Linear(8, 4)]), "gate": nn.Linear(8, 1)})]
        )
        self.blocks[0].scale = nn.Parameter(torch.ones(1, 8))
        self.heads = nn.ModuleList([nn.Linear(8, 3), nn.Linear(8, 3)])


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stage = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8))
        self.fc = nn.Linear(8, 10)


class Perceptron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 2)


@pytest.mark.parametrize(
    "make, expected",
    [
        (Attributes, ["recurrent.weight_ih_l0", "recurrent.weight_hh_l0"]),
        (Named, ["blocks.0.heads.0.weight"]),
        (Convolutions, []),
        (Perceptron, ["first.weight", "second.weight"]),
        (lambda: nn.Linear(4, 4), ["weight"]),
    ],
)
def test_heads_and_vectors_in_disguise_are_not_for_muon(make: Any, expected: list[str]) -> None:
    model = make()
    names = {id(p): name for name, p in model.named_parameters()}
    groups = ng.optim.split_for_muon(model)
    assert [names[id(p)] for group in groups if group["rule"] == "muon" for p in group["params"]] == expected
    assert sum(len(group["params"]) for group in groups) == len(names)


def compute_loss(model: nn.Module, name: str) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    if name == "ViT":
        images, labels = torch.randn(4, 3, 16, 16, generator=generator), torch.tensor([0, 1, 0, 1])
        return model(pixel_values=images, labels=labels).loss
    ids = torch.randint(0, 128, (2, 16), generator=generator)
    if name == "nanoGPT":
        return nn.functional.cross_entropy(model(ids).float().flatten(0, 1), ids.flatten())
    return model(input_ids=ids, labels=ids).loss


@pytest.mark.parametrize("recipe", ["bf16", "fp8-lean[products=all]"])
@pytest.mark.parametrize("name", ["Llama", "Qwen3, tied", "GPT-2, Conv1D", "ViT", "nanoGPT"])
def test_models_of_others_train_with_muon(name: str, recipe: str) -> None:
    torch.manual_seed(0)
    model = CASES[name][0]()
    optimizer = ng.optim.Muon(ng.optim.split_for_muon(model), lr=3e-3, adjust_lr_fn="match_rms_adamw")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what transformers says about the model is not the subject
        engine = ng.Engine(model, optimizer, recipe, clip_norm=1.0)
        losses = []
        for _ in range(8):
            with engine.forward():
                loss = compute_loss(engine.model, name)
            engine.backward(loss)
            assert engine.step().applied
            losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0], losses


def test_adamw_rates_do_not_depend_on_the_layout_of_a_weight() -> None:
    """GPT-2's Conv1D has the transposed weight of a Linear: the same step with match_rms_adamw, not with original."""
    torch.manual_seed(0)
    weight, gradient = torch.randn(64, 32), torch.randn(64, 32)
    steps = {}
    for rule in ("match_rms_adamw", "original"):
        linear, conv = nn.Parameter(weight.clone()), nn.Parameter(weight.T.contiguous())
        linear.grad, conv.grad = gradient.clone(), gradient.T.contiguous()
        ng.optim.Muon([linear, conv], lr=0.1, weight_decay=0.0, adjust_lr_fn=rule).step()
        steps[rule] = float((linear.detach() - weight).norm() / (conv.detach() - weight.T).norm())
    assert steps["match_rms_adamw"] == pytest.approx(1.0, rel=1e-3)
    assert steps["original"] == pytest.approx(2**0.5, rel=1e-2)
