"""Examines a run while it trains: watches its engine, applies every rule, and keeps what was found."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

from narrowgauge.engine import Engine
from narrowgauge.gauges.findings import Finding, Log
from narrowgauge.gauges.rules.predict_formats import Foretold, foretell
from narrowgauge.gauges.rules.step_rules import Step, StepRules
from narrowgauge.gauges.rules.tensor_rules import SiteRules, see_look
from narrowgauge.gauges.watch.probe import EVERY, Look, Pulse, Watch
from narrowgauge.gauges.watch.readings import Reading

_LOOKS = 32
_KIND_OF_SITE = {"input": "activation", "grad_output": "gradient", "weight": "weight"}


class Examiner:
    """Give it each step's numbers with ``see``, and ask for tensors' with ``collect``; both return what is new."""

    def __init__(self, engine: Engine, every: int = EVERY) -> None:
        self.watch = Watch(engine, every)
        scaler, recipe = engine.scaler, engine.recipe
        dynamic = recipe.loss_scale == "dynamic" and scaler is not None
        self.steps = StepRules(dynamic, scaler.floor if dynamic and scaler is not None else 1.0)
        self.sites = SiteRules()
        self.log = Log()
        self.looks: deque[Look] = deque(maxlen=_LOOKS)
        """The latest, for what can be foretold from them."""
        self._dithered = recipe.master == "none" and all(getattr(o, "dithers", False) for o in engine.optimizers)

    @property
    def findings(self) -> list[Finding]:
        return self.log.findings

    def state_dict(self) -> dict[str, Any]:
        """What the rules remember, as plain values: without it a resumed run would be judged as one that begins."""
        return {"steps": self.steps.state_dict(), "sites": self.sites.state_dict(), "found": self.log.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any], looks: Iterable[Mapping[str, Any]] = ()) -> None:
        """Go on from a state; an empty one leaves all as it is. ``looks``: the readings so far, as the record has them.

        Readings are in the record anyway, and too many for every checkpoint.
        """
        for event in looks:
            readings = [Reading.from_event(reading) for reading in event["readings"]]
            self.looks.append(Look(event["step"], readings, bool(event["applied"])))
        if state:
            self.steps.load_state_dict(state["steps"])
            self.sites.load_state_dict(state["sites"])
            self.log.load_state_dict(state["found"])

    def see(self, step: Step) -> list[Finding]:
        """A step's numbers have arrived."""
        return self.log.add(self.steps.see(step))

    def collect(self, wait: bool = False) -> tuple[list[Look], list[Pulse], list[Finding]]:
        """Readings that have arrived since, and what they show; ``wait`` for those still on their way."""
        looks, pulses = self.watch.looks(wait), self.watch.pulses(wait)
        found = []
        self.looks.extend(looks)
        for look in looks:
            found += see_look(look, self._dithered, self.watch.engine.accumulate)
            self._learn_sizes(look)
        for pulse in pulses:
            found += self.sites.see(pulse)
        return looks, pulses, self.log.add(found)

    def foretell(self) -> list[Foretold]:
        """How FP16 and FP8 would do, where the run itself is in a wide format; else nothing."""
        wide = self.watch.engine.recipe.compute in ("fp32", "tf32", "bf16")
        return foretell([look.readings for look in self.looks]) if wide and self.looks else []

    def _learn_sizes(self, look: Look) -> None:
        """How many values a site's tensor has: a grad_output is as large as the output; weights are known."""
        counts = {(reading.kind, reading.module): reading.count for reading in look.readings}
        scales = self.watch.engine.conversion.scales
        for site in scales.sites if scales is not None else ():
            path, _, end = site.rpartition(".")
            name = f"{path}.weight" if end == "weight" else path
            known = counts.get((_KIND_OF_SITE[end], name))
            if known and end != "input":  # what a layer reads is another one's output, under that one's name
                self.sites.sizes[site] = known
