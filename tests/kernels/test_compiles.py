"""Every kernel compiles for Hopper, with and without its optional arguments. Triton needs no GPU for that.

The interpreter evaluates at run time what the compiler decides in advance: a kernel can pass there and not compile.
With ``--sample``, further variants of a compiled kernel are only parsed, which finds what Triton rejects in the source.
"""

import importlib.util
import json
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")

SCRIPT = """
import contextlib
import os
import sys
from unittest import mock
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.compiler import ASTSource
from narrowgauge.kernels import activation_kernels as activation, cast, cross_entropy_kernels, norm_kernels
from narrowgauge.kernels import adamw, cast_block_scales, cast_row_scales, cast_rows, cast_weights, embedding, muon
from narrowgauge.kernels import rotary, round_blocks, sum_rows, tensor_stats
from narrowgauge.kernels.experts import activation as expert_activation, products, rows as expert_rows, slots, wide

I32, SMALL = "i32", 32
NOT_ALIGNED = ("length", "n16", "time", "ignore_index", "rows", "every", "across", "count", "shrink", "smallest",
               "pairs", "blocks", "tiles", "tiles_m", "tiles_n", "steps", "a_tiles", "b_tiles", "c_tiles")
POINTERS = {
    "scale_ptr": "*fp32", "inv_scale_ptr": "*fp32", "amax_ptr": "*fp32", "counts_ptr": "*i64", "targets_ptr": "*i64",
    "lse_ptr": "*fp32", "loss_ptr": "*fp32", "factor_ptr": "*fp32", "words_ptr": "*i32", "out_t_ptr": "*i32",
    "grad_gate_t_ptr": "*i32", "grad_up_t_ptr": "*i32", "mean_ptr": "*fp32", "rstd_ptr": "*fp32", "weight_ptr": "*fp32",
    "bias_ptr": "*fp32", "grad_weight_ptr": "*fp32", "grad_bias_ptr": "*fp32", "residual_ptr": "*fp32",
    "grad_residual_ptr": "*fp32", "grad_input_ptr": "*fp32", "recomputed_t_ptr": "*i32",
    "recomputed_scale_ptr": "*fp32",
}
FP8 = {"*fp8e4nv": dict(FORMAT="e4m3"), "*fp8e5": dict(FORMAT="e5m2")}


SAMPLE = "SAMPLE" in os.environ
compiled_kernels = set()


class Parsed(Exception):
    pass


def stop(*_):
    raise Parsed


def compiled(kernel, warps=4, none=(), types=None, is_read=False, **constants):
    types = {"eps": "fp32", **dict.fromkeys(("multiplier", "cap", "smoothing"), "fp32"), **(types or {})}
    constants |= {name: None for name in none}
    signature, attributes = {}, {}
    for index, name in enumerate(kernel.arg_names):
        kind = types.get(name) or POINTERS.get(name) or ("*bf16" if name.endswith("_ptr") else I32)
        signature[name] = "constexpr" if name in constants else kind
        if name not in constants and kind != "fp32" and name not in NOT_ALIGNED:
            attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constexprs=constants, attrs=attributes)
    is_small = constants.get("BLOCK_N") == SMALL
    is_edge = constants.get("WHOLE") is False and kernel is not cast._cast_kernel
    if not is_read and (is_small or is_edge or (SAMPLE and kernel in compiled_kernels)):
        with mock.patch.object(CUDABackend, "make_ttgir", stop), contextlib.suppress(Parsed):
            triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})
        return None
    compiled_kernels.add(kernel)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})
    assert made.asm["cubin"], kernel
    return made.asm["ptx"]


kind = sys.argv[1]
tile = dict(BLOCK_N=64, BLOCK_D=64, WHOLE=True)
edge = {**tile, "WHOLE": False}
# Each kernel is compiled at a size that is used. Its other variants are only parsed, in a quarter of the time.
small = dict(BLOCK_N=SMALL, BLOCK_D=32, WHOLE=True)
small_edge = {**small, "WHOLE": False}
if kind == "cast":
    for out, limits in FP8.items():
        options = ((), ("counts_ptr",), ("counts_ptr", "amax_ptr"), ("out_t_ptr",))
        for none in options if out == "*fp8e5" else options[:1]:  # the format changes constants only
            compiled(cast._cast_kernel, none=none, types={"out_ptr": out}, HEAD=None, **limits,
                     **(small if none else tile))
    compiled(cast._cast_kernel, none=("counts_ptr", "amax_ptr"), types={"out_ptr": out, "x_ptr": "*fp32"}, HEAD=None,
             **limits, **small)
    for size in (tile, edge):
        made = compiled(cast._cast_kernel, types={"out_ptr": out}, HEAD=64, is_read=True, **limits, **size)
        assert "ld.global.v4" in made and "ld.global.b16" not in made  # 16 bytes at a time
        compiled(cast._transpose_kernel, types={"x_ptr": "*u8"}, **size)
    for size in (small, small_edge):
        compiled(cast._cast_kernel, types={"out_ptr": out}, HEAD=48, **limits, **size)
    none = ("scale_ptr", "amax_ptr", "counts_ptr", "out_t_ptr")
    compiled(cast._cast_kernel, none=none, HEAD=64, FORMAT=None, **small)
    compiled(cast._max_abs_kernel, BLOCK_N=64, BLOCK_D=64)
    rows = {"x_ptr": "*u8", "row_amax_ptr": "*fp32", "saturated_ptr": "*i32", "flushed_ptr": "*i32"}
    for size, none in ((tile, ()), (edge, ()), ({**edge, "BLOCK_N": 1024, "BLOCK_D": 16}, ("out_t_ptr",))):
        compiled(cast_rows._record_kernel, none=none, types=rows, **size)
    names = ("row_amax_ptr", "column_amax_ptr", "inv_scale_ptr", "inv_scale_t_ptr")
    scaled = {**dict.fromkeys(names, "*fp32"), "saturated_ptr": "*i32", "flushed_ptr": "*i32", "shrink": "fp32"}
    for x, none in (("*bf16", ()), ("*fp32", ("column_amax_ptr",))):
        compiled(cast_row_scales._row_max_abs_kernel, none=none, types={**scaled, "x_ptr": x}, STEPS=8, BLOCK_N=64,
                 BLOCK_D=128)
    without = ("out_t_ptr", "inv_scale_t_ptr", "column_amax_ptr")
    for (out, limits), none, size, x in zip(FP8.items(), ((), without), (tile, small_edge), ("*bf16", "*fp32")):
        compiled(cast_row_scales._row_scales_cast_kernel, none=none, types={**scaled, "out_ptr": out, "x_ptr": x},
                 **limits, **size)
    made = compiled(cast_row_scales._row_scales_cast_kernel, types={**scaled, "out_ptr": out}, **limits,
                    BLOCK_N=128, BLOCK_D=64, WHOLE=True, is_read=True)
    assert "ld.global.v4" in made and "ld.global.b16" not in made  # 16 bytes at a time
    for (out, limits), x, none in zip(FP8.items(), ("*bf16", "*fp32"), ((), ("out_t_ptr", "inv_scale_t_ptr"))):
        for square in (False, True):
            for whole in (False, True):
                made = compiled(cast_block_scales._block_scales_cast_kernel, 8, none,
                                {**scaled, "out_ptr": out, "x_ptr": x}, **limits, SQUARE=square, WHOLE=whole,
                                BLOCK_N=128, BLOCK_D=128, is_read=whole and (not SAMPLE or square == (x == "*bf16")))
                assert made is None or "ld.global.v4" in made
    plain = {"shrink": "fp32", "smallest": "fp32", "out_ptr": "*fp8e4nv", "pending_ptr": "*i64"}
    for none in ((), ("counts_ptr", "pending_ptr"), ("scale_ptr", "counts_ptr", "pending_ptr"), ("out_t_ptr",)):
        for size, kind in ((small_edge, "*bf16"),) if none else ((tile, "*fp32"), (edge, "*bf16")):
            compiled(cast_weights._fit_kernel, none=none, types={**plain, "x_ptr": kind}, FORMAT="e4m3", **size)
elif kind == "activation":
    kept = ("a_codes_ptr", "a_codes_scales_ptr", "b_codes_ptr", "b_codes_scales_ptr")
    codes, both = (*kept, "a_scales_ptr"), ("gate_scales_ptr", "up_scales_ptr")
    plain = ("gelu_quick", "silu", "relu", "relu_squared")
    for op in plain:
        alone, out = ("b_ptr", "recomputed_t_ptr", "recomputed_scale_ptr", *codes), "*fp8e4nv"
        compiled(activation.pointwise_kernel, 8, alone, {"out_ptr": out}, OP=op, FORWARD=op, **FP8[out], **small)
        out = "*fp8e5"
        compiled(activation.pointwise_kernel, 8, codes, {"out_ptr": out}, OP=f"{op}_backward", FORWARD=op, **FP8[out],
                 **small_edge)
    types = {"grad_gate_ptr": "*fp8e5", "grad_up_ptr": "*fp8e5"}
    for op, name in (("geglu", "gelu"), ("geglu_tanh", "gelu_tanh"), ("reglu", "relu")):
        compiled(activation.gated_backward_kernel, 8, both, types, NAME=name, FORWARD=op, **FP8["*fp8e5"], **small)
    for op in ("gelu", "gelu_backward", "gelu_tanh", "gelu_tanh_backward", "swiglu"):
        again = ("recomputed_t_ptr", "recomputed_scale_ptr")
        alone = ("b_ptr", *again) if op in ("gelu", "gelu_tanh") else again if op == "swiglu" else ()
        alone = (*alone, *codes)
        out = "*fp8e5" if op.endswith("backward") else "*fp8e4nv"
        tanh = op.startswith("gelu_tanh")  # differs from gelu in one function
        full, uncounted = ((small_edge,), ()) if tanh else ((tile, small_edge), (small,))
        for none, sizes in (((), full), (("counts_ptr",), uncounted)):
            for size in sizes:
                compiled(activation.pointwise_kernel, 8, (*none, *alone), {"out_ptr": out}, OP=op,
                         FORWARD=op.removesuffix("_backward"), **FP8[out], **size)
        none = {*alone, *again, "scale_ptr", "amax_ptr", "counts_ptr", "out_t_ptr"}
        compiled(activation.pointwise_kernel, 8, none, OP=op, FORWARD=op, FORMAT=None, **small)
    silu = dict(NAME="silu", FORWARD="swiglu")
    bytes_8 = {name: "*u8" for name in ("a_codes_ptr", "b_codes_ptr")}
    one, two = ("b_ptr", "b_codes_ptr", "b_codes_scales_ptr"), ("recomputed_t_ptr", "recomputed_scale_ptr",
                                                                "out_t_ptr", "a_scales_ptr")
    for op, none, size in (("gelu", (*one, *two), tile), ("gelu", (*one, *two), edge), ("swiglu", two, tile)):
        compiled(activation.pointwise_kernel, 4, none, {"out_ptr": "*fp8e4nv", **bytes_8}, OP=op, FORWARD=op,
                 **FP8["*fp8e4nv"], **size)
    for size in (tile, edge):
        compiled(activation.pointwise_kernel, 4, kept, {"out_ptr": "*fp8e5", "a_ptr": "*u8"}, OP="gelu_backward",
                 FORWARD="gelu", **FP8["*fp8e5"], **size)
        compiled(activation.gated_backward_kernel, 8, (), {**types, "gate_ptr": "*u8", "up_ptr": "*u8"}, **silu,
                 **FP8["*fp8e5"], **size)
    for none, sizes in ((both, (tile, small_edge)), (("counts_ptr", *both), (small,))):
        for size in sizes:
            compiled(activation.gated_backward_kernel, 8, none, types, **silu, **FP8["*fp8e5"], **size)
    none = (*again, *both, "scale_ptr", "amax_ptr", "counts_ptr", "grad_gate_t_ptr", "grad_up_t_ptr")
    compiled(activation.gated_backward_kernel, 8, none, **silu, FORMAT=None, **small)
elif kind == "norm":
    size = dict(D=768, BLOCK=1024, ROWS=1, STAGES=1)
    back = dict(**size, LAYER=True, NORMALIZED=False)
    again = ("bias_ptr", "again_ptr", "again_scale_ptr")
    x = {"x_ptr": "*fp32", "out_ptr": "*fp8e4nv", "grad_input_lp_ptr": "*fp8e5", "again_ptr": "*fp8e4nv",
         "again_scale_ptr": "*fp32"}
    kept = {**x, "residual_ptr": "*bf16"}
    for none in (("bias_ptr", "normalized_ptr"), ("mean_ptr", "branch_ptr", "residual_ptr", "bias_ptr", "counts_ptr")):
        compiled(norm_kernels.forward_kernel, 2, none, x, **size, **FP8["*fp8e4nv"], IN_FP8=True)
    none, wide = ("bias_ptr",), {**x, "out_ptr": "*bf16", "normalized_ptr": "*bf16"}
    compiled(norm_kernels.forward_kernel, 2, none, wide, **size, **FP8["*fp8e4nv"], IN_FP8=False)
    for none in (("grad_bias_ptr", *again), ("grad_residual_ptr", "counts_ptr", *again)):
        compiled(norm_kernels.backward_kernel, 2, none, x, **back, **FP8["*fp8e5"])
    inner = {**x, "grad_input_ptr": "*bf16", "grad_residual_ptr": "*bf16"}
    compiled(norm_kernels.backward_kernel, 2, ("grad_bias_ptr", *again), inner, **back, **FP8["*fp8e5"])
    compiled(norm_kernels.backward_kernel, 2, ("mean_ptr",), kept, **size, LAYER=True, NORMALIZED=True, **FP8["*fp8e5"])
    none = ("mean_ptr", "bias_ptr", "grad_bias_ptr")
    compiled(norm_kernels.backward_kernel, 2, none, kept, **size, LAYER=False, NORMALIZED=True, **FP8["*fp8e5"])
    plain = ("scale_ptr", "amax_ptr", "counts_ptr", "normalized_ptr", "bias_ptr")
    compiled(norm_kernels.forward_kernel, 2, plain, {"x_ptr": "*fp32"}, **size, FORMAT=None, IN_FP8=False)
    plain = ("scale_ptr", "amax_ptr", "counts_ptr", "grad_bias_ptr", *again)
    compiled(norm_kernels.backward_kernel, 2, plain, **back, FORMAT=None)
    compiled(norm_kernels.backward_kernel, 2, (*plain, "grad_input_lp_ptr"), **back, FORMAT=None)
elif kind == "adamw":
    rates = {name: "fp32" for name in ("rate1", "beta2", "rate2", "eps")}
    tables = {"offsets_ptr": "*i64", "tensor_index_ptr": "*i32", "block_index_ptr": "*i32", "sizes_ptr": "*i64",
    "seeds_ptr": "*i32"}
    tables |= {"ticks_ptr": "*i32", "check_ptr": "*i32", "foreign_ptr": "*i64"}
    tables |= {"steps_ptr": "*fp32", "found_ptr": "*fp32", "first_scale_ptr": "*fp32", "second_scale_ptr": "*fp32"}
    scales = ("first_scale_ptr", "second_scale_ptr")
    for master, weight, low in (("split", "*bf16", "*i16"), ("copy", "*bf16", "*fp32"), ("none", "*bf16", "*bf16"),
                                ("itself", "*fp32", "*fp32")):
        for bits in (True, False):
            # Options in pairs: each value with each master.
            for whole in (bits,) if master != "itself" else (not bits,):
                types = {**rates, **tables, "weight_ptr": weight, "low_ptr": low}
                types |= {"first_ptr": "*i8" if bits else "*fp32", "second_ptr": "*u8" if bits else "*bf16"}
                none = () if whole else ("factor_ptr", "found_ptr")
                none += ("foreign_ptr",) if master in ("itself", "none") else ()
                compiled(adamw._adamw_kernel, 4, none, types, MAXIMIZE=whole, MASTER=master, EIGHT_BIT=bits,
                         EPS_IS_0=not whole, WHOLE=whole, UNITS=(8,) * 8 if whole else (1,) * 8, BLOCK=1024, GROUP=128)
    compiled(adamw._squares_kernel, 4, (), {**tables, "partial_ptr": "*fp64"}, WHOLE=True, UNIT=8, BLOCK=4096)
    compiled(adamw._norms_kernel, 4, (), {"partial_ptr": "*fp64", "first_ptr": "*i32", "norms_ptr": "*fp32"}, BLOCK=256)
elif kind == "muon":
    tables = {"offsets_ptr": "*i64", "tensor_index_ptr": "*i32", "block_index_ptr": "*i32", "sizes_ptr": "*i64",
    "seeds_ptr": "*i32", "check_ptr": "*i32", "foreign_ptr": "*i64", "rates_ptr": "*fp32", "found_ptr": "*fp32",
    "factor_ptr": "*fp32", "rate": "fp32", "momentum": "fp32", "scale_ptr": "*fp32", "direction_ptr": "*bf16"}
    for momentum, grad in (("*i8", "*bf16"), ("*bf16", "*fp32"), ("*fp32", "*fp32")):
        bits, types = momentum == "*i8", {**tables, "momentum_ptr": momentum, "grad_ptr": grad}
        compiled(muon._momentum_kernel, 4, () if bits else ("factor_ptr", "found_ptr"), types, NESTEROV=bits,
                 MAXIMIZE=not bits, EIGHT_BIT=bits, WHOLE=bits, UNITS=(8,) * 4 if bits else (1,) * 4, BLOCK=1024,
                 GROUP=128)
    for master, weight, low in (("split", "*bf16", "*i16"), ("copy", "*bf16", "*fp32"), ("none", "*bf16", "*bf16"),
                                ("itself", "*fp32", "*fp32")):
        whole, types = master in ("split", "none"), {**tables, "weight_ptr": weight, "low_ptr": low}
        compiled(muon._apply_kernel, 4, () if whole else ("found_ptr",), types, MASTER=master, WHOLE=whole,
                 UNITS=(8,) * 4 if whole else (1,) * 4, BLOCK=1024, GROUP=128)
elif kind == "experts":
    tables = {"pairs_ptr": "*i32", "slots_ptr": "*i32", "experts_ptr": "*i32", "starts_ptr": "*i32",
              "index_ptr": "*i64", "counts_ptr": "*i32", "before_ptr": "*i32", "of_pairs_ptr": "*i32",
              "held_ptr": "*i32"}
    for experts in (8, 256):
        sizes = dict(BLOCK=slots.LARGEST_TABLE // experts, EXPERTS=experts)
        compiled(slots._count_kernel, 4, (), tables, **sizes)
        compiled(slots._place_kernel, 8, (), tables, **sizes, TILE=128)
        compiled(slots._assign_kernel, 4, (), tables, **sizes)
    shape = products.MULTIPLY
    inverse = {"inv_a_ptr": "*fp32", "inv_b_ptr": "*fp32"}
    block = lambda dtype, rows, columns: f"tensordesc<{dtype}[{rows}, {columns}]>"
    types = {**tables, **inverse, "c_tiles": block("bf16", 128, shape["BLOCK_N"]),
             "b_tiles": block("fp8e4nv", shape["BLOCK_N"], shape["BLOCK_K"])}
    constants = {name: value for name, value in shape.items() if name.isupper()}
    for dtype in ("fp8e4nv", "fp8e5"):
        made = compiled(products._multiply_experts_kernel, shape["num_warps"], (),
                        {**types, "a_tiles": block(dtype, 128, 128)}, BLOCK_M=128, is_read=True, **constants)
        assert "wgmma.mma_async" in made and "cp.async.bulk.tensor" in made, "tensor cores and TMA"
    shape = products.MULTIPLY_SLOTS
    constants = {name: value for name, value in shape.items() if name.isupper()}
    types = {**tables, **inverse, "a_tiles": block("fp8e5", shape["BLOCK_M"], 128),
             "b_tiles": block("fp8e4nv", shape["BLOCK_N"], 128)}
    for out in ("*fp32", "*bf16"):
        made = compiled(products._multiply_slots_kernel, shape["num_warps"], (), {**types, "out_ptr": out},
                        BLOCK_K=128, is_read=True, **constants)
        assert "wgmma.mma_async" in made and "cp.async.bulk.tensor" in made, "tensor cores and TMA"
    tables["counts_ptr"] = "*i64"
    gather = {**expert_rows.GATHER_TILE, "CHOICES": 8, "WHOLE": True}
    del gather["num_warps"]
    for out, limits in FP8.items():
        for none in ((), ("out_t_ptr",), ("out_ptr", "amax_ptr", "counts_ptr")):
            compiled(expert_rows._gather_cast_kernel, 4, none, {**tables, "out_ptr": out}, **gather, **limits)
    compiled(expert_rows._sum_slots_kernel, 4, (), tables, CHOICES=8, BLOCK=1024)
    types = {**tables, "weights_ptr": "*fp32", "dots_ptr": "*fp32", "out_ptr": "*fp8e4nv"}
    for whole in (True, False):
        tile = dict(BLOCK_N=64, BLOCK_D=64, WHOLE=whole)
        compiled(expert_activation._activate_experts_kernel, 4, (), types, OP="swiglu", FORMAT="e4m3", **tile)
        of_grad = {"grad_gate_ptr": "*fp8e5", "grad_up_ptr": "*fp8e5"}
        compiled(expert_activation._activate_experts_backward_kernel, 8, (), types | of_grad, OP="swiglu", NAME="silu",
                 FORMAT="e5m2", **tile)
    types["out_ptr"] = "*bf16"
    compiled(wide._gather_kernel, 4, (), types, CHOICES=8, BLOCK=1024)
    compiled(wide._activate_wide_kernel, 4, (), types, OP="swiglu", BLOCK=1024)
    compiled(wide._activate_wide_backward_kernel, 4, (), types, OP="swiglu", NAME="silu", BLOCK=1024)
elif kind == "embedding":
    for dtype in ("*fp32", "*bf16"):
        types = {"grad_ptr": dtype, "ids_ptr": "*i64", "out_ptr": "*fp32"}
        compiled(embedding.add_rows_kernel, 4, (), types, BLOCK=1024)
elif kind == "rotary":
    weights = {"q_weight": "*fp32", "k_weight": "*fp32", "partial_ptr": "*fp32", "cos_ptr": "*fp32", "sin_ptr": "*fp32"}
    sizes = dict(H=4, K=2, S=64, HEADS=8)
    for none, turned in ((("q_weight", "k_weight", "rstd_ptr"), dict(R=64, HALF=32, REST=1, ALL=False, PAIRS=False)),
                         ((), dict(R=32, HALF=16, REST=32, ALL=False, PAIRS=True)),
                         ((), dict(R=64, HALF=32, REST=1, ALL=True, PAIRS=False))):
        compiled(rotary.forward_kernel, 4, none, weights, **sizes, **turned, IN_PLACE=bool(none))
        without = (*none, "partial_ptr") if none else ()
        compiled(rotary.backward_kernel, 4, without, weights, **sizes, **turned)
    sums = {"x_ptr": "*fp8e5", "out_ptr": "*fp32"}
    compiled(sum_rows._sum_kernel, 4, (), sums, D=768, SHARES=64, ROWS=64, COLUMNS=128)
elif kind == "stats":
    types = {"inverse_ptr": "*fp32", "counts_ptr": "*i64", "sizes_ptr": "*fp32", "size": "i64", "every": "i32"}
    for x in ("*fp32", "*bf16", "*fp16", "*fp8e4nv", "*fp8e5"):  # only FP8 tensors have an inverse scale
        none = () if "fp8" in x else ("inverse_ptr",)
        compiled(tensor_stats._stats_kernel, 4, none, {**types, "x_ptr": x}, BLOCK=4096 if x == "*fp32" else 1024)
elif kind == "blocks":
    types = {"codes_ptr": "*u8", "scales_ptr": "*u8", "seed_ptr": "*i64", "tensor_scale_ptr": "*fp32"}
    names, size = ("MANTISSA", "LOWEST", "HIGHEST", "LARGEST", "SIGN"), dict(BLOCK_N=64, BLOCK_D=64)
    stored, scaled = ("codes_ptr", "scales_ptr"), ("amax_ptr", "tensor_scale_ptr")
    by_row, by_column = {"column_stride": 1}, {"row_stride": 1}
    for name, none, block, x, strides in (
        ("fp8_e4m3", ("seed_ptr", *stored, *scaled), 32, "*bf16", by_row),
        ("fp8_e5m2", scaled, 32, "*bf16", by_column),
        ("fp4_e2m1", (), 16, "*bf16", by_row),
        ("fp4_e2m1", ("seed_ptr", *stored), 16, "*fp32", by_column),
        ("fp4_e2m1", ("seed_ptr", *stored), 16, "*fp16", {}),
    ):
        made = compiled(round_blocks._round_blocks_kernel, 4, none, {**types, "x_ptr": x}, BLOCK=block, CARRY=1 << 20,
                        **dict(zip(names, round_blocks.ELEMENTS[name])), **strides, **size,
                        is_read=not SAMPLE or name == "fp8_e4m3" or none == ())
        if made is None:
            continue
        assert ".ftz" not in made and "div.full" not in made and "div.approx" not in made  # not exact
        assert ("div.rn.f64" in made) == ("amax_ptr" not in none)
        assert "st.global.v4" in made and (not strides or "ld.global.v4" in made)  # 16 bytes at a time
    for x, strides in (("*bf16", by_column), ("*fp32", by_row)):
        made = compiled(round_blocks._spread_blocks_kernel, 4, (), {"x_ptr": x, "out_ptr": x, "signs_ptr": "*i64"},
                        **strides, **size, is_read=True)
        assert ".ftz" not in made and "ld.global.v4" in made
elif kind == "rehearsal":  # compiles in threads, through the driver of a GPU that is not there
    import threading
    import torch
    from triton.runtime import driver, jit
    from narrowgauge.kernels import rehearsal

    hopper = mock.Mock(**{"get_current_target.return_value": GPUTarget("cuda", 90, 32),
                          "get_current_device.return_value": 0})
    threads, compile_kernel = [], jit.JITFunction._do_compile
    size = dict(BLOCK_N=64, BLOCK_D=128, num_warps=4)

    def count(*args, **kwargs):
        threads.append(threading.current_thread().name)
        return compile_kernel(*args, **kwargs)

    with mock.patch.object(driver, "_active", hopper), mock.patch.object(torch.cuda, "current_device", lambda: 0), \
            mock.patch.object(torch.cuda, "set_device"), mock.patch.object(jit.JITFunction, "_do_compile", count):
        given = [(torch.bfloat16, 65536), (torch.bfloat16, 24), (torch.float32, 65536)]
        noted = {number: rehearsal.Variant(cast._max_abs_kernel, (dtype, torch.float32, rows, 768, 768), size)
                 for number, (dtype, rows) in enumerate(given)}  # the number of rows makes no variant
        rehearsal.start_compiling(noted)
        for number in (*noted, "not noted"):
            rehearsal.wait_for(number)
        assert len(threads) == 2 and all(name.startswith("compile kernels") for name in threads), threads
        cast._max_abs_kernel.warmup(torch.float32, torch.float32, 48, 768, 768, grid=(1,), **size)
        assert len(threads) == 2, "a launch finds what was compiled"
        # A product of experts, whose tensors are read by tiles: gradients in E5M2 are another kernel than in E4M3.
        from triton.tools.tensor_descriptor import TensorDescriptor
        shape, ints = products.MULTIPLY, (8, 2, 16, 512, 0)
        tiles = {"a": (128, 128), "b": (shape["BLOCK_N"], 128), "c": (128, shape["BLOCK_N"])}
        def make(dtype, size):
            dtypes = {"a": dtype, "b": torch.float8_e4m3fn, "c": torch.bfloat16}
            return [(torch.empty(size, 512, dtype=dtypes[name]), tile) for name, tile in tiles.items()]
        others = [torch.int32] * 2 + [torch.float32] * 2
        noted = {}
        for number, (dtype, size) in enumerate([(torch.float8_e4m3fn, 256), (torch.float8_e5m2, 256),
                                                (torch.float8_e4m3fn, 384)]):
            rehearsal.noted = noted
            rehearsal.note(f"product {number}", products._multiply_experts_kernel, (*make(dtype, size), *others, *ints),
                           dict(BLOCK_M=128, **shape))
            rehearsal.noted = None
        assert len(noted) == 3 and not any(isinstance(arg, torch.Tensor) for one in noted.values() for arg in one.args)
        rehearsal.start_compiling(noted)
        assert rehearsal.is_compiling()
        for number in noted:
            rehearsal.wait_for(number)
        assert not rehearsal.is_compiling()
        assert len(threads) == 4 and all(name.startswith("compile kernels") for name in threads), threads
        real = [TensorDescriptor.from_tensor(tensor, list(tile)) for tensor, tile in make(torch.float8_e5m2, 512)]
        products._multiply_experts_kernel.warmup(*real, *others, *ints, grid=(1,), BLOCK_M=128, **shape)
        assert len(threads) == 4, "a launch finds what was compiled"
else:
    plain = ("multiplier", "cap", "smoothing")
    compiled(cross_entropy_kernels.grad_logits_kernel, 8, plain, BLOCK_N=16, BLOCK_V=512)
    for form in (plain, ()):  # the form of the loss does not depend on the other options
        compiled(cross_entropy_kernels.statistics_kernel, 4, form, BLOCK=2048)
        compiled(cross_entropy_kernels.loss_gradient_kernel, 32, form, BLOCK=8192)
        for out, limits in FP8.items() if form else [("*fp8e4nv", FP8["*fp8e4nv"])]:
            for none in ((), ("counts_ptr", "words_ptr")) if form else ((),):
                compiled(cross_entropy_kernels.grad_logits_fp8_kernel, 8, (*none, *form), {"out_ptr": out},
                         SCALE=256.0, SHIFT=8.0, COUNT=not none, **limits, **(small_edge if none else tile))
"""


KINDS = [
    *("cast", "activation", "norm", "cross_entropy", "adamw", "muon", "embedding", "rotary", "stats", "blocks"),
    *("experts", "rehearsal"),
]
RUN_ALL = """
import json, sys, traceback
script, *kinds = sys.argv[1:]
failures = {}
for kind in kinds:
    sys.argv[1:] = [kind]
    try:
        exec(script, {"__name__": kind})
    except Exception:
        failures[kind] = traceback.format_exc()
print(json.dumps(failures))
"""


@pytest.fixture(scope="module")
def failures(request):
    """Return the traceback of each kernel that fails. One process compiles all: Triton takes seconds to import."""
    sample = {"SAMPLE": "1"} if request.config.getoption("--sample") else {}
    done = subprocess.run(
        [sys.executable, "-c", RUN_ALL, SCRIPT, *KINDS],
        capture_output=True,
        text=True,
        timeout=800,
        env={**os.environ, **sample, "TRITON_INTERPRET": "0"},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.timeout(800)  # a minute of work where Triton's cache is empty
@pytest.mark.parametrize("kind", KINDS)
def test_kernels_compile_for_hopper(failures, kind):
    assert kind not in failures, failures[kind][-3000:]
