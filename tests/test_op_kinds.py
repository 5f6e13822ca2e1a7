"""Kinds of operations by name: one table for operators and kernels."""

import pytest

from narrowgauge import op_kinds
from narrowgauge.bench import trace

NAMES = {
    "aten::mm": "product",
    "aten::_scaled_mm": "product",
    "aten::_grouped_mm": "product",
    "narrowgauge::multiply_by_experts": "product",
    "_multiply_slots_kernel": "product",
    "narrowgauge::activate_experts_backward": "activation",
    "_activate_experts_kernel": "activation",
    "narrowgauge::gather_cast": "cast",
    "_gather_cast_kernel": "cast",
    "narrowgauge::sum_slots": "pointwise",
    "aten::convolution_backward": "convolution",
    "aten::_scaled_dot_product_cudnn_attention_backward": "attention",
    "aten::native_layer_norm": "norm",
    "narrowgauge::norm_backward": "norm",
    "aten::normal_": "pointwise",
    "aten::gelu_backward": "activation",
    "aten::threshold_backward": "activation",
    "narrowgauge::swiglu_backward": "activation",
    "aten::_log_softmax": "loss",
    "narrowgauge::loss_gradient": "loss",
    "narrowgauge::softmax_statistics": "loss",
    "narrowgauge::rescale": "loss",
    "aten::embedding_dense_backward": "embedding",
    "narrowgauge::embedding_gradient": "embedding",
    "narrowgauge::cast_transpose_packed_unrecorded": "cast",
    "narrowgauge::cast_block_scales": "cast",
    "narrowgauge::cast_row_scales": "cast",
    "narrowgauge::max_abs_of_rows": "cast",
    "narrowgauge::cast_weight_delayed": "cast",
    "narrowgauge::max_abs": "cast",
    "narrowgauge::round_blocks": "cast",
    "_spread_blocks_kernel": "cast",
    "narrowgauge::pack": "copy",
    "aten::_to_copy": "copy",
    "aten::cat": "copy",
    "aten::_foreach_add_": "optimizer",
    "narrowgauge::gradient_norms": "optimizer",
    "narrowgauge::adamw": "optimizer",
    "aten::add": "pointwise",
    "aten::sum": "pointwise",
}


@pytest.mark.parametrize("name", NAMES)
def test_names_map_to_kinds(name):
    assert op_kinds.classify(name) == NAMES[name]


def test_a_profile_reports_the_same_kinds_in_fewer_groups():
    assert set(trace.NAMES) == {trace.GROUPS.get(kind, kind) for kind in (*op_kinds.KINDS, op_kinds.OTHER)}
    assert trace.kind_of("aten::mm") == trace.kind_of("aten::convolution") == "gemm"
    assert trace.kind_of("aten::embedding") == trace.kind_of("aten::add") == "other"
