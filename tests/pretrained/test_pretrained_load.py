"""Loading in the form of a recipe: equal to transformers to the bit, trained alike, and without a second copy."""

import functools
import itertools
import json
import weakref

import pytest
import torch
import transformers
from tiny_folders import EXPERTS, FAMILIES, GPT2, SMALL, make_model, save
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import narrowgauge as ng
from narrowgauge.optim.masters import get_other_half, has_master
from narrowgauge.pretrained import PretrainedModel, load_model, open_folder, tensor_readers
from narrowgauge.pretrained.transformers_model import find_model
from narrowgauge.ranks import init_model
from narrowgauge.ranks.world import SINGLE_PROCESS
from narrowgauge.task import Task

FORMS = {  # what is stored, how, and for which recipe it is loaded
    "bf16": (torch.bfloat16, False, "bf16-lean"),
    "fp16 sharded": (torch.float16, True, "fp8-lean"),
    "fp32": (torch.float32, False, "bf16-lean"),
    "bf16 sharded to fp32": (torch.bfloat16, True, "bf16"),
    "fp32 sharded to fp32": (torch.float32, True, "fp8"),
}


def load_in_fp32(folder, name):
    """Load a folder as transformers does."""
    return getattr(transformers, name).from_pretrained(folder, dtype=torch.float32)


@pytest.fixture
def small_pieces(monkeypatch):
    """Tiny tensors take several pieces, and the last one is not full."""
    monkeypatch.setattr(tensor_readers, "PIECE", 384)


@pytest.mark.parametrize(("name", "form"), list(itertools.product(FAMILIES, FORMS)))
def test_a_loaded_model_equals_that_of_transformers(tmp_path, small_pieces, name, form):
    dtype, sharded, recipe = FORMS[form]
    save(tmp_path, name, dtype, sharded=sharded)
    expected = load_in_fp32(tmp_path, name)
    model = load_model(open_folder(tmp_path), recipe, "cpu")
    assert model.training
    lean = ng.recipe(recipe).master != "fp32"
    for parameter in model.parameters():
        assert parameter.requires_grad
        assert has_master(parameter) is (lean and parameter.dim() > 1)
        assert parameter.dtype is (torch.bfloat16 if has_master(parameter) else torch.float32)
        if has_master(parameter) and dtype is torch.bfloat16:
            assert not get_other_half(parameter).values.any()
    masters = ng.optim.full_precision(model)
    assert list(masters) == list(expected.state_dict())
    for key, value in expected.state_dict().items():
        assert torch.equal(masters[key].view(torch.int32), value.view(torch.int32)), key
    for (key, buffer), (_, other) in zip(model.named_buffers(), expected.named_buffers(), strict=True):
        assert torch.equal(buffer, other), key
        assert buffer.dtype is other.dtype
    for parameter in model.parameters():
        ng.optim.widen(parameter)
    tokens = torch.arange(40).view(2, 20)
    with torch.no_grad():
        assert torch.equal(model.eval()(tokens).logits, expected.eval()(tokens).logits)


def train(model, recipe):
    """Train three steps; return the losses and the masters."""
    engine = ng.Engine(model, torch.optim.AdamW(model.parameters(), lr=1e-2), recipe=recipe, clip_norm=1.0)
    tokens, losses = torch.arange(60).view(2, 30) % 50, []
    for _ in range(3):
        with engine.forward():
            loss = engine.model(input_ids=tokens, labels=tokens, use_cache=False).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses, ng.optim.full_precision(model)


@pytest.mark.filterwarnings("ignore::narrowgauge.errors.SlowRecipeWarning")
@pytest.mark.parametrize(
    ("name", "dtype", "recipe"),
    [
        ("LlamaForCausalLM", torch.bfloat16, "bf16-lean"),
        ("Qwen3ForCausalLM", torch.float32, "fp8-lean"),
        ("Gemma3ForCausalLM", torch.float16, "bf16-lean[keep=model.layers.0.mlp]"),
        ("GPT2LMHeadModel", torch.bfloat16, "fp8-lean"),
    ],
)
def test_it_trains_like_a_model_that_was_loaded_in_fp32(tmp_path, name, dtype, recipe):
    save(tmp_path, name, dtype)
    model = load_model(open_folder(tmp_path), recipe, "cpu")
    before = {key: parameter.data_ptr() for key, parameter in model.named_parameters()}
    losses, masters = train(model, recipe)
    if "fp8" not in recipe:  # fused blocks put the weights of joined products side by side
        assert before == {key: parameter.data_ptr() for key, parameter in model.named_parameters()}  # no copy was made
    expected, other = train(load_in_fp32(tmp_path, name).train(), recipe)
    assert losses == expected
    assert losses[-1] < losses[0]
    assert all(torch.equal(masters[key], value) for key, value in other.items())


class CountBytes(TorchDispatchMode):
    """Counts the bytes of all tensors that are alive, and their maximum."""

    def __init__(self):
        super().__init__()
        self.live, self.bytes, self.peak = {}, 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.device.type != "meta":
                storage = tensor.untyped_storage()
                if storage._cdata not in self.live:
                    size = storage.nbytes()
                    self.live[storage._cdata] = weakref.ref(storage, functools.partial(self.free, storage._cdata, size))
                    self.bytes += size
        self.peak = max(self.peak, self.bytes)
        return result

    def free(self, key, size, _):
        del self.live[key]
        self.bytes -= size


@pytest.mark.parametrize(
    ("dtype", "recipe"),
    [(torch.bfloat16, "bf16-lean"), (torch.float32, "fp8-lean"), (torch.bfloat16, "bf16"), (torch.float16, "fp32")],
)
def test_loading_takes_hardly_more_than_the_model(tmp_path, monkeypatch, dtype, recipe):
    fields = {**SMALL, "hidden_size": 256, "intermediate_size": 1024, "vocab_size": 16384}
    save(tmp_path, dtype=dtype, fields=fields, sharded=True)
    monkeypatch.setattr(tensor_readers, "PIECE", 1 << 16)  # in proportion to the model: a 64th of the largest tensor
    folder = open_folder(tmp_path)
    with CountBytes() as count:
        model = load_model(folder, recipe, "cpu")
    final = sum(p.numel() for p in model.parameters()) * 4
    assert final > 30e6
    assert count.bytes < 1.02 * final
    assert count.peak < 1.1 * final


def test_vectors_and_kept_modules_stay_in_fp32(tmp_path):
    save(tmp_path, dtype=torch.bfloat16)
    model = load_model(open_folder(tmp_path), "bf16-lean[keep=lm_head+LlamaMLP]", "cpu")
    wide = {key for key, parameter in model.named_parameters() if parameter.dtype is torch.float32}
    assert "lm_head.weight" in wide
    assert all("mlp" in key or "norm" in key or key == "lm_head.weight" for key in wide)
    with pytest.raises(ng.UsageError, match="keep=nothing names no module"):
        load_model(open_folder(tmp_path), "bf16-lean[keep=nothing]", "cpu")


def test_a_base_models_weights_get_their_prefix(tmp_path):
    make_model().model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(
        json.dumps({**config, "architectures": ["LlamaForCausalLM"], "tie_word_embeddings": True})
    )
    model = load_model(open_folder(tmp_path), "fp32", "cpu")
    assert torch.equal(model.lm_head.weight, make_model().model.embed_tokens.weight)


def test_older_files_may_hold_what_models_compute_today(tmp_path):
    from safetensors.torch import load_file, save_file

    save(tmp_path, "GPT2LMHeadModel", fields=GPT2)
    stored = load_file(tmp_path / "model.safetensors")
    mask = torch.ones(1, 1, 64, 64, dtype=torch.bool).tril()
    old = {key.removeprefix("transformer."): value for key, value in stored.items()}
    old |= {"h.0.attn.bias": mask, "h.1.attn.masked_bias": torch.tensor(-1e4)}
    save_file(old, tmp_path / "model.safetensors")
    model = load_model(open_folder(tmp_path), "fp32", "cpu")
    assert torch.equal(model.transformer.wte.weight, stored["transformer.wte.weight"])


def test_weights_that_are_computed_in_other_ways_are_loaded_by_transformers(tmp_path, monkeypatch):
    save(tmp_path, "MixtralForCausalLM", torch.bfloat16, fields=EXPERTS)
    monkeypatch.setattr("narrowgauge.pretrained.match.find_stacking", lambda *_: None)
    lines = []
    model = load_model(open_folder(tmp_path), "bf16-lean", "cpu", lines.append)
    assert "GB for FP32 weights: transformers computes model.layers.0.mlp.experts" in lines[0]
    expected = load_in_fp32(tmp_path, "MixtralForCausalLM").state_dict()
    assert all(torch.equal(value, expected[key]) for key, value in model.state_dict().items())
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "num_hidden_layers": 1}))
    with pytest.raises(ng.UsageError, match="cannot be loaded: ValueError: unexpected keys"):
        load_model(open_folder(tmp_path), "bf16-lean", "cpu")


def test_progress_is_shown_for_large_models(tmp_path, monkeypatch):
    save(tmp_path)
    lines = []
    load_model(open_folder(tmp_path), "fp32", "cpu", lines.append)
    assert not lines
    monkeypatch.setattr("narrowgauge.pretrained.load.NOTIFY_BYTES", 1000)
    load_model(open_folder(tmp_path), "fp32", "cpu", lines.append)
    assert 5 < len(lines) <= 11
    assert lines[-1] == "loaded 0.0 of 0.0 GB"


def test_a_file_that_shrinks_while_it_is_read_is_one_line(tmp_path):
    save(tmp_path)
    folder = open_folder(tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ng.UsageError, match="cannot be loaded: it became shorter"):
        load_model(folder, "fp32", "cpu")


def test_a_run_loads_a_task_with_such_a_model(tmp_path):
    save(tmp_path / "model", dtype=torch.bfloat16)
    make = PretrainedModel(find_model(str(tmp_path / "model"), {}))
    assert {p.dtype for p in make().parameters()} == {torch.float32}
    with torch.device("meta"):
        assert all(p.is_meta for p in make().parameters())
    options = {"parallel": "auto", "seed": 0, "notify": lambda line: None}
    model = init_model.make_model(make, "fp8-lean", torch.device("cpu"), SINGLE_PROCESS, **options)
    assert has_master(model.lm_head.weight)
    model = init_model.make_model(make.__call__, "fp8-lean", torch.device("cpu"), SINGLE_PROCESS, **options)
    assert model.lm_head.weight.dtype is torch.float32
    model = init_model.make_model(make, "auto", torch.device("cpu"), SINGLE_PROCESS, **options)
    assert model.lm_head.weight.dtype is torch.float32
    assert Task(model=make, loss=lambda model, batch: batch, batch=lambda step, split: step).model is make
