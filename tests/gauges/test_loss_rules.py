"""A loss that rises: healthy if its targets move, a fault if the learning rate destroys the weights."""

import torch
import torch.nn.functional as F
from torch import nn
from zero_start_models import make_batch, train

from narrowgauge.findings import SERIOUS


def q_learning(lr, steps=90):
    """Fit rewards plus the discounted values of a copy that follows every ten steps: targets and loss grow."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))
    copy = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))

    def batch(step):
        if step % 10 == 1:
            copy.load_state_dict(model.state_dict())
        x, _ = make_batch(step)
        with torch.no_grad():
            return x, (x[:, :1] > 0).float() * (0.1 + 0.05 * step) + 0.99 * copy(x.roll(1, 0)).amax(1, keepdim=True)

    def loss(model, x, y):
        return F.mse_loss(model(x).float()[:, :1], y)

    return train(model, steps=steps, every=10, loss=loss, batch=batch, lr=lr)


def test_moving_targets_are_no_divergence():
    found = q_learning(1e-3)
    assert "loss-diverging" in {rule for rule, _ in found}  # a warning: the numbers alone do not tell
    assert not [finding for finding in found.values() if finding.severity == SERIOUS]
    assert "Q-learning" in found["loss-diverging", "loss"].why


def test_a_learning_rate_that_destroys_the_weights_is_serious():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    def batch(step):
        optimizer.param_groups[0]["lr"] = 3e-3 if step < 45 else 0.5
        return make_batch(step)

    found = train(model, steps=75, every=10, batch=batch, optimizer=optimizer)
    assert found["loss-diverging", "loss"].severity == SERIOUS
