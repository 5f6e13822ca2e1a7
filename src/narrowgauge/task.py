"""Task: what is trained. It creates the model and the batches, and computes the loss.

A batch is a pure function of its number (``batch(step, split)``), not the next item of an iterator. This makes exact
resumption and paired runs possible: step 731 sees the same data whatever happened before it. A DataLoader passed as
``data`` is turned into such a function.
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from narrowgauge import files, own_modules, task_options
from narrowgauge.errors import UsageError

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from torch.optim import Optimizer

Batch = Any
"""A tensor, or nested tuples, lists and dictionaries of tensors, on the CPU."""


class ModelLoader(ABC):
    """A ``Task.model`` with weights in files, which it can load in the form in which a recipe trains them.

    An ordinary function makes an FP32 model, and the engine converts it. A loader needs no FP32 copy.
    """

    @property
    def reloads_frozen(self) -> bool:
        """Whether checkpoints leave out parameters that are not trained, because ``load`` reads them again."""
        return False

    @abstractmethod
    def __call__(self) -> nn.Module:
        """Create the model in FP32, on torch's default device."""

    @abstractmethod
    def load(self, recipe: Any, device: torch.device | str, notify: Callable[[str], None] | None = None) -> nn.Module:
        """Load the model in the form in which a recipe trains it.

        Args:
            recipe: The recipe of the engine, or its text.
            device: Where to load it to.
            notify: Is called with lines of progress.
        """

    @abstractmethod
    def prepare_dry_run(self) -> Callable[[Any, torch.device | str], nn.Module]:
        """Return a function that does what ``load`` does on a simulated device, and reads no weights."""


def _not_given(step: int, split: str) -> Batch:
    raise UsageError("the task has neither batch nor data; give one of them")


@dataclass(frozen=True, kw_only=True)
class Task:
    """What is trained. Only ``model``, ``loss``, and either ``batch`` or ``data`` are required.

    All arguments are keywords; each field below is one.

    Raises:
        UsageError: Neither or both of ``batch`` and ``data`` are given.

    Example:
        >>> task = ng.Task(
        ...     model=lambda: nn.Linear(64, 10),
        ...     loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
        ...     data={"train": train_loader, "eval": eval_loader},
        ... )
    """

    model: Callable[[], nn.Module]
    """Creates the model: in FP32, on torch's default device, initialized from torch's global generator."""
    loss: Callable[[nn.Module, Batch], Tensor]
    """Runs the model on a batch, which is on the model's device, and returns a scalar loss."""
    batch: Callable[[int, str], Batch] = _not_given
    """Returns batch number ``step`` of ``split`` ("train" or "eval"). The same arguments give the same batch."""
    data: Any = None
    """Instead of ``batch``: a DataLoader or any other iterable that can be restarted, a mapping of "train" and "eval"
    to loaders, or a function that returns the loader of a split."""
    data_seed: int = 0
    """Seed of the order of ``data``, and of everything random in its workers."""
    name: str = "task"
    """Name of the task in records and reports."""
    items_per_batch: int = 1
    """Number of items (tokens, images) per batch, which throughput counts."""
    unit: str = "item"
    """Name of an item, in the singular."""
    flops_per_item: float | None = None
    """Floating-point operations of forward and backward per item, or None if unknown."""
    learning_rate: float = 1e-3
    """Default peak learning rate."""
    weight_decay: float = 0.1
    """Weight decay of the default optimizer."""
    steps: int = 200
    """Default number of steps."""
    eval_batches: int = 8
    """Number of evaluation batches to average over."""
    optimizer: Callable[[nn.Module, float], Optimizer | Sequence[Optimizer]] | None = None
    """Creates the optimizer, or a list of optimizers, from the model and the peak learning rate. Groups may have their
    own rates: the schedule multiplies all of them. None: AdamW with weight-decay groups."""
    metrics: Callable[[nn.Module, Batch], Mapping[str, Tensor]] | None = None
    """Returns more scalars of an evaluation batch, such as an accuracy."""
    sample: Callable[[nn.Module], str] | None = None
    """Returns a sample of the trained model's output, as text."""
    reads_ahead: bool = False
    """Whether a thread may call ``batch`` during the previous step. Set it only if ``batch`` neither uses nor seeds the
    global generators of torch, NumPy and Python, because the step uses them too. Generators of its own are fine."""
    recordable: bool = False
    """Whether a GPU may repeat whole steps as one CUDA graph (``StepFunction``). Set it only if ``loss`` and the model
    compute the same from a batch in every step: nothing is counted, read or drawn at random on the host."""
    synthetic: Callable[[int], Batch] | None = None
    """Returns a random batch of the right shape, for benchmarks without data."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Facts for the run's record: sizes, data, and baselines such as ``unigram_entropy`` (in nats)."""

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
            known["eval_batches"] = min(self.eval_batches, max(size, 1))  # more would repeat batches
        if self.items_per_batch == 1 and (items := batches.items_per_batch()) is not None:
            known["items_per_batch"] = items
        for name, value in known.items():
            object.__setattr__(self, name, value)


def make_own_optimizers(task: Task, model: nn.Module, learning_rate: float) -> list[Optimizer]:
    """Make the optimizers that a task defines; none if it leaves the choice to the program.

    Args:
        task: The task.
        model: Its model.
        learning_rate: The peak learning rate.

    Raises:
        UsageError: The task's function returned something else.
    """
    from torch.optim import Optimizer

    if task.optimizer is None:
        return []
    made = task.optimizer(model, learning_rate)
    found = [made] if isinstance(made, Optimizer) else list(made) if isinstance(made, list | tuple) else []
    wrong = next((one for one in found if not isinstance(one, Optimizer)), None if found else made)
    if wrong is not None or not found:
        kind = type(wrong).__name__
        raise UsageError(f"task {task.name}: optimizer made a {kind}; expected a torch optimizer, or a list of them")
    return found


def make_plain_optimizers(task: Task, model: nn.Module) -> list[Optimizer]:
    """Make the optimizers that a task defines, or else AdamW for all trained parameters. For steps that are measured.

    Args:
        task: The task.
        model: Its model.
    """
    from torch.optim import AdamW

    if own := make_own_optimizers(task, model, task.learning_rate):
        return own
    trained, decay = [parameter for parameter in model.parameters() if parameter.requires_grad], task.weight_decay
    return [AdamW(trained, task.learning_rate, betas=(0.9, 0.95), weight_decay=decay, fused=True)]


def load(spec: str, options: Mapping[str, Any]) -> Task:
    """Load a user's task.

    Args:
        spec: ``path/to/file.py:function``.
        options: Arguments for the function; those that are None are left out. A ``seed`` is passed only if the function
            has such a parameter: the weights are seeded in any case.

    Raises:
        UsageError: The file, the function, its arguments or its result are wrong.
    """
    function = _LOADED.pop(_make_key(spec), None) or load_function(spec)
    if "seed" not in inspect.signature(function).parameters:
        options = {name: value for name, value in options.items() if name != "seed"}
    given, known = select_options(function, options, spec), task_options.read_parameters(function)
    task = function(**{name: known[name].convert(value) if name in known else value for name, value in given.items()})
    if not isinstance(task, Task):
        raise UsageError(
            f"task {spec!r}: {spec.rpartition(':')[2]}() returned a {type(task).__name__}, not a narrowgauge.Task"
        )
    return task


_LOADED: dict[tuple[Path, str], Callable[..., Any]] = {}
"""Functions whose parameters were read but that were not called yet: a user's file is run once for both."""


def read_parameters(spec: str) -> dict[str, task_options.Parameter]:
    """Return the parameters of a user's function. The next ``load`` of the same spec calls this function.

    Args:
        spec: ``path/to/file.py:function``.
    """
    function = _LOADED[_make_key(spec)] = load_function(spec)
    return task_options.read_parameters(function)


def _make_key(spec: str) -> tuple[Path, str]:
    path, _, name = spec.rpartition(":")
    return files.resolve_path(Path(path)), name


def load_function(spec: str, what: str = "task", kind: str = "function") -> Callable[..., Any]:
    """Run a user's file and return the function that ``spec`` names.

    Args:
        spec: ``path/to/file.py:function``.
        what: What it is for, for error messages.
        kind: What it should be: "function" or "class".

    Raises:
        UsageError: The file cannot be read or imported, or has no such function.
    """
    path_text, _, name = spec.rpartition(":")
    path = Path(path_text)
    if why := files.explain_unreadable(path):
        raise UsageError(f"{what} {spec!r}: there is no file {path_text!r} that can be read ({why})")
    module_spec = importlib.util.spec_from_file_location(f"narrowgauge_task_{path.stem}", path)
    if module_spec is None or module_spec.loader is None:
        raise UsageError(f"{what} {spec!r}: {path_text!r} is not a Python file")
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[module_spec.name] = module
    try:
        with own_modules.import_neighbors(files.resolve_path(path).parent):
            module_spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        why = "it exits the program" if isinstance(error, SystemExit) else f"{type(error).__name__}: {error}"
        raise UsageError(f"{what} {spec!r}: {path_text} does not import: {why}{find_line(error, path)}") from error
    function = getattr(module, name, None)
    if not callable(function):
        fits = inspect.isclass if kind == "class" else inspect.isfunction
        public = sorted(n for n, v in vars(module).items() if fits(v) and v.__module__ == module.__name__)
        raise UsageError(f"{what} {spec!r}: {path_text} has no {kind} {name!r}; it has {', '.join(public) or 'none'}")
    if kind == "function" and isinstance(function, type) and hasattr(function, "named_parameters"):
        raise UsageError(
            f"{what} {spec!r}: {name} is a model's class; bench, memory and roofline take it as --model {spec}, other "
            f"commands need a function that returns a narrowgauge.Task with the model, batches and the loss"
        )
    return cast(Callable[..., Any], function)


def find_line(error: BaseException, path: Path) -> str:
    """Return the line of the file that raised an error, as text."""
    frames = traceback.extract_tb(error.__traceback__)
    line = next((frame.lineno for frame in reversed(frames) if Path(frame.filename) == path), None)
    return "" if line is None else f" (line {line})"


def select_options(function: Callable[..., Any], options: Mapping[str, Any], spec: str) -> dict[str, Any]:
    """Return the options that are not None, as arguments for the function.

    Args:
        function: The function that creates the task.
        options: All options, by parameter name.
        spec: Name of the task, for error messages.

    Raises:
        UsageError: The function has no parameter for an option, or a required option is missing.
    """
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
        raise UsageError(f"task {spec!r} needs {', '.join(missing)}: its function has no default")
    return given
