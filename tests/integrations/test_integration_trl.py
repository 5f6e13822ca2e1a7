"""TRL's SFTTrainer and PEFT under a recipe: the losses of the plain trainer, resumed runs, models loaded in BF16."""

import functools
import logging
import sys
from pathlib import Path

import pytest
import torch
from hosting import same, weights

import narrowgauge as ng

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
datasets = pytest.importorskip("datasets")
pytest.importorskip("trl")

from trl import SFTConfig, SFTTrainer  # noqa: E402

from narrowgauge.integrations.trained_weights import convert_weights  # noqa: E402
from narrowgauge.integrations.transformers import adapt, gauges_of  # noqa: E402
from narrowgauge.optim.masters import has_master, join_fp32  # noqa: E402

sys.path.append(str(Path(__file__).parents[1] / "data"))
from chat_folders import MARKED, chat, make_folder  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("default"),  # of other libraries
    pytest.mark.filterwarnings("ignore:mkldnn_matmul failed"),  # a CPU without BF16 products
]
STEPS = 4
SIZES = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16, "vocab_size": 384, "max_position_embeddings": 256,
}  # fmt: skip
ANSWERS = ["I am fine.", "The answer is four, I am fine, thanks. How are you?", "Yes."]
CHATS = [chat(f"What is {n} + {n}?", ANSWERS[n % 3]) for n in range(24)]
COMPLETIONS = [{"prompt": f"What is {n}?", "completion": ANSWERS[n % 3]} for n in range(24)]
SETTINGS = {
    "packed": {"packing": True, "max_length": 64, "assistant_only_loss": True},
    "completions": {"rows": COMPLETIONS, "gradient_accumulation_steps": 2, "max_grad_norm": 0.1},
    "padded": {"gradient_checkpointing": False, "assistant_only_loss": True},
}


class LossRecordingTrainer(SFTTrainer):
    def training_step(self, *args, **kwargs):
        loss = super().training_step(*args, **kwargs)
        self.losses = [*getattr(self, "losses", []), loss.item()]
        return loss


@pytest.fixture(scope="module", autouse=True)
def quiet():
    transformers.utils.logging.set_verbosity_error()
    datasets.disable_progress_bars()
    yield
    transformers.utils.logging.set_verbosity_warning()
    datasets.enable_progress_bars()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The folder of a small Llama in BF16 with its tokenizer."""
    made = make_folder(tmp_path_factory.mktemp("hub") / "llama", MARKED, pad_token="</s>")
    make_model().bfloat16().save_pretrained(made)
    return made


def make_model():
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))


def make(folder, out, recipe=None, lora=False, model=None, rows=CHATS, adapted=None, **settings):
    data = datasets.Dataset.from_list(rows)
    arguments = SFTConfig(
        output_dir=str(out), max_steps=STEPS, per_device_train_batch_size=4, per_device_eval_batch_size=4,
        learning_rate=1e-2, save_steps=STEPS // 2, logging_steps=1, report_to="none", disable_tqdm=True, use_cpu=True,
        dataloader_pin_memory=False, bf16=False if recipe is None else None, **settings,
    )  # fmt: skip
    trainer = LossRecordingTrainer(
        str(folder) if model is None else model, arguments, train_dataset=data, eval_dataset=data.select(range(4)),
        processing_class=transformers.AutoTokenizer.from_pretrained(folder),
        peft_config=peft.LoraConfig(r=4, target_modules="all-linear") if lora else None,
    )  # fmt: skip
    trainer.remove_callback(transformers.trainer_callback.PrinterCallback)
    return trainer if recipe is None else adapt(trainer, recipe, **(adapted or {}))


@functools.cache
def run_plain(folder, out, name, lora):
    trainer = make(folder, out, None, lora, make_model(), save_strategy="no", **SETTINGS[name])
    trainer.train()
    return trainer.losses, trainer.evaluate()["eval_loss"], weights(trainer.model)


@pytest.fixture(scope="module")
def plain(folder, tmp_path_factory):
    return functools.partial(run_plain, folder, tmp_path_factory.mktemp("plain"))


@pytest.mark.parametrize(("name", "lora"), [("packed", False), ("completions", False), ("padded", False),
                                            ("packed", True), ("completions", True)])  # fmt: skip
def test_fp32_has_the_losses_of_the_plain_trainer(name, lora, folder, plain, tmp_path):
    trainer = make(folder, tmp_path, "fp32", lora, make_model(), save_strategy="no", **SETTINGS[name])
    trainer.train()
    losses, evaluation, trained = plain(name, lora)
    assert len(losses) == STEPS * SETTINGS[name].get("gradient_accumulation_steps", 1) and losses[0] != losses[-1]
    assert trainer.losses == pytest.approx(losses, abs=1e-5)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(evaluation, abs=1e-5)
    torch.testing.assert_close(weights(trainer.model), trained, rtol=1e-4, atol=1e-5)
    assert gauges_of(trainer).findings == []  # adapters start at zero, which is no fault


@pytest.mark.parametrize(("recipe", "lora"), [("fp8", False), ("fp8-lean[frozen=fp8]", True)])
def test_other_recipes_are_near(recipe, lora, folder, plain, tmp_path):
    trainer = make(folder, tmp_path, recipe, lora, make_model(), save_strategy="no", **SETTINGS["packed"])
    trainer.train()
    losses = plain("packed", lora)[0]
    assert trainer.losses == pytest.approx(losses, abs=0.01) and trainer.losses != losses
    assert gauges_of(trainer).findings == []
    scales = gauges_of(trainer).engine.conversion.scales  # not BF16: TRL's bounds of documents do not stop fused blocks
    used = [name for name, scale in zip(scales.sites, scales.scale.tolist(), strict=True) if scale != 1.0]
    assert any("q_proj" in name for name in used) and any("down_proj" in name for name in used), used


@pytest.mark.parametrize(("recipe", "lora"), [("fp8-lean", False), ("bf16", False), ("bf16-lean", True)])
def test_a_model_in_bf16_resumes_bit_exactly(recipe, lora, folder, tmp_path):
    whole = make(folder, tmp_path, recipe, lora, **SETTINGS["packed"])
    before = whole.evaluate()["eval_loss"]  # no engine yet
    whole.train()
    assert whole.losses[0] == pytest.approx(before, abs=0.3) and (lora or whole.losses[-1] < whole.losses[0])
    resumed = make(folder, tmp_path, recipe, lora, **SETTINGS["packed"])
    resumed.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{STEPS // 2}"))
    assert same(resumed.losses, whole.losses[STEPS // 2 :])
    assert torch.equal(weights(resumed.model), weights(whole.model))

    whole.save_model(str(tmp_path / "result"))
    if lora:
        base = transformers.AutoModelForCausalLM.from_pretrained(folder)
        loaded = peft.PeftModel.from_pretrained(base, tmp_path / "result")
        pairs = [(p, loaded.state_dict()[name]) for name, p in whole.model.state_dict().items() if "lora_" in name]
    else:
        loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "result")
        pairs = [(p, loaded.state_dict()[name]) for name, p in whole.model.state_dict().items()]
    assert pairs
    for trained, stored in pairs:
        assert torch.equal(stored.float(), trained.to(stored.dtype).float())


def test_lean_recipes_need_no_fp32_copy(folder):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    loaded = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    assert {p.dtype for p in loaded.values()} == {torch.bfloat16}
    assert convert_weights(model, "fp8-lean") == len(loaded)
    for name, parameter in model.named_parameters():
        assert has_master(parameter) if parameter.dim() > 1 else parameter.dtype is torch.float32
        assert torch.equal(join_fp32(parameter), loaded[name].float())
    assert convert_weights(model, "fp8-lean") == 0
    tokens = torch.arange(8)[None]
    assert model(input_ids=tokens).logits.isfinite().all()  # under autocast, as there is no engine


def test_frozen_weights_stay_as_they_are(folder):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    model.model.embed_tokens.requires_grad_(False)
    convert_weights(model, "bf16")
    assert model.model.embed_tokens.weight.dtype is torch.bfloat16 and model.lm_head.weight.dtype is torch.float32
    assert model(input_ids=torch.arange(8)[None]).logits.isfinite().all()


def test_a_trainer_trains_the_adapters_of_a_peft_model(tmp_path):
    losses = []
    for recipe in (None, "fp32", "bf16"):
        model = peft.get_peft_model(make_model(), peft.LoraConfig(r=4, target_modules="all-linear"))
        rows = [{"input_ids": torch.arange(n, n + 16), "labels": torch.arange(n, n + 16)} for n in range(16)]
        arguments = transformers.TrainingArguments(
            str(tmp_path), max_steps=2, per_device_train_batch_size=4, learning_rate=1e-2, report_to="none",
            disable_tqdm=True, use_cpu=True, save_strategy="no", logging_steps=1, gradient_checkpointing=True,
            dataloader_pin_memory=False,
        )  # fmt: skip
        trainer = transformers.Trainer(model, arguments, train_dataset=rows)
        trainer.remove_callback(transformers.trainer_callback.PrinterCallback)
        if recipe is not None:
            adapt(trainer, recipe)
        trainer.train()
        losses.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    assert losses[1] == pytest.approx(losses[0], abs=1e-5) and losses[2] == pytest.approx(losses[0], abs=0.01)


def test_mixed_precision_is_the_recipes(folder, tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "narrowgauge"):
        trainer = make(folder, tmp_path, "bf16")
    (line,) = [record.getMessage() for record in caplog.records if record.name == "narrowgauge"]
    assert line == "SFTConfig(bf16=True), which is its default, is turned off: recipe bf16 sets the formats"
    assert trainer.accelerator.mixed_precision == "no" and not trainer.args.bf16
    with pytest.raises(ng.UsageError, match="has a recipe already"):
        adapt(trainer, "fp8")
    with pytest.raises(ng.UsageError, match="mixed_precision='fp16'"):
        make(folder, tmp_path, "bf16", fp16=True)
    with pytest.raises(ng.UsageError, match="unknown option 'clip'"):
        make(folder, tmp_path, "bf16", adapted={"clip": 1})
