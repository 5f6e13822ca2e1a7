"""Watching models of transformers: blocks of every order report what their plain modules would."""

import sys
from pathlib import Path

import pytest
import torch

from narrowgauge import Engine
from narrowgauge.gauges.watch.watch import Watch

sys.path.append(str(Path(__file__).parents[1] / "nn"))
from model_families import BLOCKS, LANGUAGE, VOCAB, without_dropout

LINEARS = {
    "llama": ("model.layers.0", ("self_attn.q_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj")),
    "bert": (
        "bert.encoder.layer.0",
        ("attention.self.query", "attention.output.dense", "intermediate.dense", "output.dense"),
    ),
    "bart": (
        "model.decoder.layers.0",
        ("self_attn.q_proj", "self_attn.out_proj", "encoder_attn.q_proj", "encoder_attn.out_proj", "fc1", "fc2"),
    ),
    "gpt-neox": (
        "gpt_neox.layers.0",
        ("attention.query_key_value", "attention.dense", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h"),
    ),
}


def read(family, fused):
    torch.manual_seed(0)
    model = without_dropout(LANGUAGE[family]()).train()
    engine = Engine(model, torch.optim.AdamW(model.parameters(), lr=1e-3), "bf16", fused=fused)
    assert len(engine.conversion.blocks) == (BLOCKS.get(family, 2) if fused else 0)
    watch = Watch(engine, every=1)
    tokens = torch.randint(3, VOCAB, (2, 16), generator=torch.Generator().manual_seed(1))
    with engine.forward():
        loss = model(input_ids=tokens, labels=tokens).loss
    engine.backward(loss)
    engine.step()
    return {(reading.kind, reading.module): reading for reading in watch.snapshots()[0].readings}


@pytest.mark.parametrize("family", LINEARS)
def test_fused_and_plain_blocks_give_the_same_readings(family):
    plain, fused = read(family, False), read(family, True)
    block, linears = LINEARS[family]
    for kind in ("activation", "gradient"):
        for name in linears:
            key = (kind, f"{block}.{name}")
            if kind == "gradient" and name in (linears[0], "mlp.up_proj"):  # stacked projections have one gradient
                assert fused[key].count >= plain[key].count
                continue
            assert fused[key].count == plain[key].count, key
            assert fused[key].mean_square == pytest.approx(plain[key].mean_square, rel=0.1), key
