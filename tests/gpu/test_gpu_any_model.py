"""Users' models in FP8 on a GPU, converted layer by layer: eager and compiled losses match."""

import pytest
import torch
from torch import nn

from narrowgauge import Engine
from narrowgauge.kernels.cast_rows import cast_rows, cast_rows_reference, record_rows, record_rows_reference
from narrowgauge.kernels.inductor_lowering import teach_inductor
from narrowgauge.nn.convert import convert

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


def train_losses(build, recipe, compile, steps=12, forbid_sync=False, fused=None):
    torch.manual_seed(0)
    model = build().cuda()
    engine = Engine(model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True), recipe, clip_norm=1.0,
                    compile=compile, fused=fused)  # fmt: skip
    assert fused is not False or not engine.conversion.blocks
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


@pytest.mark.parametrize("checkpoint", ["none", "selective", "full"])
@pytest.mark.parametrize("build", [llama, bert])
def test_equal_blocks_that_are_not_fused_train_compiled(build, checkpoint):
    torch._dynamo.reset()
    recipe = f"fp8[products=all,checkpoint={checkpoint}]"
    eager, compiled = (train_losses(build, recipe, compile, fused=False) for compile in (False, True))
    assert compiled == pytest.approx(eager, rel=0.03)


@pytest.mark.parametrize("compile", [False, True])
def test_casts_do_not_synchronize(compile):
    torch._dynamo.reset()
    assert len(train_losses(net, "fp8[products=all]", compile, forbid_sync=True)) == 12


def test_a_model_is_compiled_once():
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    train_losses(net, "fp8[products=all]", True, steps=4)
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("shape", [(1024, 512), (1040, 136)])
def test_inductors_casts_match_the_reference(shape, dtype):
    import torch._inductor.lowering
    from torch._inductor.utils import run_and_get_code

    def compute(x, scales, amax, counts, rows):
        x_lp, *stats = cast_rows(2 * x, scales[1], dtype)
        return x_lp, record_rows(x_lp, *stats, amax, counts, rows, True)

    assert teach_inductor()
    torch._dynamo.reset()
    x = torch.randn(shape).exp().bfloat16()
    x.view(-1)[:6] = torch.tensor([0.0, 1e30, -1e30, 1e-30, -1e-30, torch.inf])
    rows = torch.tensor([9, 2])
    scales, tables = torch.tensor([1.0, 300.0]), (torch.zeros(4), torch.zeros(4, 2, dtype=torch.int64))
    on_gpu = [tensor.cuda() for tensor in tables]
    made, code = run_and_get_code(torch.compile(compute, fullgraph=True), x.cuda(), scales.cuda(), *on_gpu, rows)
    assert "cast_rows.default(" not in code[0]
    wanted = cast_rows_reference(2 * x, scales[1], dtype)
    wanted_t = record_rows_reference(*wanted, *tables, rows, True)
    for mine, theirs in zip(made, (wanted[0], wanted_t), strict=True):
        assert torch.equal(mine.cpu().view(torch.uint8), theirs.view(torch.uint8))
    for mine, theirs in zip(on_gpu, tables, strict=True):
        assert torch.equal(mine.cpu(), theirs)


def test_equal_layers_share_the_kernels_that_inductor_writes():
    """The scale of a cast is no constant of its kernel: else each layer would compile kernels of its own."""
    from torch._inductor.utils import fresh_cache, run_and_get_code

    def count_kernels(layers):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = nn.Sequential(
            *(nn.Sequential(nn.LayerNorm(256), nn.Linear(256, 256), nn.GELU()) for _ in range(layers))
        )
        model.cuda()
        scales = convert(model, "fp8[products=all]").scales
        x = torch.randn(1024, 256, device="cuda")
        with torch.autocast("cuda", dtype=torch.bfloat16), fresh_cache():
            model(x).float().sum().backward()
            scales.update()
            _, code = run_and_get_code(lambda: torch.compile(model, fullgraph=True)(x).float().sum().backward())
        return sum(one.count("async_compile.triton(") for one in code)

    assert count_kernels(4) <= count_kernels(3)
