"""Long sequences on a GPU: tiles of the MLP, inputs of blocks in host memory, the last norm as one kernel."""

import gc

import pytest
import torch

import narrowgauge as ng
from narrowgauge import hardware
from narrowgauge.forecast.run import Scenario
from narrowgauge.nn.fused import norm, offload, tiles
from narrowgauge.recipe import parse
from narrowgauge.tasks import user_model

transformers = pytest.importorskip("transformers")
SIZES = {
    "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 4, "vocab_size": 4096, "max_position_embeddings": 32768,
}  # fmt: skip
T = 16384


def make_engine(recipe, rate=1e-4):
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, use_cache=False)).train()
    optimizer = torch.optim.AdamW(model.parameters(), rate, fused=True)
    return ng.Engine(model, optimizer, recipe, cuda_graphs=False)  # recorded blocks free nothing


def run_step(engine, length=T, seed=0):
    ids = torch.randint(0, 4096, (1, length), generator=torch.Generator().manual_seed(seed)).cuda()
    with engine.forward():
        loss = engine.model(input_ids=ids, labels=ids, use_cache=False).loss
    engine.backward(loss)
    grads = {name: p.grad.clone() for name, p in engine.inner.named_parameters() if p.grad is not None}
    engine.step()
    return loss.item(), grads


def measure_peak(recipe, length=T):
    gc.collect()
    before = torch.cuda.memory_allocated()
    engine = make_engine(recipe)
    losses = [run_step(engine, length)[0] for _ in range(2)]
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    ids = torch.randint(0, 4096, (1, length)).cuda()
    with engine.forward():
        loss = engine.model(input_ids=ids, labels=ids, use_cache=False).loss
    engine.backward(loss)
    engine.step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before, losses


def find_error(got, wanted):
    """Return the largest relative difference of a gradient."""
    return max(
        float((got[name].float() - value.float()).norm() / value.float().norm()) for name, value in wanted.items()
    )


@pytest.mark.parametrize("recipe", ["fp8-lean[products=all]", "bf16-lean", "fp8[products=all,checkpoint=full]"])
def test_tiles_change_no_result(recipe, monkeypatch):
    """Tiles change gradients no more than a repetition does: attention's backward adds up in no fixed order, products
    of other sizes add up in another one, and FP8 rounds what differs."""
    found = []
    for size in (1 << 60, 1 << 60, 1 << 25):
        monkeypatch.setattr(tiles, "TILE_BYTES", 1 << 60)
        engine = make_engine(recipe, rate=0.0)
        run_step(engine)  # finds the scales without tiles
        monkeypatch.setattr(tiles, "TILE_BYTES", size)
        found.append(run_step(engine))
    assert tiles.choose_tile_rows(T, 2 * 4096) == 2048
    (whole, wanted), (_, again), (tiled, got) = found
    assert tiled == pytest.approx(whole, rel=1e-4)
    error, repeated = find_error(got, wanted), find_error(again, wanted)
    assert error < max(0.02, 1.5 * repeated), (error, repeated)


def test_tiles_take_less_memory(monkeypatch):
    peaks = []
    for size in (1 << 60, 1 << 25):
        monkeypatch.setattr(tiles, "TILE_BYTES", size)
        peaks.append(measure_peak("fp8-lean[products=all]")[0])
    saved = peaks[0] - peaks[1]
    assert saved > 0.5 * T * 2 * 4096 * 2, peaks  # more than half of the activation's input


@pytest.mark.parametrize("recipe", ["fp8-lean[products=all,attention=math]", "bf16-lean[attention=math]"])
def test_offloaded_training_is_the_same_to_the_bit(recipe, deterministic):
    found = []
    for one in (recipe, recipe, f"{recipe.removesuffix(']')},offload=activations]"):
        engine = make_engine(one)
        found.append([run_step(engine, 4096 + 512 * (step % 2), step) for step in range(4)])
    for (plain, wanted), (again, repeated), (moved, got) in zip(*found, strict=True):
        assert plain == again == moved
        differ = [name for name, value in wanted.items() if not torch.equal(repeated[name], value)]
        assert not differ, f"not deterministic without offload: {differ}"
        differ = [name for name, value in wanted.items() if not torch.equal(got[name], value)]
        assert not differ, (differ, find_error(got, wanted))


def test_offload_frees_the_inputs_of_blocks_and_allocates_once():
    plain, _ = measure_peak("fp8-lean[products=all]", 2 * T)
    moved, _ = measure_peak("fp8-lean[products=all,offload=activations]", 2 * T)
    one = 2 * T * 1024 * 2
    assert plain - moved > 0.5 * one, (plain, moved)  # of four inputs, two are on the GPU at a time
    pool = offload._get_offloader(torch.device("cuda", 0), False).pool
    before = pool.allocated_bytes
    measure_peak("fp8-lean[products=all,offload=activations]", 2 * T)
    assert pool.allocated_bytes == before
    assert all(page.is_pinned() for page in pool._free)


def measure_step_ms(recipe):
    engine = make_engine(recipe)
    for _ in range(3):
        run_step(engine, 2 * T)
    times = []
    for _ in range(5):
        ids = torch.randint(0, 4096, (1, 2 * T)).cuda()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        with engine.forward():
            loss = engine.model(input_ids=ids, labels=ids, use_cache=False).loss
        engine.backward(loss)
        engine.step()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    del engine, loss
    gc.collect()
    return min(times)


def test_copies_run_beside_the_kernels():
    """A step with copies takes about as long as one without. Copies alone take 10 ms over PCIe 5."""
    for _ in range(3):  # other tests may use the GPU, too
        alone = measure_step_ms("fp8-lean[products=all]")
        with_copies = measure_step_ms("fp8-lean[products=all,offload=activations]")
        if with_copies < 1.05 * alone + 1:
            return
    raise AssertionError((alone, with_copies))


@pytest.mark.parametrize("recipe", ["fp8-lean[products=all]", "fp8-lean[products=all,offload=activations]"])
@pytest.mark.parametrize("length", [T, 2 * T])
def test_predicted_peak(recipe, length, monkeypatch):
    monkeypatch.setattr(tiles, "TILE_BYTES", 1 << 25)
    measured, _ = measure_peak(recipe, length)
    task = user_model.make_task("transformers:LlamaForCausalLM", SIZES, 1, length, small=False)
    gpu = hardware.find_gpu("h200")
    memory = Scenario(task=task, gpu=gpu).predict_memory(parse(recipe))
    pending = offload.MOST_PENDING * length * 1024 * 2 if "offload" in recipe else 0  # copies that are on their way
    assert 0.95 * measured - pending < memory.total < 1.05 * measured
    assert memory.host == (4 * length * 1024 * 2 if "offload" in recipe else 0)


def test_the_last_norm_is_one_kernel(monkeypatch):
    found, calls = [], []
    original = norm.run_norm
    monkeypatch.setattr(norm, "run_norm", lambda *args, **kwargs: calls.append(1) or original(*args, **kwargs))
    for on_gpu in (norm.is_on_gpu, lambda x: False):
        monkeypatch.setattr(norm, "is_on_gpu", on_gpu)
        engine = make_engine("bf16-lean", rate=0.0)
        found.append(run_step(engine, 4096))
    assert calls == [1]
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-3)
    for name, value in found[1][1].items():
        assert (found[0][1][name].float() - value.float()).norm() < 0.02 * value.float().norm(), name
