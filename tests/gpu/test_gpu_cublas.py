"""Products by the fastest cuBLASLt algorithm match torch in every layout and format; cases that fall back to torch."""

import threading

import pytest
import torch

from narrowgauge.kernels import cublas
from narrowgauge.nn.products.gemm import E4M3, E5M2, multiply_bf16, multiply_fp8

BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def forget_choices(monkeypatch, tmp_path):
    monkeypatch.setenv("NARROWGAUGE_CACHE", str(tmp_path))
    cublas._get_store.cache_clear()
    monkeypatch.setattr(cublas, "_choices", {})
    monkeypatch.setattr(cublas, "MARGIN", float("inf"))  # always take the fastest, even if torch's is close


@pytest.fixture
def searches(monkeypatch):
    """Count the searches, and search only cuBLASLt's proposals."""
    found, plain = [], cublas.pick_fastest
    monkeypatch.setattr(cublas, "pick_fastest", lambda runs, clock: found.append(len(runs)) or plain(runs[1:], clock))
    return found


def operands(m, n, k, transposed_a=False, transposed_b=False):
    torch.manual_seed(0)
    a = torch.randn(*((k, m) if transposed_a else (m, k)), device="cuda", dtype=BF16)
    b = torch.randn(*((n, k) if transposed_b else (k, n)), device="cuda", dtype=BF16)
    return a.t() if transposed_a else a, b.t() if transposed_b else b


def exact(a, b):
    return a.double() @ b.double()


@pytest.mark.parametrize("out", [BF16, torch.float32])
@pytest.mark.parametrize("transposed_a", [False, True])
@pytest.mark.parametrize("transposed_b", [False, True])
@pytest.mark.parametrize("sizes", [(8192, 2304, 768), (768, 3072, 16384)])
def test_bf16_in_any_layout(sizes, transposed_a, transposed_b, out, searches):
    a, b = operands(*sizes, transposed_a, transposed_b)
    made = multiply_bf16(a, b, out)
    assert searches and made.dtype is out and all(cublas._choices.values())
    by_torch = torch.mm(a, b) if out is BF16 else torch.mm(a, b, out_dtype=out)
    right = exact(a, b)
    assert (made - right).abs().max() <= 1.05 * (by_torch - right).abs().max() + 1e-4 * right.abs().max()


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("out", [BF16, torch.float32])
@pytest.mark.parametrize("first", [E4M3, E5M2])
def test_fp8_with_scales(first, out, fast, searches):
    a, b_t = operands(8192, 2304, 768, transposed_b=True)
    b = b_t.t()
    inv_a, inv_b = torch.tensor(0.5, device="cuda"), torch.tensor(3.0, device="cuda")
    made = multiply_fp8(a.to(first), b.to(E4M3), inv_a, inv_b, out, fast)
    assert searches and made.dtype is out and all(cublas._choices.values())
    by_torch = torch._scaled_mm(
        a.to(first), b.to(E4M3).t(), scale_a=inv_a, scale_b=inv_b, out_dtype=out, use_fast_accum=fast
    )
    right = exact(a.to(first).float(), b.to(E4M3).float().t()) * 1.5
    assert (made - right).abs().max() <= 1.2 * (by_torch - right).abs().max() + 1e-4 * right.abs().max()


def test_a_shape_is_searched_once_and_not_during_capture(searches):
    a, b = operands(8192, 2304, 768)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.mm(a, b)  # initializes cuBLAS
    with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream):
        multiply_bf16(a, b)
    assert not searches
    first = multiply_bf16(a, b)
    assert len(searches) == 1 and torch.equal(first, multiply_bf16(a, b)) and len(searches) == 1
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        captured = multiply_bf16(a, b)
    graph.replay()
    assert len(searches) == 1 and torch.equal(first, captured)


def test_threads_have_their_own_descriptors(searches):
    a, b = operands(8192, 2304, 768, transposed_b=True)
    one = torch.ones((), device="cuda")
    results = {}

    def work(scale):
        inverse = one * scale
        results[scale] = [multiply_fp8(a.to(E4M3), b.t().to(E4M3), inverse, one) for _ in range(20)]
        torch.cuda.synchronize()

    work(1.0)
    right = results[1.0][0].float()
    threads = [threading.Thread(target=work, args=(scale,)) for scale in (2.0, 4.0, 8.0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for scale, made in results.items():
        assert all(torch.equal(one.float(), right * scale) for one in made)


@pytest.mark.filterwarnings("ignore:.*eterministic")
def test_cases_that_fall_back_to_torch(searches, monkeypatch):
    small, wide = operands(64, 64, 64), operands(8192, 2304, 776)
    multiply_bf16(*small)
    multiply_bf16(wide[0][:, 8:], wide[1][8:])  # an offset of 16 bytes
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        multiply_bf16(*operands(8192, 2304, 768))
    finally:
        torch.use_deterministic_algorithms(False)
    watched = operands(8192, 2304, 768)[0].requires_grad_()
    assert multiply_bf16(watched, operands(8192, 2304, 768)[1]).requires_grad
    monkeypatch.setattr(cublas, "MOST_SHAPES", 0)
    multiply_bf16(*operands(8192, 2304, 768))
    assert not searches and not cublas._choices


def test_torch_rejects_operands_that_do_not_match():
    a, b = operands(8192, 2304, 768)
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        multiply_bf16(a, b[:512])
    assert not cublas._choices


def test_the_chosen_algorithm_is_not_slower_than_torch(monkeypatch):
    monkeypatch.setattr(cublas, "MARGIN", 0.985)
    a, b = operands(65536, 3072, 768, transposed_b=True)
    multiply_bf16(a, b)
    ours, torchs = [], []
    for _ in range(8):  # in turns: other tests may use the GPU at the same time
        ours.append(cublas._measure_ms(lambda: multiply_bf16(a, b), 10))
        torchs.append(cublas._measure_ms(lambda: torch.mm(a, b), 10))
    assert min(ours) < 1.05 * min(torchs), (ours, torchs)


def test_a_later_process_uses_the_choice_without_a_search(searches, monkeypatch):
    a, b_t = operands(8192, 2304, 768, transposed_b=True)
    first = multiply_bf16(a, b_t)
    chosen = [bytes(one.algorithm) for one in cublas._choices.values()]
    assert len(searches) == 1 and len(chosen) == 1
    monkeypatch.setattr(cublas, "_choices", {})
    cublas._get_store.cache_clear()
    assert torch.equal(multiply_bf16(a, b_t), first)
    assert len(searches) == 1, "the choice was read"
    assert [bytes(one.algorithm) for one in cublas._choices.values()] == chosen
