"""The choice of cuBLASLt's algorithm; tests/gpu/test_gpu_cublas.py tests the products themselves."""

import pytest
import torch

from narrowgauge.kernels import cublas


def simulate_runs(*milliseconds):
    """Return simulated runs with these times, a clock for them, and how often each was timed."""
    timed = [0] * len(milliseconds)

    def clock(run, repeat):
        timed[run()] += 1
        return milliseconds[run()]

    return (
        [(name, lambda index=index: index) for index, name in enumerate("abcdefgh"[: len(milliseconds)])],
        clock,
        timed,
    )


@pytest.mark.parametrize(
    ("milliseconds", "expected"),
    [
        ((1.0, 0.9, 0.8), "c"),
        ((1.0, 0.99), "a"),  # within the noise
        ((1.0,), "a"),
        ((1.0, 2.0, 3.0, 0.5, 4.0, 5.0, 6.0, 7.0), "d"),
    ],
)
def test_the_fastest_is_chosen_if_the_gain_exceeds_noise(milliseconds, expected):
    runs, clock, timed = simulate_runs(*milliseconds)
    assert cublas.pick_fastest(runs, clock) == expected
    assert timed[0] == 1 + cublas.ROUNDS, "the usual one is in every round"
    assert sum(count > 1 for count in timed) <= 1 + cublas.FINALISTS


def test_a_slow_first_run_does_not_decide():
    times = {"a": iter([5.0, 1.0, 1.0, 1.0, 1.0]), "b": iter([0.9, 2.0, 2.0, 2.0, 2.0])}
    runs = [(name, lambda name=name: name) for name in times]
    assert cublas.pick_fastest(runs, lambda run, repeat: next(times[run()])) == "a"


def test_without_a_gpu_products_go_to_torch():
    a = torch.ones(4, 4, dtype=torch.bfloat16)
    assert cublas.product(a, a, torch.bfloat16, lambda out: pytest.fail("not asked for")) is None


def test_the_version_check_does_not_break_the_graph():
    def multiply(a, b):
        made = cublas.product(a, b, torch.bfloat16, lambda out: torch.mm(a, b, out=out))
        return torch.mm(a, b) if made is None else made

    a = torch.ones(32, 32, dtype=torch.bfloat16)
    compiled = torch.compile(multiply, backend="eager", fullgraph=True)
    assert torch.equal(compiled(a, a), torch.full((32, 32), 32.0, dtype=torch.bfloat16))
