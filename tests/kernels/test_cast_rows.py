"""Casts of compiled graphs: the same bytes and statistics as other casts, in torch, in Triton and through inductor."""

import pytest
import torch
from oracle import KERNEL, assert_same, draw, statistics

from narrowgauge.kernels.cast import transpose_reference
from narrowgauge.kernels.cast_rows import cast_rows, record_rows, record_rows_reference
from narrowgauge.kernels.fp8_tile import quantize_reference
from narrowgauge.kernels.inductor_lowering import teach_inductor

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SCALES = torch.tensor([1.0, 3.0])


def make_tables():
    return torch.full((4, 4), 0.5)[:, 0], torch.ones(4, 2, dtype=torch.int64)


def with_extremes(*shape):
    x = draw(*shape)
    x.view(-1)[:6] = torch.tensor([0.0, 1e30, -1e30, 1e-30, -1e-30, torch.inf])
    return x


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_rows_give_the_bytes_and_statistics_of_a_cast(dtype):
    x = with_extremes(48, 40)
    amax, counts = statistics()
    wanted = quantize_reference(x, SCALES[1], dtype, amax, counts)
    x_lp, *stats = cast_rows(x, SCALES[1], dtype)
    assert_same(x_lp, wanted)
    table = torch.zeros(3), torch.zeros(3, 2, dtype=torch.int64)
    assert_same(record_rows(x_lp, *stats, *table, torch.tensor([9, 2]), True), transpose_reference(wanted))
    assert table[0].tolist() == [0, 0, amax.item()] and table[1].tolist() == [[0, 0], [0, 0], counts.tolist()]
    assert record_rows(x_lp, *stats, *table, torch.tensor([9, 2]), False).numel() == 0
    assert table[1][2].tolist() == (2 * counts).tolist()


@KERNEL
@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize("shape", [(128, 128), (1040, 24), (7, 3)])
def test_the_kernel_records_and_transposes_as_the_reference_does(shape, transposed):
    made = cast_rows(with_extremes(*shape), SCALES[1], E5M2)
    wanted_tables, tables = make_tables(), make_tables()
    wanted = record_rows_reference(*made, *wanted_tables, torch.tensor([9, 2]), transposed)
    assert_same(record_rows(*made, *tables, torch.tensor([9, 2]), transposed), wanted)
    for mine, theirs in zip(tables, wanted_tables, strict=True):
        assert torch.equal(mine, theirs)
    broken = [made[0], made[1].clone(), *made[2:]]
    broken[1][-1] = torch.nan
    record_rows(*broken, *tables, torch.tensor([9, 1]), transposed)
    assert tables[0].isnan().tolist() == [False, True, False, False]


@pytest.mark.filterwarnings("ignore:.*should not be instantiated")
def test_inductor_computes_the_cast_in_the_kernel_of_its_producer():
    import torch._inductor.lowering
    from torch._inductor.utils import run_and_get_code

    def compute(x):
        x_lp, *stats = cast_rows(2 * x, SCALES[1], E4M3)
        return x_lp.view(torch.uint8), *stats

    assert teach_inductor()
    x = with_extremes(16, 40)
    x[3, 3] = torch.nan
    found, code = run_and_get_code(torch.compile(compute, fullgraph=True), x)
    assert "ops.narrowgauge" not in code[0] and code[0].count("async_compile.cpp_pybinding(") == 1
    for mine, theirs in zip(found, compute(x), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0, equal_nan=True)
