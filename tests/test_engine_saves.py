"""Models with fused blocks are saved whole in every common way, in training and once detached."""

import pytest
import torch

import narrowgauge as ng

transformers = pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.torch")


def make_model():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def train(recipe):
    model = make_model()
    engine = ng.Engine(model, torch.optim.AdamW(model.parameters(), 1e-3), recipe, fused=True)
    ids = torch.arange(32).view(2, 16)
    with engine.forward():
        loss = model(input_ids=ids, labels=ids).loss
    engine.backward(loss)
    engine.step()
    assert len(engine.conversion.blocks) == 2
    return engine, model


def save_model(model, folder):
    safetensors.save_model(model, str(folder / "model.safetensors"))
    other = make_model()
    safetensors.load_model(other, str(folder / "model.safetensors"))
    return other.state_dict()


def save_file(model, folder):
    safetensors.save_file(model.state_dict(), str(folder / "file.safetensors"))
    return safetensors.load_file(str(folder / "file.safetensors"))


def save_with_torch(model, folder):
    torch.save(model.state_dict(), folder / "model.pt")
    return torch.load(folder / "model.pt", weights_only=True)


def save_pretrained(model, folder):
    model.save_pretrained(folder)
    dtype = next(model.parameters()).dtype
    return transformers.LlamaForCausalLM.from_pretrained(folder, dtype=dtype).state_dict()


def save_with_accelerate(model, folder):
    accelerate = pytest.importorskip("accelerate")
    accelerate.Accelerator(cpu=True).save_model(model, str(folder))
    return safetensors.load_file(str(folder / "model.safetensors"))


def push_to_a_hub_folder(model, folder):
    hub = pytest.importorskip("huggingface_hub")

    class Published(torch.nn.Module, hub.PyTorchModelHubMixin):
        def __init__(self):
            super().__init__()
            self.inner = make_model()

    whole = Published()
    whole.inner = model
    whole.save_pretrained(folder)
    return Published.from_pretrained(folder).to(next(model.parameters()).dtype).inner.state_dict()


def check(saved, model):
    wanted = model.state_dict()
    assert wanted.keys() == saved.keys()
    assert all(torch.equal(wanted[name].to(value.dtype), value) for name, value in saved.items())


@pytest.mark.parametrize("recipe", ["fp8[products=all]", "bf16", "fp8-lean[products=all]"])
@pytest.mark.parametrize(
    "save", [save_file, save_with_torch, save_pretrained, save_model, save_with_accelerate, push_to_a_hub_folder]
)
def test_a_model_in_training_is_saved_whole(recipe, save, tmp_path):
    _, model = train(recipe)
    check(save(model, tmp_path), model)


@pytest.mark.parametrize("recipe", ["fp8[products=all]", "bf16", "fp8-lean[products=all]"])
@pytest.mark.parametrize("save", [save_model, save_with_accelerate])
def test_a_detached_model_is_saved_whole(recipe, save, tmp_path):
    engine, _ = train(recipe)
    before = engine.state_dict()["model"]
    model = engine.detach()
    check(before, model)
    check(save(model, tmp_path), model)


def test_views_of_a_users_own_buffer_stay_views():
    flat = torch.randn(128, 64)
    model = torch.nn.ModuleList(torch.nn.Linear(64, 64, bias=False) for _ in range(2))
    for layer, part in zip(model, flat.split(64), strict=True):
        layer.weight.data = part
    engine = ng.Engine(model, torch.optim.SGD(model.parameters(), 0.1), "bf16")
    engine.detach()
    assert model[1].weight.data_ptr() == flat[64:].data_ptr()
