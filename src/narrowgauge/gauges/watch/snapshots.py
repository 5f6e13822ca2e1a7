"""What a watch returns: the readings of one update."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from narrowgauge.gauges.watch.expert_readings import ExpertReading
from narrowgauge.gauges.watch.readings import Reading
from narrowgauge.gauges.watch.rounding_readings import RoundingReading


@dataclass
class Snapshot:
    """The readings of all tensors in one update."""

    update: int
    """Which update, counted from 1."""
    readings: list[Reading]
    applied: bool
    """False if the update was skipped."""
    facts: dict[tuple[str, str], float] = field(default_factory=dict)
    """Facts about units, parameters and optimizer states, by name and place (``model_facts``, ``function_reader``)."""
    extra: list[Reading] = field(default_factory=list)
    """Inputs of layers and large results of functions, from which predictions are made (``prediction_inputs``)."""
    stays_fp32: frozenset[str] = frozenset()
    """Modules whose output would be in FP32 under FP16 autocast."""
    rounding: list[RoundingReading] = field(default_factory=list)
    """What block formats do to the operands of linear layers: in a run that emulates one, or if asked for."""
    experts: list[ExpertReading] = field(default_factory=list)
    """How many tokens each expert got, by layer with experts."""

    def as_event(self) -> dict[str, Any]:
        """Return the form used in a run's record; parts that may be empty are left out then."""
        parts: dict[str, list[Any]] = {"readings": self.readings, "extra": self.extra, "rounding": self.rounding}
        parts["experts"] = self.experts
        lists = {name: [one.as_event() for one in part] for name, part in parts.items() if part or name == "readings"}
        return {"applied": self.applied, **lists}


@dataclass
class Fp8Reading:
    """The scale of each FP8 site, and its counts since the start of the run, after one update. Keys are site names."""

    update: int
    scales: dict[str, float] = field(default_factory=dict)
    saturated: dict[str, int] = field(default_factory=dict)
    flushed: dict[str, int] = field(default_factory=dict)
