"""The inventory of matrices lists each parameter once, with its format and the reason, and matches the products."""

import types

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, prune
from torch.nn.utils.parametrize import register_parametrization
from torch.utils._python_dispatch import TorchDispatchMode

import narrowgauge as ng
from narrowgauge import Engine
from narrowgauge.models.gpt import GPT, GPTConfig
from narrowgauge.models.llama import Llama, LlamaConfig
from narrowgauge.nn.convert import convert

RECIPES = ["fp32", "bf16", "fp16", "fp8", "bf16-lean", "fp8-lean"]
SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}


class Empty(nn.Linear):
    """A subclass that changes nothing."""


class Named(nn.Linear):
    def __init__(self, width):
        super().__init__(width, width)

    def extra_repr(self):
        return "mine"


class Doubled(nn.Linear):
    """A subclass with its own forward."""

    def forward(self, x):
        return 2 * F.linear(x, self.weight, self.bias)


class LowRank(nn.Module):
    """A parametrization with its own matrices."""

    def __init__(self, width):
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(width, 4)), nn.Parameter(torch.zeros(4, width))

    def forward(self, weight):
        return weight + self.a @ self.b


class Bag(nn.Module):
    """One module of every type, with its own matrices, a tied head and a stack of experts."""

    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(48, 32), nn.Linear(32, 48, bias=False)
        self.head.weight = self.words.weight
        self.bag = nn.EmbeddingBag(16, 32)
        self.empty, self.doubled = Empty(32, 32), Doubled(32, 32)
        self.normed = parametrizations.weight_norm(nn.Linear(32, 32))
        self.spectral = parametrizations.spectral_norm(nn.Linear(32, 32))
        self.low = nn.Linear(32, 32)
        register_parametrization(self.low, "weight", LowRank(32))
        self.pruned = prune.l1_unstructured(nn.Linear(32, 32), "weight", 0.3)
        self.attention = nn.MultiheadAttention(32, 4, add_bias_kv=True)
        self.lstm, self.cell = nn.LSTM(32, 32), nn.GRUCell(32, 32)
        self.form, self.image = nn.Bilinear(32, 32, 8), nn.Conv2d(3, 8, 3)
        self.wide_norm = nn.LayerNorm((4, 32))
        self.matrix = nn.Parameter(torch.randn(32, 16))
        self.waves = nn.Parameter(torch.randn(8, 8, dtype=torch.complex64))
        self.experts = Stack()
        self.again = self.empty  # the same module twice


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.num_experts, self.top_k = 4, 1
        self.up, self.up_bias = nn.Parameter(torch.randn(4, 32, 32)), nn.Parameter(torch.zeros(4, 32))


def huggingface(name, head, **options):
    def build():
        transformers = pytest.importorskip("transformers")
        return getattr(transformers, f"{name}{head}")(getattr(transformers, f"{name}Config")(**options))

    return build


ZOO = {
    "bag": Bag,
    "transformer": lambda: nn.Transformer(32, 4, 1, 1, 64, batch_first=True),
    "encoder": lambda: nn.TransformerEncoderLayer(32, 4, 64),
    "gru": lambda: nn.GRU(32, 32, num_layers=2, bidirectional=True),
    "lstm": lambda: nn.LSTM(32, 32, proj_size=16),
    "convolutions": lambda: nn.Sequential(
        nn.Conv1d(4, 8, 3), nn.BatchNorm1d(8), nn.ConvTranspose1d(8, 4, 3), nn.Flatten(), nn.LazyLinear(5)
    ),
    "gpt": lambda: GPT(GPTConfig(layers=2, width=32, heads=2, vocab=64, context=16)),
    "llama": lambda: Llama(LlamaConfig(layers=2, width=32, heads=2, kv_heads=2, hidden=48, vocab=64, context=16)),
    "hf-bert": huggingface("Bert", "ForMaskedLM", **SMALL, vocab_size=64),
    "hf-gpt2": huggingface("GPT2", "LMHeadModel", n_embd=32, n_layer=2, n_head=4, vocab_size=64, n_positions=32),
    "hf-llama": huggingface("Llama", "ForCausalLM", **SMALL, vocab_size=64, pad_token_id=0),
    "hf-t5": huggingface(
        "T5", "ForConditionalGeneration", d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4, vocab_size=64
    ),
    "hf-vit": huggingface("ViT", "ForImageClassification", **SMALL, image_size=16, patch_size=4),
    "hf-mixtral": huggingface(
        "Mixtral", "ForCausalLM", **SMALL, num_key_value_heads=4, vocab_size=64, num_local_experts=4
    ),
    "hf-whisper": huggingface(
        "Whisper", "ForConditionalGeneration", d_model=32, encoder_layers=1, decoder_layers=1, encoder_ffn_dim=64,
        encoder_attention_heads=4, decoder_attention_heads=4, decoder_ffn_dim=64, vocab_size=64, pad_token_id=0,
        bos_token_id=1, eos_token_id=2, decoder_start_token_id=1, num_mel_bins=8, max_source_positions=16,
        max_target_positions=16, suppress_tokens=[], begin_suppress_tokens=[],
    ),
}  # fmt: skip


def matrices_of(model):
    """Return name and size of every matrix; shared ones are listed once."""
    found = {name: p for name, p in model.named_parameters() if isinstance(p, nn.UninitializedParameter) or p.dim() > 1}
    return {id(p): name for name, p in found.items()}


@pytest.mark.parametrize("name", ZOO)
def test_every_matrix_is_listed_exactly_once(name):
    model = ZOO[name]()
    every = dict(model.named_parameters(remove_duplicate=False))
    for recipe in ("fp8", "bf16", "fp16"):
        report = convert(model, recipe)
        named = [matrix.name for matrix in report.matrices]
        assert len(set(named)) == len(named)
        assert sorted(id(every[n]) for n in named) == sorted(matrices_of(model)), recipe
        for matrix in report.matrices:
            lazy = isinstance(every[matrix.name], nn.UninitializedParameter)
            assert lazy or (matrix.size, matrix.shape) == (every[matrix.name].numel(), tuple(every[matrix.name].shape))
            assert matrix.reason and len(matrix.formats) in (0, 3)
        lines = [line for line in str(report).splitlines() if not line.startswith("not fused: ")]
        assert len(lines) == len(named) and len(report.explain_unfused()) <= len(report.unfused)
        assert "\n" not in report.summary()
        ng.nn.module_changes.remove_changes(model)


def by_path(model, recipe="fp8"):
    return {matrix.path: matrix for matrix in convert(model, recipe).matrices}


def test_each_class_of_module_is_listed_with_its_format():
    found = by_path(Bag())
    kinds = {path: (m.kind, m.formats[0] if m.formats else "-") for path, m in found.items()}
    assert kinds == {
        "head": ("head", "fp8"),
        "bag": ("embedding", "-"),
        "empty": ("linear", "fp8"),
        "doubled": ("linear", "bf16"),
        "normed.parametrizations.weight.original0": ("computed", "bf16"),
        "normed.parametrizations.weight.original1": ("computed", "bf16"),
        "spectral.parametrizations.weight.original": ("computed", "bf16"),
        "low.parametrizations.weight.original": ("computed", "bf16"),
        "low.parametrizations.weight.0.a": ("computed", "bf16"),
        "low.parametrizations.weight.0.b": ("computed", "bf16"),
        "pruned.weight_orig": ("computed", "bf16"),
        "attention.in_proj_weight": ("attention", "bf16"),
        "attention.out_proj.weight": ("attention", "bf16"),
        "attention.bias_k": ("bias", "-"),
        "attention.bias_v": ("bias", "-"),
        "lstm.weight_ih_l0": ("recurrent", "bf16"),
        "lstm.weight_hh_l0": ("recurrent", "bf16"),
        "cell.weight_ih": ("recurrent", "bf16"),
        "cell.weight_hh": ("recurrent", "bf16"),
        "form": ("bilinear", "fp32"),
        "image": ("convolution", "bf16"),
        "wide_norm": ("norm", "-"),
        "wide_norm.bias": ("norm", "-"),
        "matrix": ("raw", "bf16"),
        "waves": ("raw", "complex64"),
        "experts.up": ("experts", "bf16"),
        "experts.up_bias": ("bias", "-"),
    }
    assert "shared with words" in found["head"].reason
    assert "Doubled has its own forward" in found["doubled"].reason and found["doubled"].assumed
    assert "Bag's own forward" in found["matrix"].reason and found["matrix"].assumed
    assert found["experts.up"].active == 0.25 and found["image"].active is None


@pytest.mark.parametrize("layer", [Empty(32, 32), Named(32)], ids=["empty", "named"])
def test_a_subclass_without_its_own_forward_is_converted_and_trains(layer):
    torch.manual_seed(0)
    model = nn.Sequential(layer, nn.GELU(), nn.Linear(32, 16))
    engine = Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), "fp8")
    assert [one.part_of for one in engine.conversion.layers] == ["linear", "linear"]
    assert isinstance(model[0], type(layer)) and model[0].extra_repr() == layer.extra_repr()
    before = layer.weight.detach().clone()
    with engine.forward():
        loss = model(torch.randn(16, 32)).float().square().mean()
    engine.backward(loss)
    assert engine.step().applied and not torch.equal(before, layer.weight)
    assert type(engine.detach()[0]) is type(layer)


@pytest.mark.parametrize("recipe", ["fp8", "fp8-lean", "bf16"])
def test_a_replaced_forward_is_still_called(recipe):
    torch.manual_seed(0)
    replaced, model = nn.Linear(32, 32), None
    model = nn.Sequential(replaced, Doubled(32, 32))
    replaced.forward = types.MethodType(lambda self, x: 3 * F.linear(x, self.weight, self.bias), replaced)
    x = torch.randn(16, 32)
    exact = model(x).detach()
    engine = Engine(model, torch.optim.AdamW(model.parameters()), recipe)
    with engine.evaluating():
        made = model(x).float()
    torch.testing.assert_close(made, exact, rtol=0.05, atol=0.05)
    reasons = [matrix.reason for matrix in engine.conversion.matrices]
    assert all(("own forward" in reason) for reason in reasons)
    assert not any(layer.part_of == "linear" for layer in engine.conversion.layers)


def test_a_block_with_a_replaced_forward_is_not_fused():
    model = GPT(GPTConfig(layers=2, width=32, heads=2, vocab=64, context=16))
    up = model.blocks[1].up
    up.forward = types.MethodType(lambda self, x: F.linear(x, self.weight) * 0, up)
    report = convert(model, "fp8")
    assert report.blocks == ["blocks.0"]
    assert "own forward" in next(m for m in report.matrices if m.path == "blocks.1.up").reason


PRODUCTS = {
    torch.ops.aten.mm.default: (0, 1),
    torch.ops.aten.addmm.default: (1, 2),
    torch.ops.aten.bmm.default: (0, 1),
    torch.ops.aten.convolution.default: (0, 1),
    torch.ops.aten._grouped_mm.default: (0, 1),
    torch.ops.aten._trilinear.default: (0, 1, 2),
    torch.ops.aten.mkldnn_rnn_layer.default: (1, 2),
}


@pytest.mark.parametrize("part", ["blocks.0", "blocks.0.norm1", "norm", "lm_head", "tok"])
def test_methods_replaced_in_a_fused_model_are_still_called(part):
    torch.manual_seed(0)
    model = GPT(GPTConfig(layers=2, width=32, heads=2, vocab=64, context=16))
    module = model.get_submodule(part)
    calls, own = [], module.forward

    def replaced(*args, **kwargs):
        calls.append(part)
        return own(*args, **kwargs)

    module.forward = replaced
    engine = Engine(model, torch.optim.AdamW(model.parameters()), "fp8")
    ids = torch.randint(64, (2, 16))
    with engine.forward():
        loss = model(ids, ids)
    engine.backward(loss)
    assert engine.step().applied
    assert calls


@pytest.mark.parametrize("method", ["finish", "trunk"])
def test_a_replaced_finish_or_trunk_is_still_called(method):
    model = GPT(GPTConfig(layers=2, width=32, heads=2, vocab=64, context=16))
    calls, own = [], getattr(model, method)
    setattr(model, method, lambda *args, **kwargs: (calls.append(1), own(*args, **kwargs))[1])
    engine = Engine(model, torch.optim.AdamW(model.parameters()), "fp8")
    ids = torch.randint(64, (2, 16))
    with engine.forward():
        model(ids, ids)
    assert calls


class ProductRecorder(TorchDispatchMode):
    """Records by shape which matrices products read. Entered outside of emulation, where operands are FP32."""

    def __init__(self):
        super().__init__()
        self.narrow = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in PRODUCTS:
            operands = [args[place] for place in PRODUCTS[func]]
            self.narrow.append(all(torch.equal(x.float(), x.bfloat16().float()) for x in operands))
        return func(*args, **(kwargs or {}))


class Called(nn.Module):
    """Calls a module by a given function and returns the mean."""

    def __init__(self, inner, call):
        super().__init__()
        self.inner, self.call = inner, call

    def forward(self, x):
        return self.call(self.inner, x)


PRODUCT_MODELS = {
    "convolution": lambda: Called(nn.Conv1d(32, 16, 3), lambda m, x: m(x.t()[None])),
    "transposed": lambda: Called(nn.ConvTranspose1d(32, 16, 3), lambda m, x: m(x.t()[None])),
    "attention": lambda: Called(nn.MultiheadAttention(32, 4), lambda m, x: m(x, x, x)[0]),
    "cell": lambda: Called(nn.LSTMCell(32, 32), lambda m, x: m(x)[0]),
    "gru": lambda: Called(nn.GRU(32, 32), lambda m, x: m(x[None])[0]),
    "lstm": lambda: Called(nn.LSTM(32, 32), lambda m, x: m(x[None])[0]),
    "bilinear": lambda: Called(nn.Bilinear(32, 32, 8), lambda m, x: m(x, x)),
    "weight_norm": lambda: Called(parametrizations.weight_norm(nn.Linear(32, 32)), lambda m, x: m(x)),
    "spectral_norm": lambda: Called(parametrizations.spectral_norm(nn.Linear(32, 32)), lambda m, x: m(x)),
    "pruned": lambda: Called(prune.l1_unstructured(nn.Linear(32, 32), "weight", 0.3), lambda m, x: m(x)),
    "subclass": lambda: Called(Doubled(32, 32), lambda m, x: m(x)),
    "kept": lambda: Called(nn.Linear(32, 32), lambda m, x: m(x)),
}


@pytest.mark.parametrize("recipe", ["bf16", "fp8", "bf16-lean"])
@pytest.mark.parametrize("name", PRODUCT_MODELS)
def test_the_inventorys_formats_match_the_products(name, recipe):
    torch.manual_seed(0)
    model, recorder = PRODUCT_MODELS[name](), ProductRecorder()
    recipe = ng.recipe(recipe).replace(keep=("inner",)) if name == "kept" else ng.recipe(recipe)
    engine = Engine(model, torch.optim.AdamW(model.parameters()), recipe)
    with recorder, engine.forward():
        loss = model(torch.randn(16, 32)).float().square().mean()
    engine.backward(loss)
    assert engine.step().applied
    listed = {format for matrix in engine.conversion.matrices for format in matrix.formats}
    assert listed in ({"bf16"}, {"fp32"})
    assert recorder.narrow and all(recorder.narrow) == (listed == {"bf16"}), (listed, recorder.narrow)


def test_a_bilinear_form_after_a_layer_in_16_bits_computes_in_fp32_as_on_cuda():
    model = Called(nn.ModuleList([nn.Linear(32, 32), nn.Bilinear(32, 32, 8)]), lambda m, x: m[1](m[0](x), m[0](x)))
    for recipe in RECIPES:
        engine = Engine(model, torch.optim.AdamW(model.parameters()), recipe)
        with engine.forward():
            made = model(torch.randn(16, 32))
        assert made.dtype is torch.float32
        engine.backward(made.square().mean())
        assert engine.step().applied
        engine.detach()


@pytest.mark.parametrize("recipe", RECIPES)
def test_an_engine_has_an_inventory_in_every_recipe(recipe):
    model = nn.Sequential(nn.Linear(32, 32), nn.Conv1d(4, 4, 3), nn.LSTM(32, 32))
    engine = Engine(model, torch.optim.AdamW(model.parameters()), recipe)
    formats = {matrix.path: set(matrix.formats) for matrix in engine.conversion.matrices}
    compute = engine.recipe.compute
    assert formats["0"] == {compute}
    assert formats["1"] == {"bf16" if compute == "fp8" else compute}
    assert engine.conversion.summary().startswith(compute.upper())


def test_the_line_gives_shares_of_parameters_and_of_flops():
    class Mixture(nn.Module):
        def __init__(self):
            super().__init__()
            self.proj = nn.Linear(32, 32, bias=False)
            self.experts = Stack()

    assert convert(Mixture(), "fp8").summary() == (
        "FP8 in 3 of 3 products of 1 layers: 20% of the multiplied parameters, 50% of their FLOPs; "
        "the rest: 1 expert tensor in BF16 (80%)"
    )
    assert convert(Mixture(), "bf16").summary() == "BF16 in 100% of the multiplied parameters"
    gru = nn.Sequential(nn.Linear(32, 32, bias=False), nn.GRU(32, 16, bias=False))
    assert convert(gru, "fp8").summary() == (
        "FP8 in 3 of 3 products of 1 layers: 31% of the multiplied parameters; "
        "the rest: 2 recurrent weights in BF16 (69%)"
    )
    images = nn.Sequential(nn.Conv2d(4, 4, 2, bias=False), nn.Linear(16, 16, bias=False))
    assert convert(images, "fp8").summary() == (
        "FP8 in 3 of 3 products of 1 layers: 80% of the multiplied parameters, 100% of their known FLOPs; "
        "the rest: 1 convolution in BF16 (20%); FLOPs are unknown for 1 convolution"
    )
    assert convert(nn.Embedding(4, 4), "fp16").summary() == "FP16 in none: no parameter is multiplied"


def test_lists_of_experts_count_the_experts_per_token():
    class Mixture(nn.Module):
        def __init__(self):
            super().__init__()
            self.top_k = 2
            self.experts = nn.ModuleList([nn.Linear(32, 32) for _ in range(8)])

    assert {matrix.active for matrix in convert(Mixture(), "fp8").matrices} == {0.25}
