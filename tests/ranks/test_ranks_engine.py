"""An engine on several ranks matches one in a single process: losses, norms, skips and FP8 scales."""

import contextlib

import pytest
import torch
from processes import run_ranks
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.debug import CommDebugMode

from narrowgauge import Engine
from narrowgauge.engine import choose_recipe as choosing
from narrowgauge.errors import UsageError
from narrowgauge.models.gpt import GPT, GPTConfig
from narrowgauge.ranks import replicate, shard, update_sync
from narrowgauge.ranks.world import SINGLE_PROCESS, join_world
from narrowgauge.recipe import NAMED
from narrowgauge.runs.optimizers import make_adamw
from narrowgauge.runs.rank_batches import RankBatches
from narrowgauge.scaling import gradient_formats

RECIPES = (
    "fp32",
    "bf16",
    "fp16",
    "fp8",
    "bf16-lean",
    "fp8-lean",
    "fp8[granularity=row]",
    "bf16[keep=LayerNorm+lm_head]",
)


def shard_manually(model, recipe):
    """Shard a model as users do: every parameter, gathered in the compute format."""
    gathered = {"fp32": None, "fp16": torch.float16}.get(recipe, torch.bfloat16)
    policy = MixedPrecisionPolicy(param_dtype=gathered, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mp_policy=policy)
    return fully_shard(model, mp_policy=policy)


WAYS = {"none": lambda model, recipe: model, "fsdp": shard, "ddp": replicate, "own": shard_manually}
STEPS = 3


def engine_of(recipe, way, accumulate=1, optimizer=None):
    torch.manual_seed(0)
    model = GPT(GPTConfig(layers=2, width=64, heads=4, context=32, vocab=100))
    model = WAYS[way](model, recipe)
    chosen = optimizer(model) if optimizer else make_adamw(model, 3e-3, 0.1)
    return Engine(model, chosen, recipe, clip_norm=0.5, accumulate=accumulate)


def batch_of(number):
    tokens = torch.randint(0, 100, (8, 33), generator=torch.Generator().manual_seed(number))
    tokens[:, 1::2] = tokens[:, 0:-1:2]
    return tokens[:, :-1], tokens[:, 1:]


def curve(recipe, way, world=SINGLE_PROCESS, accumulate=1, optimizer=None):
    part = RankBatches(world.rank, world.size, accumulate)
    engine = engine_of(recipe, way, part.microbatches, optimizer)
    numbers = []
    for step in range(STEPS):
        total = 0.0
        for number in part.batch_numbers(step):
            with engine.forward():
                loss = engine.model(*part.select_rows(batch_of(number)))
            engine.backward(loss)
            report = engine.step()
            total += engine.update_sync.average(loss.detach()).item() / part.microbatches
        numbers.append((total, report.grad_norm))
    return numbers, engine


def curves_of_ranks(cases):
    with join_world("cpu") as world:
        return {"|".join(case): curve(*case, world)[0] for case in cases}


@pytest.fixture(scope="module")
def alone():
    return {recipe: curve(recipe, "none")[0] for recipe in RECIPES}


CASES = {
    2: [
        *((recipe, way) for recipe in RECIPES for way in ("fsdp", "ddp")),
        *((recipe, "own") for recipe in ("fp32", "fp16", "fp8", "fp8-lean")),  # every format that is gathered
    ],
    4: [("fp32", "fsdp"), ("fp8-lean", "fsdp")],  # the simplest and the most complex; 2 ranks have the others
}


@pytest.mark.parametrize("ranks", CASES)
def test_losses_and_norms_match_one_process(tmp_path, alone, ranks):
    cases = CASES[ranks]
    found = run_ranks(ranks, curves_of_ranks, tmp_path, cases)
    assert all(answer == found[0] for answer in found)  # all ranks have the same numbers
    for recipe, way in cases:
        exact = recipe == "fp32"
        for (loss, norm), (loss_alone, norm_alone) in zip(found[0][f"{recipe}|{way}"], alone[recipe], strict=True):
            assert loss == pytest.approx(loss_alone, rel=1e-6 if exact else 1e-3), (recipe, way)
            assert norm == pytest.approx(norm_alone, rel=1e-4 if exact else 0.05), (recipe, way)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def accumulated():
    with join_world("cpu") as world:
        dealt = curve("fp32", "fsdp", world, 4)[0]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(update_sync, "_cannot_wait", lambda sharded: True)
            assert curve("fp32", "fsdp", world, 4)[0] == [pytest.approx(numbers) for numbers in dealt]
        cut = curve("fp32", "fsdp", world, 3)[0]
        other = curve("bf16", "fsdp", world, 1, sgd)[0]
        return dealt, cut, other, [_count_reductions(way) for way in ("fsdp", "ddp")]


def _count_reductions(way):
    """Count the collectives in the backward of each of two microbatches."""
    engine = engine_of("fp32", way, 2)
    counts = []
    for number in range(2):
        with engine.forward():
            loss = engine.model(*batch_of(number))
        with CommDebugMode() as sent:
            engine.backward(loss)
        reduced = {str(op): count for op, count in sent.get_comm_counts().items() if "reduce" in str(op)}
        counts.append(sum(reduced.values()))
        engine.step()
    return counts


def test_microbatches_are_divided_and_gradients_reduced_once(tmp_path):
    dealt, cut, other, sent = run_ranks(2, accumulated, tmp_path)[0]
    for losses, accumulate in ((dealt, 4), (cut, 3)):
        alone = curve("fp32", "none", SINGLE_PROCESS, accumulate)[0]
        assert [loss for loss, _ in losses] == pytest.approx([loss for loss, _ in alone])
    by_sgd = curve("bf16", "none", SINGLE_PROCESS, 1, sgd)[0]
    assert [loss for loss, _ in other] == pytest.approx([loss for loss, _ in by_sgd], rel=1e-3)
    assert sent[0][0] == 0 and sent[0][1] > 0  # FSDP; DDP's reducer is invisible to the counter
    assert sent[1][0] == 0


def overflow(way):
    """Make the loss of the third step overflow, on the last rank only."""
    with join_world("cpu") as world:
        engine = engine_of("fp16", way)
        results = []
        for number in range(5):
            inputs, targets = batch_of(number)
            with engine.forward():
                loss = engine.model(inputs, targets)
            if number == 2 and world.rank == world.size - 1:
                loss = loss * 1e30
            engine.backward(loss)
            report = engine.step()
            results.append((report.applied, engine.scaler.get_scale()))
        return results


@pytest.mark.parametrize("way", ["fsdp", "ddp"])
def test_an_overflow_on_one_rank_is_skipped_by_all(tmp_path, way):
    answers = run_ranks(2, overflow, tmp_path, way)
    assert answers[0] == answers[1]
    assert [applied for applied, _ in answers[0]] == [True, True, False, True, True]
    scales = [scale for _, scale in answers[0]]
    assert scales[2] == scales[1] / 2


def scales_of_ranks():
    with join_world("cpu") as world:
        # Another GPU may have measured other times: auto takes the choice of the first rank.
        choosing.depends_on_model = lambda *_: True
        choosing.choose_for_model = lambda *_, **__: (NAMED["bf16" if world.rank else "fp8"], f"rank {world.rank}")
        engine = engine_of("auto", "fsdp")
        assert (str(engine.recipe), engine.recipe_reason) == ("fp8", "rank 0")
        assert engine.update_sync.is_first == (world.rank == 0)
        for number in range(3):
            inputs, targets = batch_of(10 * world.rank + number)  # each rank has different data
            with engine.forward():
                loss = engine.model(inputs, targets)
            engine.backward(loss)
            engine.step()
        return engine.conversion.scales.scale.tolist()


def test_recipe_of_auto_and_fp8_scales_are_equal_on_all_ranks(tmp_path):
    one, other = run_ranks(2, scales_of_ranks, tmp_path)
    assert one == other and len(set(one)) > 3


def formats_of_ranks(way):
    with join_world("cpu") as world:
        gradient_formats.EARLY = (2,)
        engine = engine_of("fp8[products=all,gradients_format=auto]", way)
        for number in range(3):
            inputs, targets = batch_of(10 * world.rank + number)
            with engine.forward():
                loss = engine.model(inputs, targets)
            engine.backward(loss)
            engine.step()
        return engine.gradient_formats.changes, engine.conversion.scales.scale.tolist()


@pytest.mark.parametrize("way", ["fsdp", "ddp"])
def test_formats_of_gradients_are_equal_on_all_ranks(tmp_path, way):
    one, other = run_ranks(2, formats_of_ranks, tmp_path, way)
    assert one == other
    assert one[0] and {update for update, *_ in one[0]} == {2}


def refusals():
    results = []
    with join_world("cpu"):
        for attempt in (_flush_early, _use_released_gradients_with_ddp, _wrap_in_ddp_first):
            with contextlib.suppress(UsageError):
                try:
                    attempt()
                    results.append("")
                except UsageError as error:
                    results.append(str(error))
    return results


def _flush_early():
    engine = engine_of("fp32", "fsdp", 2)
    with engine.forward():
        loss = engine.model(*batch_of(0))
    engine.backward(loss)
    engine.flush()


def _use_released_gradients_with_ddp():
    engine_of("bf16-lean[gradients=released]", "ddp")


def _wrap_in_ddp_first():
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
    Engine(model, torch.optim.AdamW(model.parameters()), "bf16-lean")


def test_unsupported_setups_are_refused(tmp_path):
    flushed, released, late = run_ranks(2, refusals, tmp_path)[0]
    assert "whole updates" in flushed and "in BF16" in released and "replicate(model, recipe)" in late


def cast_inf(way):
    """Put an inf into the activations of one rank, which a cast to FP8 saturates."""
    results = []
    with join_world("cpu") as world:
        engine = engine_of("fp8[products=all]", way)
        for number in range(4):
            inputs, targets = batch_of(number)
            handle = None
            if number == 2 and world.rank == 1:

                def insert_inf(module, arguments):
                    x = arguments[0].clone()
                    x[0, 0, 0] = torch.inf
                    return (x, *arguments[1:])

                handle = engine.inner.blocks[1].register_forward_pre_hook(insert_inf)
            with engine.forward():
                loss = engine.model(inputs, targets)
            if handle is not None:
                handle.remove()
            engine.backward(loss)
            report = engine.step()
            results.append((report.applied, engine.conversion.scales.scale.tolist()))
        return results


@pytest.mark.parametrize("way", ["fsdp", "ddp"])
def test_a_nonfinite_cast_on_one_rank_is_skipped_by_all(tmp_path, way):
    answers = run_ranks(2, cast_inf, tmp_path, way)
    assert answers[0] == answers[1]
    assert [applied for applied, _ in answers[0]] == [True, True, False, True]
    assert answers[0][2][1] == answers[0][1][1], "no scale moves with a skipped update"


def wrapped_in_fsdp1():
    from torch.distributed.fsdp import FullyShardedDataParallel

    with join_world("cpu"):
        model = GPT(GPTConfig(layers=1, width=32, heads=2, context=16, vocab=100))
        wrapped = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)
        try:
            Engine(wrapped, torch.optim.AdamW(wrapped.parameters()), "fp32", clip_norm=1.0)
        except UsageError as error:
            return str(error)
    return "accepted"


@pytest.mark.filterwarnings("ignore:.*FSDP.*")
def test_fsdp1_is_refused(tmp_path):
    assert all("FSDP1" in answer and "fully_shard" in answer for answer in run_ranks(2, wrapped_in_fsdp1, tmp_path))


def run_no_sync(way):
    """Run microbatches under no_sync, of the engine or of DDP itself: their gradients stay on their rank."""
    with join_world("cpu") as world:
        engine = engine_of("fp32", "ddp")
        for number in range(3):
            inputs, targets = batch_of(10 * world.rank + number)
            quiet = engine.no_sync() if way == "engine" else engine.model.no_sync()
            with quiet if number < 2 else contextlib.nullcontext(), engine.forward():
                loss = engine.model(inputs, targets)
                engine.backward(loss)
            if number == 1:
                apart = engine.inner.lm_head.weight.grad.clone()
        together = engine.inner.lm_head.weight.grad.clone()
        assert engine.step().applied
        return apart.sum().item(), together.sum().item(), engine.inner.lm_head.weight.sum().item()


@pytest.mark.parametrize("way", ["engine", "own"])
def test_no_sync_keeps_gradients_on_their_rank(tmp_path, way):
    one, other = run_ranks(2, run_no_sync, tmp_path, way)
    assert one[0] != other[0] and one[1:] == other[1:]
