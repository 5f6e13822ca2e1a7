"""The options of LoRA: from the text of ``--lora``, or from the folder of an adapter that PEFT can load.

    rank=16,alpha=32,targets=q_proj+v_proj,dropout=0.05,rslora=true,init=gaussian      a new adapter
    FOLDER                      adapter_config.json and adapter_model.safetensors: training continues from it

Every field of an adapter_config.json is looked at: one that would change what the adapter computes, and that is not in
``UNDERSTOOD``, is refused. Nothing is unpickled.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from narrowgauge import files
from narrowgauge.errors import UsageError, one_line
from narrowgauge.recipe import is_auto, parse

if TYPE_CHECKING:
    from narrowgauge.hardware import Device

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
ALL_LINEAR = "all-linear"
INITS: dict[str, bool | str] = {"kaiming": True, "gaussian": "gaussian"}
"""The values of ``init``, with PEFT's own. Others of PEFT (pissa, olora, ...) change the base weights."""
EXAMPLE = "such as --lora rank=16,alpha=32,targets=q_proj+v_proj"
UNDERSTOOD = (
    "r", "lora_alpha", "lora_dropout", "target_modules", "exclude_modules", "fan_in_fan_out", "use_rslora",
    "rank_pattern", "alpha_pattern", "layers_to_transform", "layers_pattern",
)  # fmt: skip
"""Fields of an adapter_config.json that are passed to PEFT."""
IGNORED = (
    "peft_type", "peft_version", "task_type", "auto_mapping", "base_model_name_or_path", "revision", "inference_mode",
    "init_lora_weights", "megatron_core", "qalora_group_size", "runtime_config", "bias", "ensure_weight_tying",
)  # fmt: skip
"""Fields that do not change what an adapter computes, or that are checked apart."""
FROZEN = {"fp8": "fp8", "bf16": "bf16"}
"""How LoRA stores frozen matrices by default, by the format that the recipe computes in."""
MAX_RANK = 65_536


@dataclass(frozen=True, kw_only=True)
class LoraOptions:
    """An adapter to train."""

    option: str
    """What the user wrote, for error messages."""
    config: Mapping[str, Any]
    """Fields of ``peft.LoraConfig``."""
    folder: Path | None = None
    """The folder whose weights training continues from; None: a new adapter."""

    @property
    def rank(self) -> int:
        return int(self.config["r"])


def names_folder(text: str) -> bool:
    """Whether the text of ``--lora`` is a folder rather than options."""
    return "=" not in text or files.is_folder(files.expand_path(text))


def resolve_lora(text: str) -> str:
    """Return the text with an absolute path if it is a folder, so that a run can be resumed from anywhere."""
    return str(files.resolve_path(files.expand_path(text))) if names_folder(text) else text.replace(" ", "")


def parse_lora(text: str) -> LoraOptions:
    """Parse the text of ``--lora``.

    Raises:
        UsageError: An option is unknown or wrong, or the folder does not hold an adapter that can be trained.
    """
    option = f"--lora {text}"
    if names_folder(text):
        return _read_folder(files.expand_path(text), option)
    given: dict[str, str] = {}
    for part in text.split(","):
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or not value:
            raise UsageError(f"{option}: {part.strip()!r} should read name=value, {EXAMPLE}")
        if name not in _PARSERS:
            raise UsageError(f"{option}: there is no {name!r}; the options are {', '.join(_PARSERS)}")
        if name in given:
            raise UsageError(f"{option}: {name} is given twice")
        given[name] = value
    values = {name: _PARSERS[name](value, option) for name, value in given.items()}
    rank = values.get("rank", 16)
    config = {
        "r": rank,
        "lora_alpha": values.get("alpha", 2 * rank),
        "lora_dropout": values.get("dropout", 0.0),
        "target_modules": values.get("targets", ALL_LINEAR),
        "use_rslora": values.get("rslora", False),
        "init_lora_weights": values.get("init", True),
    }
    return LoraOptions(option=option, config=config)


def restore_lora(config: Mapping[str, Any], option: str) -> LoraOptions:
    """Make the options of a recorded adapter, from the content of an adapter_config.json.

    Raises:
        UsageError: The fields are not those of an adapter that can be trained.
    """
    return LoraOptions(option=option, config=_check_config(config, option))


def set_frozen(text: str, device: Device) -> str:
    """Return the text of a recipe with the field ``frozen`` that suits LoRA, unless it has the field already.

    ``auto`` may choose BF16 or FP8 when the model exists. Both can compute with frozen matrices in BF16.
    """
    if re.search(r"[\[,]\s*frozen\s*=", text):
        return text
    recipe = parse(text, device)
    if recipe.compute not in FROZEN:
        return text
    if not is_auto(text):
        return str(recipe.replace(frozen=FROZEN[recipe.compute]))
    base, bracket, changes = text.replace(" ", "").rstrip("]").partition("[")
    return f"{base}[{changes},frozen=bf16]" if bracket and changes else f"{base}[frozen=bf16]"


def _parse_rank(value: str, option: str) -> int:
    rank = int(value) if re.fullmatch(r"\d{1,9}", value) else 0
    if not 0 < rank <= MAX_RANK:
        raise UsageError(f"{option}: rank={one_line(value, 40)} must be a whole number from 1 to {MAX_RANK:,}")
    return rank


def _parse_number(value: str) -> float:
    try:
        return float(value)
    except ValueError:
        return math.nan


def _parse_alpha(value: str, option: str) -> int | float:
    alpha = _parse_number(value)
    if not 0 < alpha < math.inf:
        raise UsageError(f"{option}: alpha={one_line(value, 40)} must be a positive number")
    return int(alpha) if alpha == int(alpha) else alpha


def _parse_dropout(value: str, option: str) -> float:
    dropout = _parse_number(value)
    if not 0 <= dropout < 1:
        raise UsageError(f"{option}: dropout={one_line(value, 40)} must be a number from 0 to less than 1")
    return dropout


def _parse_targets(value: str, option: str) -> str | list[str]:
    if value == ALL_LINEAR:
        return value
    names = value.split("+")
    if not all(re.fullmatch(r"[\w.-]+", name) for name in names) or ALL_LINEAR in names:
        raise UsageError(
            f"{option}: targets={one_line(value, 80)} must be {ALL_LINEAR}, or names of modules joined with +"
        )
    return sorted(set(names))


def _parse_switch(value: str, option: str) -> bool:
    if value.lower() not in ("true", "false"):
        raise UsageError(f"{option}: rslora={one_line(value, 40)} must be true or false")
    return value.lower() == "true"


def _parse_init(value: str, option: str) -> bool | str:
    if value not in INITS:
        raise UsageError(f"{option}: init={one_line(value, 40)} is unknown; expected one of {', '.join(INITS)}")
    return INITS[value]


_PARSERS: dict[str, Callable[[str, str], Any]] = {
    "rank": _parse_rank,
    "alpha": _parse_alpha,
    "targets": _parse_targets,
    "dropout": _parse_dropout,
    "rslora": _parse_switch,
    "init": _parse_init,
}


def _read_folder(folder: Path, option: str) -> LoraOptions:
    if not files.is_folder(folder):
        raise UsageError(f"{option}: there is no such folder; give the folder of an adapter, or options {EXAMPLE}")
    if not files.exists(folder / CONFIG):
        raise UsageError(f"{option}: the folder has no {CONFIG}; give the folder of an adapter, or options {EXAMPLE}")
    if not files.exists(folder / WEIGHTS):
        pickled = files.exists(folder / "adapter_model.bin")
        why = "; adapter_model.bin is a pickle, which could run code: convert it" if pickled else ""
        raise UsageError(f"{option}: the folder has no {WEIGHTS}{why}")
    try:
        stored = files.parse_json(files.read(folder / CONFIG))
    except ValueError as error:
        raise UsageError(f"{option}: {CONFIG} is not JSON ({one_line(error)})") from None
    if not isinstance(stored, dict):
        raise UsageError(f"{option}: {CONFIG} is not a JSON object")
    return LoraOptions(option=option, config=_check_config(stored, option), folder=folder)


def _check_config(stored: Mapping[str, Any], option: str) -> dict[str, Any]:
    """Return the fields for PEFT. Refuse those that would change what the adapter computes in other ways."""
    kind = stored.get("peft_type")
    if kind != "LORA":
        raise UsageError(f"{option}: {CONFIG} is of an adapter of type {one_line(repr(kind), 40)}, expected 'LORA'")
    init = stored.get("init_lora_weights", True)
    if not isinstance(init, bool) and init not in ("gaussian", "orthogonal"):
        raise UsageError(
            f"{option}: {CONFIG} has init_lora_weights={one_line(repr(init), 40)}, which changes the base weights; "
            "convert the adapter to plain LoRA"
        )
    if stored.get("bias", "none") != "none":
        raise UsageError(f"{option}: {CONFIG} trains biases (bias={one_line(repr(stored['bias']), 40)}), expected none")
    for name, value in stored.items():
        if name not in (*UNDERSTOOD, *IGNORED) and value:
            raise UsageError(
                f"{option}: {CONFIG} sets {one_line(name, 60)}, which is not supported; only plain LoRA of linear "
                "layers is"
            )
    fields = {name: stored[name] for name in UNDERSTOOD if stored.get(name) is not None}
    _check_types(fields, option)
    return {"init_lora_weights": True, **fields}


def _check_types(fields: Mapping[str, Any], option: str) -> None:
    """Refuse fields of wrong types. Texts are names of modules, or regular expressions of PEFT for them."""

    def fits(name: str, value: Any) -> bool:
        if name in ("r", "lora_alpha", "lora_dropout"):
            least = {"r": 1, "lora_alpha": 0, "lora_dropout": 0}[name]
            kinds = (int,) if name == "r" else (int, float)
            return isinstance(value, kinds) and not isinstance(value, bool) and least <= value <= MAX_RANK
        if name in ("fan_in_fan_out", "use_rslora"):
            return isinstance(value, bool)
        if name in ("rank_pattern", "alpha_pattern"):
            return isinstance(value, dict) and all(_is_name(key) and _is_number(one) for key, one in value.items())
        if name == "layers_to_transform":
            return isinstance(value, int) or (isinstance(value, list) and all(isinstance(one, int) for one in value))
        if isinstance(value, str):
            return _is_name(value)
        return isinstance(value, list) and all(map(_is_name, value))

    for name, value in fields.items():
        if not fits(name, value):
            raise UsageError(f"{option}: {CONFIG} has {name}={one_line(repr(value), 80)}, which is not supported")
    if "r" not in fields or not fields.get("target_modules"):
        raise UsageError(f"{option}: {CONFIG} has no {'r' if 'r' not in fields else 'target_modules'}")


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and 0 < len(value) <= 5000


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= MAX_RANK
