"""Of nineteen silent faults, at least 13 in 17 must be noticed; those that no rule can tell are listed as such."""

import pytest
import torch
from silent_faults import FAULTS
from zero_start_models import train


@pytest.mark.parametrize("name", FAULTS)
def test_a_silent_fault(name):
    make, rule, steps = FAULTS[name]
    torch.manual_seed(0)
    found = {one for one, _ in train(steps=steps, every=4 if steps == 40 else 9, **make())}
    assert rule in found if rule is not None else found == set()


def test_enough_are_noticed():
    noticed = [name for name, (_, rule, _) in FAULTS.items() if rule is not None]
    assert len(FAULTS) >= 17 and len(noticed) / len(FAULTS) >= 13 / 17
