"""Which part of FP8 costs loss: trainings with some products in BF16, beside those of bench/equal_loss.py.

usage: python bench/loss_gap.py FILE.json SECONDS RUN... --data FOLDER [--task gpt2-124m] [--tokens 100M] [--seeds 1]
                                [--stop STEP] [--device cpu]

FILE.json is one of bench/equal_loss.py, to which runs are added in the same way: one that would not end within SECONDS
is not started, and the same command continues. A RUN is a recipe, or a recipe with products that are in BF16 instead:

    bf16                                                    the reference, if FILE.json does not have it yet
    "fp8 with *:output"                                     the forward of all layers
    "fp8 with *.qkv:output, lm_head:grad_input+grad_weight"   patterns of layers, and which of their products

Prints, for each run, how much its final loss and its training loss are above those of the reference with the same seed:
over the last 60% of the steps, of which FILE.json has every fiftieth. With STEP, runs stop there: they have no final
loss, and training losses are compared up to that step.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import fnmatch
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).parent))
from equal_loss import EACH, Progress, Stretch, parse_count

from narrowgauge import UsageError, hardware
from narrowgauge.nn import convert
from narrowgauge.nn.survey import Layer, survey_layers
from narrowgauge.recipe import parse
from narrowgauge.validate.curves.paired_runs import get_run

REFERENCE = "bf16"
PRODUCTS = ("output", "grad_input", "grad_weight")
LATE = 0.4
"""Share of the steps before which training losses are not compared."""


def parse_run(text: str) -> tuple[str, dict[str, dict[str, str]]]:
    """Return the recipe of a run, and by pattern the formats of products that differ from it."""
    recipe, _, rest = text.partition(" with ")
    changes = {}
    for part in filter(None, rest.split(",")):
        pattern, _, names = part.strip().partition(":")
        products = names.split("+")
        if not pattern or not set(products) <= set(PRODUCTS):
            raise UsageError(
                f"{text}: expected PATTERN:PRODUCT+PRODUCT, where a product is one of {', '.join(PRODUCTS)}"
            )
        changes[pattern] = dict.fromkeys(products, "bf16")
    return str(parse(recipe)), changes


@contextlib.contextmanager
def changed_formats(changes: dict[str, dict[str, str]]) -> Iterator[None]:
    """Context manager in which conversions choose these formats. One that no layer fits is an error before a run."""

    def survey(*args: Any, **kwargs: Any) -> Iterator[Layer]:
        unused = set(changes)
        for layer in survey_layers(*args, **kwargs):
            for pattern, formats in changes.items():
                if fnmatch.fnmatchcase(layer.path, pattern):
                    unused.discard(pattern)
                    layer = dataclasses.replace(layer, choice=layer.choice._replace(**formats))
            yield layer
        if unused:
            raise UsageError(f"no layer has a path like {' or '.join(sorted(unused))}")

    with mock.patch.object(convert, "survey_layers", survey) if changes else contextlib.nullcontext():
        yield


class Stopped(Exception):
    """A run has reached the step at which it stops."""


class UntilStop(Progress):
    """Collects training losses, and stops the run at a step."""

    def __init__(self, name: str, stop: int | None) -> None:
        super().__init__(name)
        self.stop = stop
        self.losses: list[float] = []

    def on_metrics(self, event: Mapping[str, Any], skipped: int) -> None:
        super().on_metrics(event, skipped)
        if event["kind"] == "step":
            self.losses.append(float(event["loss"]))
            if len(self.losses) == self.stop:
                raise Stopped


class Gaps(Stretch):
    """The runs of a file, and those that are compared."""

    def train_all(self) -> None:
        stop = self.args.stop
        if stop is not None and not 0 < stop < self.steps:
            raise UsageError(f"--stop {stop}: expected a step before the last, {self.steps}")
        for seed in range(self.args.seeds):
            for text in self.args.runs:
                name = text if stop is None else f"{text}, {stop} steps of {self.steps}"
                if self.find(name, seed, self.steps) is not None:
                    continue
                left = self.get_seconds_left()
                if self.estimate(text, stop or self.steps) > left:
                    print(f"{left:.0f} s are left, too few for {name} with seed {seed}")
                    return
                self.train_one(name, text, seed)

    def train_one(self, name: str, text: str, seed: int) -> None:
        recipe, changes = parse_run(text)
        observer, begin = UntilStop(f"{text}, seed {seed}", self.args.stop), time.monotonic()
        with changed_formats(changes), tempfile.TemporaryDirectory() as store:
            settings = {"steps": self.steps, "watch_every": 0}
            experiment = dataclasses.replace(self.experiment, settings=settings, store=Path(store))
            try:
                self.add(name, seed, self.steps, get_run(experiment, recipe, seed, observer))
            except Stopped:
                self.add_stopped(name, seed, observer.losses, time.monotonic() - begin)

    def add_stopped(self, name: str, seed: int, losses: list[float], seconds: float) -> None:
        """Write a run without an end to the file. Its seconds are those that the whole run would take."""
        whole = seconds * self.steps / len(losses)
        run = {"recipe": name, "seed": seed, "steps": self.steps, "loss": None, "seconds": whole}
        self.data["runs"].append({**run, "stopped": len(losses), "curve": losses[::EACH]})
        self.write()
        print(f"{name}, seed {seed}: stopped after {seconds:.0f} s", flush=True)

    def compare(self) -> None:
        names = dict.fromkeys(run["recipe"] for run in self.data["runs"] if run["steps"] == self.steps)
        first, last = round(LATE * self.steps / EACH), None
        if self.args.stop:
            last = -(-self.args.stop // EACH)
            first = min(first, last - 1)  # one step at least
        for name in names:
            final, late = [], []
            for seed in range(100):
                run, other = self.find(name, seed, self.steps), self.find(REFERENCE, seed, self.steps)
                if name == REFERENCE or run is None or other is None:
                    continue
                if run["loss"] is not None:
                    final.append(run["loss"] / other["loss"] - 1)
                pairs = list(zip(run["curve"], other["curve"], strict=False))[first:last]
                late += [statistics.mean(a / b - 1 for a, b in pairs)] if pairs else []
            ends = f"{statistics.mean(final):+.3%} ({', '.join(f'{gap:+.2%}' for gap in final)}), " if final else ""
            if late:
                print(f"{name:60} {ends}in training {statistics.mean(late):+.3%}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("file", type=Path)
    add("seconds", type=float)
    add("runs", nargs="*", metavar="RUN")
    add("--data", required=True)
    add("--task", default="gpt2-124m")
    add("--tokens", type=parse_count, default=100e6)
    add("--seeds", type=int, default=1)
    add("--stop", type=int, metavar="STEP")
    add("--device")
    args = parser.parse_args()
    try:
        for text in args.runs:
            parse_run(text)
        gaps = Gaps(args, hardware.detect(args.device))
        gaps.train_all()
        gaps.compare()
    except (UsageError, OSError, ValueError) as error:
        print(f"loss_gap: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
