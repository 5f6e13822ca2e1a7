"""Writes a checkpoint as a Hugging Face folder in FP8, in the layout of compressed-tensors.

    X.weight          float8_e4m3fn: round(clamp(master / weight_scale, -448, 448)), to nearest even
    X.weight_scale    FP32 [1], the factor that multiplies the FP8 values (elsewhere in narrowgauge ``inv_scale``)
    X.input_scale     FP32 [1], the same for the input of the layer; only if it is static
    all others        BF16

Which layers: those that the run has multiplied in FP8, except the head. After a run without FP8, all linear layers
whose dimensions FP8 products support, except the head and what the recipe keeps in FP32. Layers that vLLM fuses (q, k,
v; gate, up) must be of one kind: if one stays in BF16, all do.

Weight scales: amax / 448 of the weight itself. The run's own scale comes from the amax before the last update and may
be too small for the last weight by that update; the exact amax is as good and never saturates.

Input scales: the run's scales of delayed scaling, from the amax of its last steps. Without them (current scaling, a run
without FP8) activations are quantized dynamically, with a scale per token.

Both kinds of scale are rounded up to a BF16 number, by at most 1 part in 128. Loaders that store scales in the model's
dtype (transformers does) then have the same scale, and nothing saturates that did not before.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from narrowgauge.errors import UsageError
from narrowgauge.kernels import compute_scale
from narrowgauge.kernels.cast import cast
from narrowgauge.kernels.fp8_formats import FP8_MAX
from narrowgauge.nn.matrix_inventory import explain_kept_fp32
from narrowgauge.nn.products.linear import explain_misfit
from narrowgauge.nn.survey import SAME_INPUT_NAMES
from narrowgauge.recipe import parse
from narrowgauge.runs.checkpoints.tensor_reader import WeightReader
from narrowgauge.runs.export.hf_folder import MAX_SHARD_BYTES, WrittenFolder, round_to, write_folder
from narrowgauge.runs.export.source_model import SourceModel
from narrowgauge.runs.export.tensor_files import TensorForm

E4M3 = torch.float8_e4m3fn
REST = torch.bfloat16
"""The dtype of everything that is not in FP8."""


@dataclass(frozen=True)
class Fp8Plan:
    """What is stored in FP8."""

    layers: list[str]
    """Paths of the layers with FP8 weights."""
    input_scales: dict[str, Tensor]
    """For layers with static activations: the factor that multiplies the FP8 input."""
    ignored: list[str]
    """Paths of the linear layers that stay in BF16."""


def write_fp8_folder(
    saved: WeightReader, source: SourceModel, path: Path, most_bytes: int = MAX_SHARD_BYTES
) -> WrittenFolder:
    """Write the weights of a checkpoint in FP8.

    Args:
        saved: The checkpoint.
        source: The model that it has the weights of.
        path: The folder to write. It must not exist, or be empty.
        most_bytes: Maximum size of a file.

    Raises:
        UsageError: The folder cannot be written, no layer can be in FP8, or a weight is not finite.
    """
    plan = plan_layers(saved, source)
    quantized = {f"{layer}.weight" for layer in plan.layers}

    def make_forms(name: str, stored: str, like: Tensor) -> list[TensorForm]:
        shape, layer = tuple(like.shape), stored.removesuffix(".weight")
        if name not in quantized:
            floating = like.is_floating_point()
            return [TensorForm(stored, source.choose_dtype(name, REST) if floating else like.dtype, shape)]
        static = name.removesuffix(".weight") in plan.input_scales
        ends = ("weight_scale", "input_scale") if static else ("weight_scale",)
        scales = [TensorForm(f"{layer}.{end}", torch.float32, (1,)) for end in ends]
        return [TensorForm(stored, E4M3, shape), *scales]

    def convert(name: str, stored: str, values: Tensor) -> Iterable[tuple[str, Tensor]]:
        if name not in quantized:
            floating = values.is_floating_point()
            yield stored, round_to(values, source.choose_dtype(name, REST), stored) if floating else values
            return
        layer = stored.removesuffix(".weight")
        weight_lp, weight_scale = quantize(values, stored)
        yield stored, weight_lp
        yield f"{layer}.weight_scale", weight_scale
        scale = plan.input_scales.get(name.removesuffix(".weight"))
        if scale is not None:
            yield f"{layer}.input_scale", scale

    config = make_quantization_config(plan)
    written = write_folder(saved, source, path, REST, most_bytes, make_forms, convert, quantization_config=config)
    facts = {
        "layers_fp8": len(plan.layers),
        "layers_static": len(plan.input_scales),
        "layers_bf16": len(plan.ignored),
    }
    return replace(written, facts=facts)


def quantize(weight: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """Cast a weight to E4M3.

    Returns:
        The FP8 weight, and the factor that multiplies it, [1].

    Raises:
        UsageError: The weight is not finite.
    """
    weight = weight.float()
    amax = weight.abs().amax()
    if not amax.isfinite():
        raise UsageError(f"{name} has values that are not finite, which FP8 cannot store; export an earlier --step")
    factor = round_up_to_bf16(compute_scale(amax, FP8_MAX[E4M3]).reciprocal())
    return cast(weight, factor.reciprocal(), E4M3), factor.reshape(1)


def round_up_to_bf16(factor: Tensor) -> Tensor:
    """Return the smallest BF16 number that is not below a positive FP32 number, in FP32."""
    near = factor.to(torch.bfloat16)
    above = (near.view(torch.int16) + 1).view(torch.bfloat16)
    return torch.where(near.float() < factor, above, near).float()


def plan_layers(saved: WeightReader, source: SourceModel) -> Fp8Plan:
    """Choose the layers to store in FP8, and find the scales of their inputs.

    Raises:
        UsageError: No layer can be stored in FP8, or the layout has no place for the model's weights.
    """
    modules = dict(source.model.named_modules())
    linears = {path: module for path, module in modules.items() if isinstance(module, nn.Linear)}
    for name, tensor in source.model.state_dict().items():
        if list(source.to_file_layout(name, tensor)) != [name] and tensor.dim() > 1:
            raise UsageError(
                f"--format fp8 has no layout for {name}, which is stored in parts or under another name "
                "(a mixture of experts, for example); use --format hf"
            )
    scales = saved.read_engine_state("tensor_scales")
    chosen = {path for path in linears if f"{path}.weight" in scales["sites"]} if scales else set()
    if not chosen:
        recipe = parse(str(saved.read_engine_state("recipe")))
        fitting = [path for path, one in linears.items() if not explain_misfit((one.out_features, one.in_features))]
        chosen = {path for path in fitting if not explain_kept_fp32(modules, path, recipe)}
    chosen.discard(source.head or "")
    groups = [_list_fused(path, linears) for path in linears]
    chosen -= {path for group in groups if not chosen.issuperset(group) for path in group}
    if not chosen:
        raise UsageError(
            f"--format fp8: {type(source.model).__name__} has no linear layer, apart from its head, that the run "
            "multiplied in FP8 or that FP8 supports (dimensions that are multiples of 16); use --format hf"
        )
    inputs = _find_input_scales(scales, linears) if scales else {}
    static = {path: inputs[path] for path in chosen if all(one in inputs for one in _list_fused(path, linears))}
    layers = [path for path in linears if path in chosen]
    return Fp8Plan(layers, static, [path for path in linears if path not in chosen])


def _list_fused(path: str, linears: Mapping[str, nn.Linear]) -> list[str]:
    """Return the paths of a layer and of its siblings that read the same input, by their names."""
    parent, dot, name = path.rpartition(".")
    group = next((names for names in SAME_INPUT_NAMES if name in names), {name})
    width = linears[path].in_features
    found = [f"{parent}{dot}{one}" for one in group]
    return sorted(one for one in found if one in linears and linears[one].in_features == width)


def _find_input_scales(scales: Mapping[str, Any], linears: Mapping[str, nn.Linear]) -> dict[str, Tensor]:
    """Return the factor of each layer's input. Of layers that share an input, one has the trained scale."""
    if scales["mode"] != "delayed" or not scales["updates"]:
        return {}
    seen = scales["history"].amax(0) > 0
    trained = {name: scales["scale"][row] for row, name in enumerate(scales["sites"]) if seen[row]}
    found = {}
    for path in linears:
        own = [trained[f"{one}.input"] for one in _list_fused(path, linears) if f"{one}.input" in trained]
        if own:
            found[path] = round_up_to_bf16(torch.stack(own).amin().float().reciprocal()).reshape(1)
    return found


def make_quantization_config(plan: Fp8Plan) -> dict[str, Any]:
    """Make the ``quantization_config`` of config.json."""
    static = [path for path in plan.layers if path in plan.input_scales]
    dynamic = [path for path in plan.layers if path not in plan.input_scales]
    groups = {}
    for number, (paths, is_dynamic) in enumerate([(paths, paths is dynamic) for paths in (static, dynamic) if paths]):
        groups[f"group_{number}"] = {
            "targets": ["Linear"] if len(paths) == len(plan.layers) else paths,
            "weights": _describe("tensor", False),
            "input_activations": _describe("token" if is_dynamic else "tensor", is_dynamic),
            "output_activations": None,
        }
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": plan.ignored,
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }


def _describe(strategy: str, dynamic: bool) -> dict[str, Any]:
    return {"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy, "dynamic": dynamic}
