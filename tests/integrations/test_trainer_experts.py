"""A Trainer with a mixture of experts resumes exactly, although transformers stores its experts in another form."""

import itertools

import pytest
import torch

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from narrowgauge.integrations.converted_weights import load_missing  # noqa: E402
from narrowgauge.integrations.transformers import adapt  # noqa: E402

SIZES = {
    "hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 1, "vocab_size": 128,
    "num_experts_per_tok": 2, "eos_token_id": None, "pad_token_id": None, "bos_token_id": None,
}  # fmt: skip
ROWS = [{"input_ids": row, "labels": row} for row in torch.randint(0, 128, (16, 16))]


def make_model(family, tied=False):
    """Mixtral's files have other names for its router, too."""
    sizes = {"Mixtral": {"num_local_experts": 4}, "Olmoe": {"num_experts": 4}}[family] | {"intermediate_size": 128}
    config = getattr(transformers, f"{family}Config")(**SIZES, **sizes, tie_word_embeddings=tied)
    torch.manual_seed(0)
    return getattr(transformers, f"{family}ForCausalLM")(config).train()


class LossRecordingTrainer(transformers.Trainer):
    def training_step(self, *args, **kwargs):
        loss = super().training_step(*args, **kwargs)
        self.losses = [*getattr(self, "losses", []), loss.item()]
        return loss


def make(folder, family, recipe, **arguments):
    options = transformers.TrainingArguments(
        output_dir=str(folder), max_steps=4, per_device_train_batch_size=4, learning_rate=1e-2, save_steps=2,
        report_to="none", disable_tqdm=True, use_cpu=True, optim="adamw_torch", dataloader_pin_memory=False,
        **arguments,
    )  # fmt: skip
    trainer = LossRecordingTrainer(make_model(family), options, train_dataset=ROWS, eval_dataset=ROWS[:4])
    trainer.remove_callback(transformers.trainer_callback.PrinterCallback)
    return adapt(trainer, recipe)


@pytest.mark.parametrize("recipe", ["bf16", "fp8[products=all]", "fp8-lean[products=all]"])
@pytest.mark.parametrize("family", ["Mixtral", "Olmoe"])
def test_resume_continues_bit_exactly(family, recipe, tmp_path):
    whole = make(tmp_path, family, recipe)
    whole.train()
    second = make(tmp_path, family, recipe)
    second.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert second.losses == whole.losses[2:]
    weights = second.model.state_dict()
    assert all(torch.equal(weights[name], weight) for name, weight in whole.model.state_dict().items())


def test_the_best_model_has_its_experts(tmp_path):
    """The first of two checkpoints is the best one here."""
    best = {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 2, "metric_for_best_model": "order"}
    trainer = make(tmp_path, "Mixtral", "bf16", greater_is_better=False, **best)
    order = itertools.count()
    trainer.compute_metrics = lambda predictions: {"order": next(order)}
    trainer.train()
    assert trainer.state.best_model_checkpoint.endswith("checkpoint-2")
    stored = transformers.MixtralForCausalLM.from_pretrained(
        tmp_path / "checkpoint-2", dtype=torch.float32
    ).state_dict()
    assert all(torch.equal(stored[name], weight) for name, weight in trainer.model.state_dict().items())


def test_only_what_is_stored_in_another_form_is_loaded(tmp_path):
    model = make_model("Mixtral", tied=True)
    model.save_pretrained(tmp_path, max_shard_size="100KB")
    assert (tmp_path / "model.safetensors.index.json").is_file()
    other = make_model("Mixtral", tied=True)
    torch.nn.init.zeros_(other.model.layers[0].mlp.experts.down_proj)
    names = ("gate.weight", "experts.gate_up_proj", "experts.down_proj")
    assert load_missing(other, tmp_path) == [f"model.layers.0.mlp.{name}" for name in names]
    assert torch.equal(other.model.layers[0].mlp.experts.down_proj, model.model.layers[0].mlp.experts.down_proj)
    model.save_pretrained(tmp_path / "stacked", save_original_format=False)
    assert load_missing(other, tmp_path / "stacked") == []
    assert load_missing(torch.nn.Linear(2, 2), tmp_path) == load_missing(other, tmp_path / "nowhere") == []
