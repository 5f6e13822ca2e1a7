"""Predictions for several GPUs: rings and overlap by hand, monotonicity, and agreement with one GPU."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math

import pytest

from narrowgauge import cli, hardware, tasks
from narrowgauge.errors import UsageError
from narrowgauge.forecast.cluster import overlap, predict_cluster
from narrowgauge.forecast.cluster.collectives import Cluster, make_cluster
from narrowgauge.forecast.cluster.overlap import Work, simulate_ddp, simulate_fsdp
from narrowgauge.forecast.extrapolate import TRACED_BLOCKS, TracedModel, trace_model
from narrowgauge.forecast.run import Scenario
from narrowgauge.forecast.time.reachable_rates import ReachableRates
from narrowgauge.forecast.time.roofline import predict_time
from narrowgauge.forecast.trace.trace_step import trace_steps
from narrowgauge.models.llama import Llama, LlamaConfig
from narrowgauge.ranks.distribute import SHARDED_FROM
from narrowgauge.recipe import parse
from narrowgauge.task import Task

H200 = hardware.find_gpu("h200")
RATES = ReachableRates(H200)
BLOCK = 8192 * (64 + 2 * 8) * 128 + 8192 * 8192 + 3 * 8192 * 28672
"""Matrices of a block of Llama 70B."""


def small(layers: int = 2, **options: int) -> Task:
    return tasks.find(f"gpt:{layers}x128", **{"batch": 8, "context": 128, **options})


def trace_small(task: Task | None = None, recipe: str = "bf16") -> TracedModel:
    return trace_model(task or small(), lambda one: trace_steps(one, parse(recipe), H200, compile=False))


def test_the_rings_computed_by_hand_in_docs_scale() -> None:
    """16 H200 on 2 nodes: 450 GB/s of NVLink at 0.824, and 8 times 50 GB/s of network at 0.9."""
    ring = Cluster(H200, 16, 2)
    assert ring.within == pytest.approx(370.8e9) and ring.bandwidth == ring.between == pytest.approx(360e9)
    assert ring.via == "network" and ring.latency_s == pytest.approx(8.4e-6 + 14 * 3.4e-6 + 9.6e-6)
    assert 2 * BLOCK == 1_711_276_032
    assert ring.gather_s(2 * BLOCK) == pytest.approx(4.522e-3, abs=1e-6)
    assert ring.gather_s(4 * BLOCK) == pytest.approx(8.979e-3, abs=1e-6)
    node = Cluster(H200, 8)
    assert node.via == "nvlink" and node.gather_s(8e9) == pytest.approx(8.4e-6 + 7 * 3.4e-6 + 7e9 / 370.8e9)
    tree = 2 * (7 * 3.4e-6 + 9.6e-6)  # faster than the ring's 2 * 57.2e-6
    assert ring.all_reduce_s(1e9) == pytest.approx(8.4e-6 + tree + 2 * 15 / 16 * 1e9 / 360e9)


def test_one_gpu_sends_nothing_and_pcie_is_used_without_nvlink() -> None:
    assert Cluster(H200).gather_s(1e9) == Cluster(H200).all_reduce_s(1e9) == 0 and Cluster(H200).via == "none"
    pairs = hardware.find_gpu("H100 PCIe")
    assert Cluster(pairs, 2).via == "nvlink" and Cluster(pairs, 4).via == "pcie"
    assert Cluster(H200, 4, 4).via == "network" and Cluster(H200, 4, 4).bandwidth == pytest.approx(45e9)
    assert make_cluster(H200, 64).nodes == 8 and make_cluster(H200, 8).nodes == 1


@pytest.mark.parametrize(
    ("gpus", "nodes", "message"),
    [
        (0, 1, "--gpus 0: must be at least 1"),
        (8, 0, "--nodes 0: must be at least 1"),
        (8, 3, "--nodes 3 does not divide --gpus 8"),
        (16, 1, "a node has up to 8 H200, not 16; use --nodes 2 or more"),
    ],
)
def test_impossible_clusters_are_rejected(gpus: int, nodes: int, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Cluster(H200, gpus, nodes)


def work(**changes: object) -> Work:
    """The example of docs/scale.md: three blocks, in seconds."""
    messages = {
        overlap.GATHER: 4.0, overlap.REGATHER: 4.0, overlap.SCATTER: 8.0, overlap.GATHER_OUTSIDE: 2.0,
        overlap.SCATTER_OUTSIDE: 3.0,
    }  # fmt: skip
    given = {"blocks": 3, "start": 1.0, "forward": 10.0, "head": 5.0, "backward": 20.0, "end": 1.0, "step": 6.0}
    return Work(**{**given, "messages": messages, **changes})  # type: ignore[arg-type]


def test_the_overlap_computed_by_hand_in_docs_scale() -> None:
    clock = simulate_fsdp(work())
    assert work().compute == 103 and clock.now == 122
    exposed = {kind: clock.exposed(kind) for kind in dict.fromkeys(kind for kind, _, _ in clock.sent)}
    assert exposed == {
        overlap.GATHER_OUTSIDE: 2, overlap.GATHER: 3, overlap.REGATHER: 4, overlap.SCATTER: 7,
        overlap.SCATTER_OUTSIDE: 3,
    }  # fmt: skip
    assert [clock.count(kind) for kind in (overlap.GATHER, overlap.REGATHER, overlap.SCATTER)] == [3, 3, 3]


def test_communication_longer_than_computation_bounds_the_step() -> None:
    """From the second block on, each takes as long as its gather, or in backward as its gather and a scatter."""
    messages = {overlap.GATHER: 15.0, overlap.REGATHER: 15.0, overlap.SCATTER: 30.0}
    times = [simulate_fsdp(work(blocks=count, messages=messages)).now for count in range(10, 14)]
    assert {later - sooner for sooner, later in itertools.pairwise(times)} == {15.0 + 45.0}


def test_gradients_are_reduced_in_the_last_microbatch_only() -> None:
    clock = simulate_fsdp(work(microbatches=4))
    assert clock.count(overlap.GATHER) == clock.count(overlap.REGATHER) == 12
    assert clock.count(overlap.SCATTER) == 3 and clock.count(overlap.SCATTER_OUTSIDE) == 1
    assert clock.now < 4 * 122 - 3 * 6


def test_ddp_reduces_during_backward_and_waits_for_the_last() -> None:
    clock = simulate_ddp(work(messages={overlap.REDUCE: 8.0}), outside=5.0)
    assert clock.now == 103 + 7 + 5, "the last block's, under the embedding's second, and what is outside"
    assert simulate_ddp(work(messages={})).now == 103


def test_more_bandwidth_is_never_slower() -> None:
    found = trace_small()
    links = hardware.interconnect()
    for parallel in ("fsdp", "ddp"):
        times = [
            predict_cluster.predict_cluster_step(
                found, RATES, Cluster(H200, 16, 2, dataclasses.replace(links, network_share=share)), parallel
            ).step_ms
            for share in (0.01, 0.05, 0.2, 0.5, 0.9)
        ]
        assert times == sorted(times, reverse=True) and times[0] > times[-1]


def test_one_gpu_equals_the_plain_forecast() -> None:
    found = trace_small()
    plain, alone = predict_time(found.traced, RATES), predict_cluster.predict_cluster_step(found, RATES, Cluster(H200))
    assert (alone.step_ms, alone.items_per_s, alone.mfu) == (plain.step_ms, plain.items_per_s, plain.mfu)
    assert alone.efficiency == 1 and not alone.communication and alone.exposed_ms == 0


def test_a_step_of_several_gpus_adds_up() -> None:
    found = trace_small(tasks.find("gpt:2x1024", batch=8))
    for parallel in ("fsdp", "ddp"):
        for cluster in predict_cluster.list_cluster_sizes(Cluster(H200, 32, 4))[1:]:
            one = predict_cluster.predict_cluster_step(found, RATES, cluster, parallel)
            assert one.step_ms == pytest.approx(one.compute_ms + one.exposed_ms)
            assert one.items_per_s == pytest.approx(cluster.gpus * 8 * 1024 / one.step_ms * 1e3)
            assert all(0 <= message.exposed_ms <= message.ms * (1 + 1e-9) for message in one.communication)
    sizes = [(one.gpus, one.nodes) for one in predict_cluster.list_cluster_sizes(Cluster(H200, 32, 4))]
    assert sizes == [(1, 1), (8, 1), (16, 2), (32, 4)]


def test_bytes_of_messages_computed_by_hand() -> None:
    """A block of gpt:2x1024 has 12 * 1024^2 weights; outside are the tied embedding and positions."""
    found = trace_small(tasks.find("gpt:2x1024", batch=8))
    sizes = predict_cluster.compute_message_bytes(found, "fsdp")
    weights, outside = 12 * 1024**2, (50304 + 1024) * 1024
    assert sizes[overlap.GATHER] == sizes[overlap.REGATHER] == 2 * weights and sizes[overlap.SCATTER] == 4 * weights
    assert sizes[overlap.GATHER_OUTSIDE] == sizes[overlap.SCATTER_OUTSIDE] == 4 * outside
    assert sizes[overlap.AGREE] == 4 * (found.parameters - 2 * weights - outside)
    lean = predict_cluster.compute_message_bytes(trace_small(tasks.find("gpt:2x1024", batch=8), "bf16-lean"), "fsdp")
    assert lean[overlap.GATHER_OUTSIDE] == 2 * outside and lean[overlap.SCATTER] == 4 * weights
    ddp = predict_cluster.compute_message_bytes(found, "ddp")
    assert 2 * ddp[overlap.REDUCE] + ddp["outside"] == 4 * found.parameters


def test_the_predicted_batch_hides_communication() -> None:
    slow = dataclasses.replace(hardware.interconnect(), network_share=0.02)
    cluster = Cluster(H200, 16, 2, slow)
    task = tasks.find("gpt:2x1024", batch=4)
    found = predict_cluster.predict_cluster_step(trace_small(task), RATES, cluster, "fsdp")
    assert found.bound == "network" and found.load > 1 and found.hidden_from_batch is not None
    assert found.hidden_from_batch == math.ceil(4 * found.load)
    more = predict_cluster.predict_cluster_step(
        trace_small(tasks.find("gpt:2x1024", batch=2 * found.hidden_from_batch)), RATES, cluster, "fsdp"
    )
    assert more.bound == "computation" and more.efficiency > found.efficiency


def test_small_models_are_copied_and_large_ones_sharded_as_training_does() -> None:
    assert (
        predict_cluster.choose_parallel("auto", SHARDED_FROM) == "ddp"
        and predict_cluster.choose_parallel("auto", SHARDED_FROM + 1) == "fsdp"
    )
    assert predict_cluster.choose_parallel("fsdp", 1) == "fsdp"


@pytest.mark.parametrize("recipe", ["bf16", "bf16-lean", "fp8"])
def test_extrapolation_from_a_few_blocks_matches_the_whole_model(recipe: str) -> None:
    task = small(7, vocab=2048)
    few, whole = trace_small(task, recipe), trace_steps(task, parse(recipe), H200, compile=False)
    assert not few.is_whole and few.blocks == 7 and few.parameters == whole.parameters
    assert [len(one.block_paths) for one in few.traces] == list(TRACED_BLOCKS)
    seconds = sum(cost.seconds * times for cost, times in few.costs(RATES))
    assert seconds * 1e3 == pytest.approx(predict_time(whole, RATES).device_ms, rel=0.01)
    for shards in (1, 4):
        own, other = few.memory(shards), TracedModel((whole,), 7, whole.parameters).memory(shards)
        assert own.total == pytest.approx(other.total, rel=0.03)  # the difference is the allocator's rounding
        for part in ("master", "moments", "activations"):
            assert own.largest[part] == pytest.approx(other.largest[part], rel=0.02)


def test_blocks_wider_than_the_norm_kernel_are_traced_without_fusion() -> None:
    config = LlamaConfig(layers=6, width=16384, heads=128, kv_heads=8, hidden=1024, context=64, vocab=512)
    wide = dataclasses.replace(small(vocab=512, context=64), model=lambda: Llama(config), name="wide")
    scenario = Scenario(task=wide, gpu=H200, cluster=make_cluster(H200, 64))
    found = scenario.trace_model(parse("fp8"))
    assert found.too_wide and any("8,192 columns" in note for note in found.notes)
    assert not any(layer.part_of in ("block", "head") for layer in found.traced.layers)
    assert any(layer.part_of == "linear" for layer in found.traced.layers)


def test_recipes_that_need_one_gpu_are_rejected() -> None:
    scenario = Scenario(task=small(), gpu=H200, cluster=Cluster(H200, 8), parallel="fsdp")
    with pytest.raises(UsageError, match="gradients=released works on one GPU only"):
        scenario.trace_model(parse("bf16-lean[gradients=released]"))
    with pytest.raises(UsageError, match="--parallel tensor: expected auto, ddp, fsdp"):
        dataclasses.replace(scenario, parallel="tensor")


SMALL = ["gpt:2x128", "--batch", "4", "--context", "64", "--device", "cpu", "--recipes", "bf16"]


def test_the_command_line_shows_communication_and_cost(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--gpu", "h200", "--gpus", "16", "--nodes", "2", "--parallel", "fsdp", "--price", "2", "--tokens", "1e9"]
    assert cli.main(["roofline", *SMALL, *options, "--json"]) == 0
    row = json.loads(capsys.readouterr().out)["recipes"]["bf16"]
    found = row["scale"]
    assert (found["gpus"], found["nodes"], found["parallel"]) == (16, 2, "fsdp") and row["step_ms"] > 0
    assert {one["via"] for one in found["communication"]} == {"network"}
    assert [one["gpus"] for one in found["sizes"]] == [1, 8, 16] and found["sizes"][-1]["step_ms"] == found["step_ms"]
    assert found["cost"] == pytest.approx(found["hours"] * 32) and found["days"] == pytest.approx(found["hours"] / 24)
    assert found["alternative"]["parallel"] == "ddp" and found["per_gpu"]["tokens"] == 256
    assert cli.main(["roofline", *SMALL, *options]) == 0
    text = capsys.readouterr().out
    assert "16 GPUs on 2 nodes: shards (FSDP2)" in text and "none of them measured" in text and "hours" in text


def test_the_command_line_shows_the_memory_of_each_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--gpu", "h200", "--gpus", "4", "--no-search"]
    assert cli.main(["memory", *SMALL, *options, "--parallel", "fsdp", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    row = data["recipes"]["bf16"]
    own = row["scale"]["per_gpu"]
    assert sum(size for name, size in own.items() if name != "total") == own["total"] == row["total"]
    assert own["gathered_blocks"] > 0 and data["shards"] == 4 and data["scale"] == {"gpus": 4, "nodes": 1}
    assert cli.main(["memory", *SMALL, "--shards", "4", "--gpu", "h200", "--no-search", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["recipes"]["bf16"]["total"] == row["total"]
    assert cli.main(["memory", *SMALL, *options, "--json"]) == 0
    copied = json.loads(capsys.readouterr().out)["recipes"]["bf16"]
    assert cli.main(["memory", *SMALL, "--gpu", "h200", "--no-search", "--json"]) == 0
    plain = json.loads(capsys.readouterr().out)["recipes"]["bf16"]
    assert copied.pop("scale")["parallel"] == "ddp" and copied == plain, "each has a copy, as one alone has"
    assert cli.main(["memory", *SMALL, "--gpu", "h200", "--gpus", "1", "--no-search", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["recipes"]["bf16"] == plain


@pytest.mark.parametrize("verb", ["memory", "roofline"])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--gpus", "0"], "--gpus 0: must be at least 1"),
        (["--gpus", "8", "--nodes", "3"], "--nodes 3 does not divide --gpus 8"),
        (["--nodes", "2"], "--nodes 2 needs --gpus"),
        (["--gpus", "8", "--gpu", "h300"], "unknown GPU 'h300'"),
        (["--gpus", "9", "--gpu", "h200"], "--nodes 2 does not divide --gpus 9"),
    ],
)
def test_bad_input_is_rejected_with_one_clear_line(
    verb: str, options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([verb, *SMALL, *options]) == 2
    found = capsys.readouterr()
    lines = [line for line in found.err.splitlines() if line.startswith("narrowgauge:")]
    assert len(lines) == 1 and message in lines[0] and "Traceback" not in found.err


def test_shards_and_gpus_must_agree(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["memory", *SMALL, "--gpus", "8", "--shards", "4"]) == 2
    assert "--shards 4 and --gpus 8: use --gpus only" in capsys.readouterr().err
