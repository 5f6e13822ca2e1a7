"""Faults that leave the loss finite are found; the healthy counterpart of each has no finding."""

import torch
import torch.nn.functional as F
from torch import nn
from zero_start_models import make_batch, train

from narrowgauge.findings import SERIOUS
from narrowgauge.gauges.rules.step_rules import Step, StepRules


class TwoParts(nn.Module):
    def __init__(self, cut=False):
        super().__init__()
        self.encoder, self.decoder, self.cut = nn.Linear(16, 32), nn.Linear(32, 16), cut

    def forward(self, x):
        hidden = F.gelu(self.encoder(x))
        return self.decoder(hidden.detach() if self.cut else hidden)


def rules(found):
    return {rule for rule, _ in found}


def test_detach():
    torch.manual_seed(0)
    found = train(TwoParts(cut=True))
    assert set(found) == {("no-gradient", "encoder")}
    assert "encoder.weight" in found["no-gradient", "encoder"].detail
    assert train(TwoParts()) == {}


def test_two_optimizers_that_take_turns_are_healthy():
    """As in a GAN: the parameters of the optimizer that does not step have no gradient."""
    torch.manual_seed(0)
    model = TwoParts(cut=True)
    both = [torch.optim.AdamW(part.parameters(), lr=1e-3) for part in (model.encoder, model.decoder)]
    assert train(model, optimizer=both) == {}


def test_parameters_in_no_optimizer():
    torch.manual_seed(0)
    model = TwoParts()
    found = train(model, optimizer=torch.optim.AdamW(model.decoder.parameters(), lr=1e-3))
    assert set(found) == {("not-in-optimizer", "encoder")}
    frozen = TwoParts()
    frozen.encoder.requires_grad_(False)
    assert train(frozen, optimizer=torch.optim.AdamW(frozen.decoder.parameters(), lr=1e-3)) == {}


def test_batch_norm_that_never_moves():
    def make(momentum):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16, momentum=momentum), nn.Linear(16, 16))

    found = train(make(0.0))
    assert found["batchnorm-not-updated", "1"].severity == SERIOUS
    assert train(make(0.1)) == {}
    fixed = make(0.1)
    fixed[1].train(False)  # frozen on purpose: training and evaluation agree
    assert train(fixed) == {}


def test_dead_units():
    def make(bias):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16))
        nn.init.constant_(model[0].bias[2:], bias)
        return model

    assert rules(train(make(-20.0))) == {"dead-units"}
    assert train(make(-0.8)) == {}  # sparse, but every unit is active for some sample


def test_epsilon_above_the_second_moment():
    torch.manual_seed(0)
    model = TwoParts()
    assert rules(train(model, optimizer=torch.optim.Adam(model.parameters(), lr=1e-3, eps=1.0))) == {
        "adam-eps-too-large"
    }
    assert train(TwoParts(), loss=lambda model, x, y: F.mse_loss(model(x).float(), y) * 1e-3) == {}


def test_one_group_with_a_learning_rate_far_too_large():
    def run(factor):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 16))
        groups = [{"params": model[2].parameters(), "lr": 1e-4 * factor}]
        groups += [{"params": model[i].parameters(), "lr": 1e-4} for i in (0, 4)]
        return train(model, optimizer=torch.optim.AdamW(groups))

    assert ("update-out-of-proportion", "2.weight") in run(1000)
    assert run(10) == {}


def test_gradients_that_vanish_along_depth():
    def make(activation, residual):
        class Deep(nn.Module):
            def __init__(self):
                super().__init__()
                self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(14))

            def forward(self, x):
                for layer in self.layers:
                    x = (x if residual else 0) + activation(layer(x))
                return x

        torch.manual_seed(0)
        return Deep()

    assert "vanishing-gradients" in rules(train(make(torch.sigmoid, False)))
    assert train(make(torch.tanh, True)) == {}


def test_gradients_that_are_always_clipped():
    def run(norm):
        checked = StepRules(clip_norm=1.0)
        found = [checked.check(Step(i, 2.0 + i % 3, norm * (1 + i % 7), 1.0, True)) for i in range(1, 80)]
        return {finding.rule for one in found for finding in one}

    assert run(150.0) == {"always-clipped"}
    assert run(5.0) == set()


def test_faults_are_found_in_a_watched_run_with_bf16():
    torch.manual_seed(0)
    assert set(train(TwoParts(cut=True), "bf16", batch=make_batch)) == {("no-gradient", "encoder")}


def test_a_model_that_has_fitted_its_data_is_healthy():
    """One batch, fitted until gradients are below Adam's eps and batch norm statistics no longer change."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm1d(16), nn.Linear(16, 16))
    x = make_batch(0)[0]
    found = train(model, steps=250, every=10, batch=lambda _: (x, x.clone()), lr=3e-2)
    assert not {rule for rule, _ in found} & {"adam-eps-too-large", "batchnorm-not-updated"}
    assert not [finding for finding in found.values() if finding.severity == SERIOUS]


def test_other_healthy_models():
    """Tied embeddings, a recurrent layer, and experts of which a batch uses a few."""

    class Tokens(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.rnn, self.head = nn.Embedding(50, 32), nn.GRU(32, 32, batch_first=True), nn.Linear(32, 50)
            self.head.weight = self.embed.weight

        def forward(self, tokens):
            return self.head(self.rnn(self.embed(tokens))[0])

    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.router, self.experts = nn.Linear(16, 4), nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

        def forward(self, x):
            weight, chosen = self.router(x[:2]).softmax(-1).max(-1)
            return torch.stack([self.experts[int(i)](x) * w for w, i in zip(weight, chosen, strict=True)]).sum(0)

    def tokens(step):
        rows = torch.randint(0, 50, (16, 9), generator=torch.Generator().manual_seed(step))
        return rows[:, :-1], rows[:, 1:]

    torch.manual_seed(0)
    assert (
        train(Tokens(), batch=tokens, loss=lambda m, x, y: F.cross_entropy(m(x).flatten(0, 1).float(), y.flatten()))
        == {}
    )
    assert not [finding for finding in train(Experts()).values() if finding.severity == SERIOUS]
