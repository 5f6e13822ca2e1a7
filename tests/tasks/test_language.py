"""Language tasks: data is read late, batches depend on their number, facts are complete, samples change nothing."""

import math

import numpy as np
import pytest
import torch

from narrowgauge import tasks
from narrowgauge.data import corpus
from narrowgauge.errors import UsageError
from narrowgauge.tasks import language

TEXT = "def keep(self, name):\n    return self.kept[name]\n" * 100


@pytest.fixture(autouse=True)
def text(tmp_path, monkeypatch):
    monkeypatch.setenv("NARROWGAUGE_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return str(path)


def small(text, **options):
    return tasks.find("gpt:1x64", **{"batch": 4, "context": 16, "data": text} | options)


def test_data_is_read_with_the_first_batch(monkeypatch):
    monkeypatch.setattr(corpus, "load", lambda packages: pytest.fail("read"))
    task = tasks.find("gpt2-124m", batch=2, context=8)
    inputs, targets = task.synthetic(0)
    assert inputs.shape == targets.shape == (2, 8)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert int(inputs.max()) < 50257
    assert not torch.equal(inputs, task.synthetic(1)[0])
    assert "unigram_entropy" not in task.facts


def test_facts_are_complete_after_the_first_batch(text):
    task = small(text)
    task.batch(0, "train")
    train = np.frombuffer(TEXT.encode(), np.uint8)[: task.facts["train_tokens"]]
    assert task.facts["unigram_entropy"] == pytest.approx(corpus.unigram_entropy(train))
    assert task.facts["train_tokens"] + task.facts["eval_tokens"] == len(TEXT)


def test_batches_are_bytes_of_the_file_chosen_by_seed_and_step(text):
    task = small(text)
    inputs, _targets = task.batch(5, "train")
    assert inputs.shape == (4, 16)
    assert all(bytes(row.tolist()).decode() in TEXT for row in inputs)
    assert torch.equal(inputs, small(text).batch(5, "train")[0])
    assert not torch.equal(inputs, task.batch(6, "train")[0])
    assert not torch.equal(inputs, small(text, seed=1).batch(5, "train")[0])


def test_evaluation_batches_do_not_depend_on_the_seed(text):
    assert torch.equal(small(text).batch(0, "eval")[0], small(text, seed=1).batch(0, "eval")[0])


def test_the_loss_starts_at_log_vocab_and_falls(text):
    task = small(text)
    torch.manual_seed(0)
    model = task.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    losses = []
    for step in range(150):
        optimizer.zero_grad()
        loss = task.loss(model, task.batch(step, "train"))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(math.log(256), abs=0.3)
    assert losses[-1] < 0.7 * task.facts["unigram_entropy"]


def test_a_larger_vocabulary_is_a_byte_pair_encoding(text):
    task = small(text, vocab=280)
    assert task.facts["padded_vocab"] == 384
    inputs, _ = task.batch(0, "train")
    assert int(inputs.max()) > 255
    assert task.facts["train_tokens"] < len(TEXT) / 2


def test_a_llama_trains_on_the_same_data(text):
    task = tasks.find("llama-1b", data=text, batch=2, context=8, vocab=256)
    inputs, _ = task.batch(0, "train")
    assert inputs.shape == (2, 8)


def test_a_mixture_learns_and_reports_its_routing_losses(text):
    task = tasks.find("moe:1x64x4", batch=4, context=16, data=text)
    torch.manual_seed(0)
    model = task.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    losses = []
    for step in range(40):
        optimizer.zero_grad()
        loss = task.loss(model, task.batch(step, "train"))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.6 * losses[0]
    found = {name: value.item() for name, value in task.metrics(model, task.batch(0, "eval")).items()}
    assert 0.9 < found.pop("balance_loss") < 4
    assert 0 < found.pop("z_loss") < 20
    assert not found


def test_tokens_of_a_bin_are_used_unchanged(tmp_path):
    path = tmp_path / "x.bin"
    path.write_bytes((np.arange(1000) % 300).astype("<u2").tobytes())
    with pytest.raises(UsageError, match="token 256 at position 256"):
        small(str(path)).batch(0, "train")
    task = small(str(path), vocab=300)
    inputs, targets = task.batch(0, "train")
    assert torch.equal((inputs + 1) % 300, targets)
    sample = task.sample(task.model())
    assert all(0 <= int(number) < 300 for number in sample.split())


def test_data_too_short_for_the_context_is_refused(text):
    with pytest.raises(UsageError, match="shorter --context"):
        small(text, context=10_000).batch(0, "train")


@pytest.mark.parametrize("training", [True, False])
def test_a_sample_continues_the_prompt_and_restores_the_model(text, training, monkeypatch):
    monkeypatch.setattr(language, "SAMPLE_TOKENS", 200)  # what users get; other tests sample fewer
    task = small(text)
    model = task.model().train(training)
    state = torch.get_rng_state()
    first = task.sample(model)
    assert first.startswith("def __init__(self")
    assert len(first) > 100
    assert first == task.sample(model)
    assert model.training is training
    assert torch.equal(state, torch.get_rng_state())
    assert all(p.grad is None for p in model.parameters())


def test_a_sample_of_a_nonfinite_model_ends_with_a_note(text):
    task = small(text)
    model = task.model()
    with torch.no_grad():
        model.norm.weight.fill_(math.nan)
    assert "no longer finite" in task.sample(model)
    assert model.training


def test_a_sample_never_uses_the_padding_of_the_vocabulary(text):
    task = small(text, vocab=257)
    model = task.model()
    with torch.no_grad():
        model.lm_head.weight[257:] = 100.0  # were padding allowed, it would always win or lose by a mile
    assert task.sample(model)
