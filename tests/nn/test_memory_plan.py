"""The choice of what blocks keep: against trying everything, and the plan's text and JSON."""

import itertools
import json

from hypothesis import given, settings
from hypothesis import strategies as st

from narrowgauge.nn import memory_plan
from narrowgauge.nn.memory_plan import MemoryPlan, Moment, Option, choose, choose_least, predict_peak
from pace import at_most

SIZES = st.integers(0, 12)


@st.composite
def options(draw):
    """Return the options of a block: keeping everything costs nothing, recomputing keeps nothing."""
    middle = draw(st.lists(st.tuples(SIZES, st.integers(0, 9), st.integers(-4, 4)), max_size=2))
    most, slowest = draw(SIZES), draw(st.integers(0, 9))
    found = [Option(f"option {number}", kept, float(ms), own) for number, (kept, ms, own) in enumerate(middle)]
    return [Option("none", most, 0.0, draw(st.integers(-4, 4))), *found, Option("full", 0, float(slowest))]


@st.composite
def problems(draw):
    """Return blocks, some of them equal, and the moments of a step: forward, between, backward and the update."""
    kinds = draw(st.lists(options(), min_size=1, max_size=2))
    blocks = [kinds[draw(st.integers(0, len(kinds) - 1))] for _ in range(draw(st.integers(1, 5)))]
    moments = []
    for number in range(len(blocks)):
        moments += [Moment(draw(SIZES), number), Moment(draw(SIZES), number + 1), Moment(draw(SIZES), number, number)]
    return blocks, [*moments, Moment(draw(SIZES), 0)], draw(st.integers(0, 60))


def try_everything(blocks, moments, limit):
    """Return the least time of all choices that fit; None if none does."""
    fitting = [chosen for chosen in itertools.product(*blocks) if predict_peak(chosen, moments) <= limit]
    return min((sum(option.cost_ms for option in chosen) for chosen in fitting), default=None)


@settings(max_examples=400, deadline=None)
@given(problems())
def test_the_choice_fits_and_no_other_is_faster(problem):
    blocks, moments, limit = problem
    picked, best = choose(blocks, moments, limit), try_everything(blocks, moments, limit)
    assert (picked is None) == (best is None)
    if picked is not None:
        chosen = [some[place] for some, place in zip(blocks, picked, strict=True)]
        assert predict_peak(chosen, moments) <= limit
        assert abs(sum(option.cost_ms for option in chosen) - best) < 1e-6


@settings(max_examples=50, deadline=None)
@given(problems(), st.integers(1, 20))
def test_more_memory_never_costs_more(problem, more):
    blocks, moments, limit = problem
    less, plenty = choose(blocks, moments, limit), choose(blocks, moments, limit + more)
    if less is not None:
        assert plenty is not None
        costs = [sum(blocks[i][place].cost_ms for i, place in enumerate(picked)) for picked in (plenty, less)]
        assert costs[0] <= costs[1] + 1e-6


KINDS = [Option("none", 2000, 0.0), Option("selective", 1867, 0.2), Option("8bit", 1182, 0.4), Option("full", 0, 5.1)]


def test_the_last_blocks_keep_most_since_backward_frees_them_first():
    picked = choose([KINDS] * 6, [Moment(100, 6), Moment(900, 0)], 5200)
    kept = [KINDS[place].kept_bytes for place in picked]
    assert kept == sorted(kept) and kept[0] == 0 and sum(kept) <= 5100


def test_gradients_that_grow_in_backward_limit_what_the_first_blocks_keep():
    """Without them, what all blocks keep together would be the only limit."""
    moments = [Moment(0, 4), *(Moment(3500 - 500 * held, held) for held in range(1, 4))]
    picked = choose([KINDS] * 4, moments, 6000)
    sums = list(itertools.accumulate(KINDS[place].kept_bytes for place in picked))
    assert sums[0] <= 3000 and sums[1] <= 3500 and sums[2] <= 4000 and sums[3] <= 6000


def test_many_blocks_with_different_sizes_take_little_time(monkeypatch):
    blocks = [[Option(o.name, o.kept_bytes + 7 * i, o.cost_ms + 0.01 * i, 0) for o in KINDS] for i in range(100)]
    moments = [Moment(5000, 100), Moment(20000, 0)]
    with at_most(20):
        exact = choose(blocks, moments, 120_000)
    monkeypatch.setattr(memory_plan, "MOST_CHOICES", 512)
    rough = choose(blocks, moments, 120_000)
    costs = [sum(blocks[i][place].cost_ms for i, place in enumerate(picked)) for picked in (exact, rough)]
    assert costs[0] <= costs[1] < 1.05 * costs[0]


def test_the_smallest_peak_need_not_be_that_of_recomputation():
    """In the backward of the first block all gradients exist, and a recomputed block needs more there."""
    options = [Option("none", 10, 0.0, -5), Option("full", 0, 1.0)]
    assert choose_least([options] * 3, [Moment(100, 0, 0), Moment(20, 3)]) == [0, 0, 0]
    assert choose_least([options] * 3, [Moment(100, 0, 0), Moment(90, 3)]) == [1, 1, 1]
    assert choose([options] * 3, [Moment(100, 0, 0), Moment(20, 3)], 95) == [0, 0, 0]
    assert choose_least([], [Moment(1, 0)]) == []


def test_a_model_without_blocks_fits_or_does_not():
    assert choose([], [Moment(10, 0)], 10) == []
    assert choose([], [Moment(11, 0)], 10) is None


def test_a_plan_is_one_line_and_json():
    blocks = {"a.0": "full", "a.1": "8bit", "a.2": "none", "a.3": "none"}
    plan = MemoryPlan(budget=110 * 10**9, blocks=blocks, peak=109 * 10**9, cost_ms=7.26, smallest=60 * 10**9)
    assert str(plan) == (
        "memory plan for 110.0 GB: activations of blocks: 2 kept, 1 recomputed, 1 kept in 8 bits; 7.3 ms per step more "
        "than if all are kept; peak 109.0 GB"
    )
    assert MemoryPlan.read(json.loads(json.dumps(plan.describe()))) == plan
    assert plan.describe()["options"] == {"none": 2, "full": 1, "8bit": 1}
    small = MemoryPlan(budget=40 * 10**9, blocks=blocks, peak=60 * 10**9, smallest=60 * 10**9, fits=False)
    assert str(small) == "the budget of 40.0 GB is too small: a step takes at least 60.0 GB, whatever its blocks keep"
