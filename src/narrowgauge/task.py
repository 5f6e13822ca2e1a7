"""Task: what is trained. It makes a model, makes batches, and computes the loss of one on the other.

A batch is a pure function of its number (``batch(step, split)``), never the next item of an iterator. That is what
makes exact resumption and paired runs possible: step 731 sees the same data whatever happened before it. A DataLoader
given as ``data`` is made such a function.
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from narrowgauge import files, task_options
from narrowgauge.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

Batch = Any
"""A tensor, or any nest of tuples, lists and dictionaries of tensors, on the CPU."""


def _not_given(step: int, split: str) -> Batch:
    raise UsageError("the task has neither batch nor data; give one of them")


@dataclass(frozen=True, kw_only=True)
class Task:
    """What is trained. Only ``model``, ``loss``, and ``batch`` or ``data`` are needed."""

    model: Callable[[], nn.Module]
    """Makes the model, in FP32 on the current default device, drawing its weights from torch's global generator."""
    loss: Callable[[nn.Module, Batch], Tensor]
    """Runs the model on a batch (already on its device) and returns a scalar loss."""
    batch: Callable[[int, str], Batch] = _not_given
    """Makes batch number ``step`` of ``split`` ("train" or "eval"): the same arguments give the same batch."""
    data: Any = None
    """Instead of ``batch``: a torch DataLoader (or what can be iterated over again), a mapping of "train" and "eval" to
    loaders, or a function that makes the loader of a split. ``data.loader`` turns it into numbered batches."""
    data_seed: int = 0
    """Of the order, and of everything random, in which ``data`` is read."""
    name: str = "task"
    items_per_batch: int = 1
    """How many items (tokens, images) one batch holds: what throughput counts."""
    unit: str = "item"
    """What an item is called, in the singular."""
    flops_per_item: float | None = None
    """Floating-point operations of forward and backward per item, or None where nobody counted them."""
    learning_rate: float = 1e-3
    """Peak learning rate that suits the task."""
    weight_decay: float = 0.1
    steps: int = 200
    """How many steps a useful run takes."""
    eval_batches: int = 8
    """How many different evaluation batches are worth averaging over."""
    optimizer: Callable[[nn.Module, float], Optimizer] | None = None
    """Makes the optimizer from the model and the peak learning rate; None: AdamW with weight-decay groups."""
    metrics: Callable[[nn.Module, Batch], Mapping[str, Tensor]] | None = None
    """Further scalars of an evaluation batch, such as an accuracy."""
    sample: Callable[[nn.Module], str] | None = None
    """Shows what the trained model does, as text."""
    reads_ahead: bool = False
    """Whether ``batch`` may be called by a thread while the step before is computed: only where it draws from no global
    generator of torch, NumPy or Python and seeds none, as they are the step's as well. Generators of its own are fine.
    """
    synthetic: Callable[[int], Batch] | None = None
    """A batch of the right shape made of random numbers, for benchmarks that must not wait for data."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """What to remember in the run's record: sizes, data, and baselines such as ``unigram_entropy`` (nats)."""

    def __post_init__(self) -> None:
        if self.data is None:
            if self.batch is _not_given:
                raise UsageError(f"task {self.name} has neither batch nor data; give one of them")
            return
        from narrowgauge.data.loader import Batches

        batches = Batches(self.data, self.data_seed)
        if self.batch is not _not_given and not isinstance(self.batch, Batches):
            raise UsageError(f"task {self.name} has both batch and data; give one of them")
        known: dict[str, Any] = {"batch": batches}
        if (size := batches.known_size("eval")) is not None:
            known["eval_batches"] = min(self.eval_batches, max(size, 1))  # more would be the same ones again
        if self.items_per_batch == 1 and (items := batches.items_per_batch()) is not None:
            known["items_per_batch"] = items
        for name, value in known.items():
            object.__setattr__(self, name, value)


def load(spec: str, options: Mapping[str, Any]) -> Task:
    """Load a user's task from ``path/to/file.py:function``, passing the options the function has parameters for.

    A ``seed`` is only offered: a user's task need not have one, its weights are seeded all the same.
    """
    function = _AHEAD.pop(_key(spec), None) or function_of(spec)
    if "seed" not in inspect.signature(function).parameters:
        options = {name: value for name, value in options.items() if name != "seed"}
    given, known = accepted(function, options, spec), task_options.parameters(function)
    task = function(**{name: known[name].convert(value) if name in known else value for name, value in given.items()})
    if not isinstance(task, Task):
        raise UsageError(
            f"task {spec!r}: {spec.rpartition(':')[2]}() returned a {type(task).__name__}, not a narrowgauge.Task"
        )
    return task


_AHEAD: dict[tuple[Path, str], Callable[..., Any]] = {}
"""Functions that were looked at before they are called: a file of the user's is run once for both."""


def look_ahead(spec: str) -> dict[str, task_options.Parameter]:
    """The parameters of a user's function, which the next ``load`` of the same name calls."""
    function = _AHEAD[_key(spec)] = function_of(spec)
    return task_options.parameters(function)


def _key(spec: str) -> tuple[Path, str]:
    path, _, name = spec.rpartition(":")
    return files.resolve_path(Path(path)), name


def function_of(spec: str) -> Callable[..., Any]:
    """The function that ``path/to/file.py:function`` names; runs the file."""
    path_text, _, name = spec.rpartition(":")
    path = Path(path_text)
    if why := files.explain_unreadable(path):
        raise UsageError(f"task {spec!r}: there is no file {path_text!r} that can be read ({why})")
    module_spec = importlib.util.spec_from_file_location(f"narrowgauge_task_{path.stem}", path)
    if module_spec is None or module_spec.loader is None:
        raise UsageError(f"task {spec!r}: {path_text!r} is not a Python file")
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[module_spec.name] = module
    folder = str(files.resolve_path(path).parent)
    sys.path.insert(0, folder)
    try:
        module_spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        what = "it ends the program" if isinstance(error, SystemExit) else f"{type(error).__name__}: {error}"
        raise UsageError(f"task {spec!r}: {path_text} does not import: {what}{_place(error, path)}") from error
    finally:
        sys.path.remove(folder)
    function = getattr(module, name, None)
    if not callable(function):
        public = sorted(n for n, v in vars(module).items() if inspect.isfunction(v) and v.__module__ == module.__name__)
        raise UsageError(f"task {spec!r}: {path_text} has no function {name!r}; it has {', '.join(public) or 'none'}")
    return cast(Callable[..., Any], function)


def _place(error: BaseException, path: Path) -> str:
    """The line of the file that an error came from."""
    frames = traceback.extract_tb(error.__traceback__)
    line = next((frame.lineno for frame in reversed(frames) if Path(frame.filename) == path), None)
    return "" if line is None else f" (line {line})"


def accepted(function: Callable[..., Any], options: Mapping[str, Any], spec: str) -> dict[str, Any]:
    """Keep the options that were given (not None), refusing those the function has no parameter for."""
    given = {name: value for name, value in options.items() if value is not None}
    parameters = inspect.signature(function).parameters
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        return given
    unknown = sorted(set(given) - set(parameters))
    if unknown:
        raise UsageError(f"task {spec!r} takes no --{unknown[0]}; it takes {', '.join(parameters) or 'no options'}")
    plain = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    needed = [name for name, p in parameters.items() if p.kind in plain and p.default is p.empty]
    missing = [f"--{name.replace('_', '-')}" for name in needed if name not in given]
    if missing:
        raise UsageError(f"task {spec!r} needs {', '.join(missing)}: its function has no default for it")
    return given
