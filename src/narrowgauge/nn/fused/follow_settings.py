"""Fused blocks whose settings change after conversion: described again, and fused if the new form was verified.

settings as they were       the fused form that was verified
settings seen before        what was found out about them then
new settings                the block is described and verified again, which takes some tenths of a second: another
                            form of the same layers (an epsilon, no causal mask) is used at once. If there is none,
                            calls run as they were written, with one warning
changed often               what changes without effect, such as a count, is ignored after ``HARMLESS`` times. What
                            has an effect is described ``MOST_FORMS`` times, then such calls run as written
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import nn

from narrowgauge.nn.blocks.settings import Settings, WatchedSettings
from narrowgauge.nn.blocks.spec import BlockSpec
from narrowgauge.nn.fused.as_written import AsWritten
from narrowgauge.nn.fused.plan import BlockPlan, list_own_parameters, list_settings

HARMLESS = 3
MOST_FORMS = 8
"""Settings of one block that are remembered."""

Describe = Callable[[nn.Module], BlockSpec | str]
"""Describes a block as it is now, or says why it cannot be fused."""


class Refusal(NamedTuple):
    """Why a block has no fused form with some settings."""

    name: str
    """The setting that changed."""
    reason: str


class FormsBySettings:
    """What is known of a block with other settings than those that it was converted with."""

    def __init__(self, describe: Describe | None, as_written: AsWritten) -> None:
        self._describe, self._as_written = describe, as_written
        self._forms: list[tuple[Settings, BlockSpec | Refusal]] = []
        self._seen: Counter[str] = Counter()
        self._ignored: set[str] = set()

    def find_plan(self, plan: BlockPlan, module: nn.Module, watched: WatchedSettings) -> BlockPlan | None:
        """Return the plan for a block whose settings are not those of its plan; None if it has no fused form now.

        Args:
            plan: The plan that the block had until now.
            module: The block.
            watched: The settings of that plan.
        """
        if not self._forms:
            self._forms.append((plan.settings, plan.spec))
        for settings, known in self._forms:
            if WatchedSettings(module, settings).are_same():
                if isinstance(known, Refusal):
                    self._tell(plan, known)
                    return None
                return replace(plan, spec=known, settings=settings)
        if self._describe is None:
            return None
        changed = watched.list_changes() or ["one of its attributes"]
        if len(self._forms) >= MOST_FORMS or is_capturing():
            self._tell(plan, Refusal(changed[0], "it changes too often to be verified each time"))
            return None
        found = self._describe(module)
        reason = found if isinstance(found, str) else explain_misfit(plan, module, found)
        if isinstance(found, str) or reason is not None:
            refusal = Refusal(changed[0], str(reason))
            self._forms.append((list_settings(module, plan.spec, self._ignored), refusal))
            self._tell(plan, refusal)
            return None
        if found == plan.spec:
            self._seen.update(changed)
            self._ignored |= {name for name in changed if self._seen[name] >= HARMLESS}
        settings = list_settings(module, found, self._ignored)
        self._forms.append((settings, found))
        if found == plan.spec and self._ignored.issuperset(changed):
            self._forms = [(settings, found)]  # with what is ignored, the others can never be again
        return replace(plan, spec=found, settings=settings)

    def _tell(self, plan: BlockPlan, refusal: Refusal) -> None:
        self._as_written.note(plan.path, refusal.name, f"since {refusal.name} was changed: {refusal.reason}")


def is_capturing() -> bool:
    """Whether a CUDA graph is recorded, in which a block cannot be compared with its fused form."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def explain_misfit(plan: BlockPlan, module: nn.Module, spec: BlockSpec) -> str | None:
    """Return why a plan cannot compute another form of its block, or None: its layers must be the same."""
    old = plan.spec
    same = (
        old.order == spec.order
        and old.products == spec.products
        and old.mlp == spec.mlp
        and (old.cross is None) == (spec.cross is None)
        and [norm.path for norm in old.norms] == [norm.path for norm in spec.norms]
        and old.adapters == spec.adapters
        and (old.branch1.scale, old.branch2.scale) == (spec.branch1.scale, spec.branch2.scale)
        and list_own_parameters(module, spec) == plan.own
    )
    return None if same else "its layers are used in another way"
