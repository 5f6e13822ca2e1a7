"""Users' models in FP8 on a GPU, converted layer by layer: eager and compiled losses match."""

import pytest
import torch
from torch import nn

from narrowgauge import Engine

pytestmark = [
    pytest.mark.filterwarnings("ignore:Synchronization debug mode"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated"),
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores"),
]
transformers = pytest.importorskip("transformers")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.norm = nn.Embedding(512, 256), nn.LayerNorm(256)
        self.up, self.down, self.head = nn.Linear(256, 1024), nn.Linear(1024, 256), nn.Linear(256, 512)

    def forward(self, input_ids, labels):
        x = self.embed(input_ids)
        x = x + self.down(nn.functional.gelu(self.up(self.norm(x))))
        return (nn.functional.cross_entropy(self.head(x).flatten(0, 1).float(), labels.flatten()),)


def net():
    return Net()


def llama():
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=512, use_cache=False, **sizes))


def bert():
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4}
    quiet = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=512, **sizes, **quiet))


def train_losses(build, recipe, compile, steps=12, forbid_sync=False):
    torch.manual_seed(0)
    model = build().cuda()
    engine = Engine(model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True), recipe, clip_norm=1.0,
                    compile=compile)  # fmt: skip
    losses = []
    for step in range(steps):
        ids = torch.randint(0, 512, (8, 128), generator=torch.Generator().manual_seed(step % 2)).cuda()
        extra = {} if build is net else {"attention_mask": torch.ones_like(ids)}
        torch.cuda.set_sync_debug_mode("error" if forbid_sync and step > 4 else "default")
        try:
            with engine.forward():
                loss = engine.model(input_ids=ids, labels=ids, **extra)[0]
            engine.backward(loss)
            engine.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        losses.append(loss.detach())
    return torch.stack(losses).tolist()


@pytest.mark.parametrize("build", [net, llama, bert])
def test_compiled_models_train_like_eager_ones(build):
    torch._dynamo.reset()
    eager, compiled = (train_losses(build, "fp8[products=all]", compile) for compile in (False, True))
    assert eager[-1] < eager[0] - 0.5
    assert compiled == pytest.approx(eager, rel=0.03)
    assert eager == pytest.approx(train_losses(build, "bf16", False), rel=0.05)


@pytest.mark.parametrize("compile", [False, True])
def test_casts_do_not_synchronize(compile):
    torch._dynamo.reset()
    assert len(train_losses(net, "fp8[products=all]", compile, forbid_sync=True)) == 12
