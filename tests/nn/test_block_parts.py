"""Parts of blocks besides norms and projections: masks, dropout, stochastic depth, further outputs, settings."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from model_families import LANGUAGE, DropPath, ImageBlock, NanoBlock, make_batch, without_dropout
from torch import Tensor, nn

from narrowgauge.errors import UsageError
from narrowgauge.nn.blocks.find import FoundBlocks, find_blocks
from narrowgauge.nn.fused.modules import FusedBlock, mark_parts
from narrowgauge.nn.fused.verify import find_difference, make_fp32_plan
from narrowgauge.nn.module_changes import apply_change


def find(model: nn.Module) -> FoundBlocks:
    return find_blocks(model, torch.device("cpu"), find_difference)


def fuse(model: nn.Module) -> nn.Module:
    """Fuse the blocks of a copy with FP32 products."""
    made = copy.deepcopy(model)
    found = find(made)
    assert found.specs, found.reasons
    for path, spec in found.specs.items():
        block = made.get_submodule(path)
        mark_parts(block, spec)
        apply_change(block, FusedBlock(make_fp32_plan(block, spec)))
    return made


def run(model: nn.Module, x: Tensor, **inputs: Any) -> list[Tensor]:
    """Return the output and the gradients of all parameters."""
    torch.manual_seed(3)
    output = model(x, **inputs)
    output.square().sum().backward()
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    return [output.detach(), *grads]


def make_encoder(nested: bool = False, **options: Any) -> nn.TransformerEncoder:
    torch.manual_seed(0)
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 4, 96, 0.0, **options), 2, None, nested)


def make_masks(length: int) -> dict[str, dict[str, Any]]:
    future = torch.ones(length, length, dtype=torch.bool).triu(1)
    padding = torch.zeros(2, length, dtype=torch.bool)
    padding[0, -3:] = True
    causal = nn.Transformer.generate_square_subsequent_mask(length)
    return {
        "none": {}, "bool": {"mask": future}, "float": {"mask": causal}, "causal": {"mask": causal, "is_causal": True},
        "padding": {"src_key_padding_mask": padding}, "both": {"mask": future, "src_key_padding_mask": padding},
        "per head": {"mask": future.expand(8, -1, -1)},
    }  # fmt: skip


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
def test_masks_of_torchs_encoder_layers(norm_first: bool, batch_first: bool) -> None:
    model = make_encoder(norm_first=norm_first, batch_first=batch_first)
    fused = fuse(model)
    x = torch.randn(2, 9, 64)
    x = x if batch_first else x.transpose(0, 1)
    for masks in make_masks(9).values():
        for one, two in zip(run(model, x, **masks), run(fused, x, **masks), strict=True):
            torch.testing.assert_close(two, one, rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_evaluation_of_torchs_encoder_layers() -> None:
    """Without gradients torch calls one kernel for a whole layer, and makes ragged batches from padding masks."""
    model = make_encoder(nested=True, batch_first=True).eval()
    fused, x = fuse(model).eval(), torch.randn(2, 9, 64)
    for masks in make_masks(9).values():
        with torch.no_grad():
            expected, found = model(x, **masks), fused(x, **masks)
        seen = ~masks.get("src_key_padding_mask", torch.zeros(2, 9, dtype=torch.bool))
        torch.testing.assert_close(found[seen[:, : found.shape[1]]], expected[seen[:, : expected.shape[1]]])


def test_activations_that_are_functions_are_not_confused() -> None:
    for function, name in ((nn.functional.silu, "silu"), (nn.functional.relu6, None), (nn.functional.gelu, "gelu")):
        found = find(make_encoder(activation=function))
        assert {spec.activation for spec in found.specs.values()} == ({name} if name else set())


class Masked(NanoBlock):
    """A mask that also changes the residual stream."""

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        y = super().forward(x)
        return y if attention_mask is None else y * attention_mask[:, 0, -1, :, None].exp()


def test_masks_are_verified() -> None:
    found = find(nn.ModuleList([Masked(64, 4, True)]))
    assert "with attention_mask, its output differs" in found.reasons["0"]


class Capped(NanoBlock):
    """Attention whose scores have a limit that small ones do not reach."""

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.c_attn(self.ln_1(x)).split(width, 2)
        q, k, v = (part.view(batch, length, self.n_head, -1).transpose(1, 2) for part in parts)
        scores = (q @ k.transpose(2, 3) / 4).clamp(-20, 20).masked_fill(torch.ones(length, length).triu(1) > 0, -1e9)
        mixed = (scores.softmax(-1) @ v).transpose(1, 2).reshape(batch, length, width)
        x = x + self.c_proj(mixed)
        return x + self.c_out(nn.functional.gelu(self.c_fc(self.ln_2(x))))


def test_limits_of_scores_are_seen() -> None:
    assert find(nn.ModuleList([Capped(64, 4, True)])).specs["0"].attention.kind == "own"


class Configured(NanoBlock):
    """Reads its configuration when it runs."""

    def __init__(self, **config: Any) -> None:
        super().__init__(64, 4, True)
        self.config = SimpleNamespace(dropout=0.0, doubled=False, **config)

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return 2 * y if self.config.doubled else y


def test_blocks_with_different_configurations_are_not_confused() -> None:
    plain, doubled = Configured(), Configured()
    doubled.config.doubled = True
    found = find(nn.ModuleList([plain, doubled]))
    assert list(found.specs) == ["0"] and list(found.reasons) == ["1"]


class DropoutOfConfig(NanoBlock):
    """Dropout whose probability is no attribute of a module."""

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.c_attn(self.ln_1(x)).split(width, 2)
        q, k, v = (part.view(batch, length, self.n_head, -1).transpose(1, 2) for part in parts)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, length, width)
        x = x + nn.functional.dropout(self.c_proj(mixed), 0.0, self.training)
        return x + self.c_out(nn.functional.gelu(self.c_fc(self.ln_2(x))))


def test_the_probability_of_dropout_must_be_found() -> None:
    found = find(nn.ModuleList([DropoutOfConfig(64, 4, True)]))
    assert "probability of a dropout" in found.reasons["0"]


@pytest.mark.parametrize("options", [{"drop": 0.2}, {"drop_path": 0.5}, {"drop": 0.1, "drop_path": 0.3}])
def test_dropout_and_stochastic_depth_draw_the_same_numbers(options: dict[str, float]) -> None:
    model = nn.Sequential(ImageBlock(64, 4, **options), ImageBlock(64, 4, **options)).train()
    fused, x = fuse(model), torch.randn(6, 9, 64)
    for one, two in zip(run(model, x), run(fused, x), strict=True):
        torch.testing.assert_close(two, one, rtol=1e-4, atol=1e-4)


def test_probabilities_may_change_later() -> None:
    model = nn.Sequential(ImageBlock(64, 4, drop=0.2, drop_path=0.1)).train()
    fused, x = fuse(model), torch.randn(6, 9, 64)
    for one in (model, fused):
        for module in one.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.4
            elif isinstance(module, DropPath):
                module.drop_prob = 0.6
    for one, two in zip(run(model, x), run(fused, x), strict=True):
        torch.testing.assert_close(two, one, rtol=1e-4, atol=1e-4)


def test_attention_weights_are_there_if_they_are_asked_for() -> None:
    model = without_dropout(LANGUAGE["gpt-j"](attn_implementation="eager")).eval()
    fused, tokens = fuse(model), make_batch()
    expected = model(input_ids=tokens, output_attentions=True).attentions
    for one, two in zip(expected, fused(input_ids=tokens, output_attentions=True).attentions, strict=True):
        torch.testing.assert_close(two, one, rtol=1e-4, atol=1e-5)
    block: Any = fused.transformer.h[0]  # type: ignore[union-attr,index]
    _, weights = block(torch.randn(2, 5, 64), position_ids=torch.arange(5)[None])
    with pytest.raises(UsageError, match="does not return attention weights"):
        weights.mean()


def test_torchvisions_encoder_blocks() -> None:
    vision = pytest.importorskip("torchvision.models")
    model = vision.VisionTransformer(32, 8, 2, 4, 64, 96)
    assert len(find(model).specs) == 2
