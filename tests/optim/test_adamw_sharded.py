"""AdamW on DTensors: shards have the bits of full parameters; checkpoints of 4 ranks load on 2 and on 1."""

import copy
import itertools
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed._functional_collectives import all_reduce
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import forked
from narrowgauge import kernels
from narrowgauge.errors import UsageError
from narrowgauge.optim import AdamW, convert_optimizer, full_precision, load_full_precision, narrow, plain_state
from narrowgauge.optim.adamw import join_fp32
from narrowgauge.optim.gradient_release import GradientRelease
from narrowgauge.optim.sharded import to_local
from narrowgauge.optim.state_dict_format import ELEMENTWISE

MOMENTS = "fp32", "bf16", "8bit"
FORMS = [*itertools.product(("split", "fp32", "none"), MOMENTS), *(("itself", moments) for moments in MOMENTS)]
"""``itself``: the parameter is FP32 and its own master."""
FEW_FORMS = [("split", "8bit"), ("fp32", "fp32"), ("none", "bf16"), ("itself", "8bit")]
"""Every master and every format of moments."""


def run_on_ranks(ranks, job, folder, *arguments):
    """Run a job in ``ranks`` processes, forked from a server that has imported the modules."""
    forked.get_context()
    path = folder / f"{job.__name__}-{ranks}"
    torch.multiprocessing.start_processes(
        start_rank, args=(ranks, path, job, *arguments), nprocs=ranks, daemon=True, start_method="forkserver"
    )


def start_rank(rank, ranks, path, job, *arguments):
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=ranks)
    try:
        job(init_device_mesh("cpu", (ranks,)), *arguments)
    finally:
        dist.destroy_process_group()


def build():
    """With 4 ranks the last has empty shards of most of these; with 2 its shards are smaller than the first's."""
    torch.manual_seed(0)
    linears = torch.nn.Linear(40, 33), torch.nn.Linear(33, 9), torch.nn.Linear(9, 1)
    return torch.nn.Sequential(linears[0], torch.nn.Tanh(), linears[1], torch.nn.Tanh(), linears[2])


def build_sharded(mesh):
    model = build()
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def optimizer_of(model, master, moments):
    """Return an AdamW of the parameters, narrowed unless they are their own masters."""
    if master != "itself":
        for p in model.parameters():
            narrow(p)
    return AdamW(model.parameters(), lr=1e-2, master="fp32" if master == "itself" else master, moments=moments)


def set_gradients(parameters, step):
    """Set the same gradients on full and on sharded parameters."""
    generator = torch.Generator().manual_seed(1000 + step)
    for p in parameters:
        grad = (torch.randn(p.shape, generator=generator) * 10 ** (step % 3 - 1)).to(p.dtype)
        sharded = isinstance(p, DTensor)
        p.grad = distribute_tensor(grad, p.device_mesh, p.placements, src_data_rank=None) if sharded else grad


def run(model, optimizer, steps):
    for step in steps:
        set_gradients(model.parameters(), step)
        optimizer.step()


def gather_full(tensor):
    if not isinstance(tensor, DTensor):
        return tensor
    sent = tensor.int() if tensor.dtype is torch.int16 else tensor  # gloo does not send 16-bit integers
    return sent.full_tensor().to(tensor.dtype)


def equal(a, b):
    return a.dtype is b.dtype and torch.equal(a, b)


def assert_equal_states(model, optimizer, reference, other):
    """Compare bit for bit the masters, weights and states that do not depend on the sharding."""
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        assert equal(gather_full(p.detach()), q.detach())
        assert equal(gather_full(join_fp32(p)), join_fp32(q))
        for name in other.state[q]:
            assert name in ("seed", "check") or equal(gather_full(optimizer.state[p][name]), other.state[q][name]), name


def step_all_forms(mesh, forms, by_kernel):
    kernels.interpreting = by_kernel
    steps = 2 if by_kernel else 3
    for master, moments in forms:
        model, reference, shards = build_sharded(mesh), build(), build_sharded(mesh)
        optimizer, other = optimizer_of(model, master, moments), optimizer_of(reference, master, moments)
        optimizer_of(shards, master, moments)
        mine = [torch.nn.Parameter(to_local(p).clone()) for p in shards.parameters()]  # this rank's shards alone
        for p, q in zip(mine, shards.parameters(), strict=True):
            p.other_half = None if master == "itself" else to_local(q.other_half).clone()
            p.check_words = None if master == "itself" else q.check_words.clone()
        own = AdamW(mine, lr=1e-2, master="fp32" if master == "itself" else master, moments=moments)
        for step in range(steps):
            run(model, optimizer, [step])
            run(reference, other, [step])
            for p, q in zip(mine, model.parameters(), strict=True):
                p.grad = to_local(q.grad)
            own.step()
        for p, q in zip(mine, model.parameters(), strict=True):
            state = optimizer.state[q]
            for name in set(ELEMENTWISE) & set(state):
                assert isinstance(state[name], DTensor) and not state[name].requires_grad
                assert (state[name].placements, state[name].shape) == (q.placements, q.shape)
            assert equal(to_local(q).detach(), p.detach())
            assert own.state[p].keys() == state.keys()
            for name, value in own.state[p].items():
                assert value == state[name] if name == "seed" else equal(to_local(state[name]), value)
            assert state["step"] == steps
        if master != "none" and moments != "8bit":
            assert_equal_states(model, optimizer, reference, other)
        for p, q, start in zip(model.parameters(), reference.parameters(), build().parameters(), strict=True):
            far = 2.0**-7 * join_fp32(q).norm() if master == "none" else 0.03 * (join_fp32(q) - start).norm()
            assert (gather_full(join_fp32(p)) - join_fp32(q)).norm() <= far


@pytest.mark.parametrize(("ranks", "forms"), [(2, FORMS), (4, FEW_FORMS)])
def test_shards_step_like_the_full_parameter(ranks, forms, tmp_path):
    """Bit for bit. 8-bit moments and rounding noise depend on the shard: they match a step of the shard alone."""
    run_on_ranks(ranks, step_all_forms, tmp_path, forms, False)


@pytest.mark.skipif(not kernels.HAVE_TRITON, reason="needs triton")
def test_the_kernel_steps_shards_too(tmp_path):
    run_on_ranks(2, step_all_forms, tmp_path, [("split", "8bit"), ("none", "bf16"), ("itself", "fp32")], True)


def train_with_fsdp(mesh):
    for moments in ("fp32", "8bit"):
        model, reference = build_sharded(mesh), build()
        optimizer, other = optimizer_of(model, "split", moments), optimizer_of(reference, "split", moments)
        x = torch.randn(8, 40, generator=torch.Generator().manual_seed(mesh.get_local_rank()))
        losses = []
        for _ in range(8):
            result = model(x.bfloat16())
            if moments == "fp32":  # FSDP computes with the updated weights
                assert equal(result, reference(x.bfloat16()))
            loss = (result.float() - x[:, :1]).square().mean()
            loss.backward()
            for p, q in zip(model.parameters(), reference.parameters(), strict=True):
                q.grad = p.grad.full_tensor()
            optimizer.step()
            other.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        total = torch.stack(losses)
        dist.all_reduce(total)
        assert total[-1] < 0.9 * total[0]
        if moments == "fp32":
            assert_equal_states(model, optimizer, reference, other)
        model(x.bfloat16())  # leaves full parameters in the root, which a checkpoint must not contain
        state = full_precision(model)
        assert all(isinstance(value, DTensor) and value.dtype is torch.float32 for value in state.values())
        assert all(equal(gather_full(state[name]), gather_full(join_fp32(p))) for name, p in model.named_parameters())


def test_fsdp_trains_with_split_masters(tmp_path):
    run_on_ranks(4, train_with_fsdp, tmp_path)


def checkpoint(model, optimizer):
    return {"model": full_precision(model), "optim": plain_state(optimizer.state_dict())}


def save(mesh, folder):
    for moments in ("fp32", "8bit"):
        model = build_sharded(mesh)
        optimizer = optimizer_of(model, "split", moments)
        run(model, optimizer, range(3))
        dcp.save(checkpoint(model, optimizer), checkpoint_id=folder / moments)


def load(mesh, folder):
    """Load on any number of ranks, or in one process without shards."""
    for moments in ("fp32", "8bit"):
        model, reference = build() if mesh is None else build_sharded(mesh), build()
        with torch.no_grad():
            for p in model.parameters():
                p.fill_(7.0)
        optimizer, other = optimizer_of(model, "split", moments), optimizer_of(reference, "split", moments)
        run(reference, other, range(3))
        optimizer.make_states()
        state = checkpoint(model, optimizer)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # without ranks
            dcp.load(state, checkpoint_id=folder / moments, no_dist=mesh is None)
        load_full_precision(model, state["model"])
        optimizer.load_state_dict(state["optim"])
        if moments == "fp32":
            assert_equal_states(model, optimizer, reference, other)
            run(model, optimizer, range(3, 5))
            run(reference, other, range(3, 5))
            assert_equal_states(model, optimizer, reference, other)
        else:
            found = plain_state(optimizer.state_dict())["state"]
            for index, wanted in plain_state(other.state_dict())["state"].items():
                for name, value in wanted.items():
                    assert (gather_full(found[index][name]) - value).norm() <= 0.02 * value.norm()


def test_a_checkpoint_of_4_ranks_loads_on_2_and_on_1(tmp_path):
    run_on_ranks(4, save, tmp_path, tmp_path)
    for ranks in (2, 1):
        run_on_ranks(ranks, load, tmp_path, tmp_path)
    load(None, tmp_path)


def save_and_set(mesh, folder):
    """Use torch's get_state_dict and set_state_dict, with parameter names, flat or not, sharded or full."""
    options = [
        StateDictOptions(),
        StateDictOptions(flatten_optimizer_state_dict=True),
        StateDictOptions(full_state_dict=True),
        StateDictOptions(full_state_dict=True, cpu_offload=True, broadcast_from_rank0=True),
    ]
    cases = [(("split", "8bit"), option) for option in options]
    cases += [(("fp32", "fp32"), option) for option in (options[0], options[-1])]
    for (master, moments), option in cases:
        first, second = build_sharded(mesh), build_sharded(mesh)
        one, other = optimizer_of(first, master, moments), optimizer_of(second, master, moments)
        run(first, one, range(3))
        weights, states = get_state_dict(first, one, options=option)
        if not option.full_state_dict:
            path = folder / f"{master}-{option.flatten_optimizer_state_dict}"
            dcp.save({"model": weights, "optim": states}, checkpoint_id=path)
            weights, states = get_state_dict(second, other, options=option)
            dcp.load({"model": weights, "optim": states}, checkpoint_id=path)
        set_model_state_dict(second, weights, options=option)  # separately: set_state_dict treats the empty
        set_optimizer_state_dict(second, other, states, options=option)  # shards of a rank as missing weights
        run(first, one, range(3, 5))
        run(second, other, range(3, 5))
        for p, q in zip(first.parameters(), second.parameters(), strict=True):
            assert equal(to_local(p), to_local(q))
            assert equal(to_local(join_fp32(p)), to_local(join_fp32(q)))
            assert all(equal(to_local(value), to_local(other.state[q][name])) for name, value in one.state[p].items())


def test_torchs_state_dict_helpers_bring_states_back(tmp_path):
    run_on_ranks(2, save_and_set, tmp_path, tmp_path)


def step_distributed(mesh):
    """Step parameters of distribute_tensor: sharded unevenly along any dimension, or replicated."""
    for placement, moments in itertools.product((Shard(0), Shard(1), Replicate()), ("fp32", "8bit")):
        values = torch.randn(5, 7, 150, generator=torch.Generator().manual_seed(0))
        reference, model = torch.nn.ParameterList([values.clone()]), torch.nn.ParameterList()
        model.append(torch.nn.Parameter(distribute_tensor(values, mesh, [placement], src_data_rank=None)))
        model[0].note = "kept"
        optimizer, other = optimizer_of(model, "split", moments), optimizer_of(reference, "split", moments)
        assert (model[0].dtype, model[0].note) == (torch.bfloat16, "kept")
        run(model, optimizer, range(3))
        run(reference, other, range(3))
        exact = moments == "fp32" or placement == Replicate()
        if exact:
            assert_equal_states(model, optimizer, reference, other)
        fresh = torch.nn.ParameterList()
        fresh.append(torch.nn.Parameter(distribute_tensor(values * 2, mesh, [placement], src_data_rank=None)))
        loaded = optimizer_of(fresh, "split", moments)
        load_full_precision(fresh, full_precision(reference))  # full weights and states into shards
        loaded.load_state_dict(other.state_dict())
        assert equal(gather_full(join_fp32(fresh[0])), join_fp32(reference[0]))
        back = optimizer_of(torch.nn.ParameterList([values.clone()]), "split", "fp32")
        back.load_state_dict(loaded.state_dict())  # and shards into full tensors
        wanted = plain_state(other.state_dict())["state"][0]
        for name, value in plain_state(back.state_dict())["state"][0].items():
            assert equal(value, wanted[name]) if exact else (value - wanted[name]).norm() < 0.02 * value.norm()
        p, ones = model[0], torch.ones(values.shape, dtype=torch.bfloat16)
        grads = [DTensor.from_local(ones, mesh, [Partial()])]  # a pending sum
        if placement == Replicate():
            grads.append(DTensor.from_local(all_reduce(ones, "sum", mesh), mesh, [placement]))  # an asynchronous result
        for p.grad in grads:
            reference[0].grad = ones * mesh.size()
            optimizer.step()
            other.step()
        if exact:
            assert_equal_states(model, optimizer, reference, other)


def test_distributed_tensors_of_any_placement(tmp_path):
    run_on_ranks(2, step_distributed, tmp_path)


def check_refusals(mesh):
    model = build_sharded(mesh)
    for q in model.parameters():
        narrow(q)
    with pytest.raises(UsageError, match="gradients=fp32 does not support sharded"):
        AdamW(model.parameters(), master="split", gradients="fp32")
    with pytest.raises(UsageError, match="gradients=released does not support sharded"):
        GradientRelease([AdamW(model.parameters(), master="split")])
    model = build_sharded(mesh)
    with pytest.raises(UsageError, match="gradients=fp32 does not support sharded"):
        convert_optimizer(torch.optim.AdamW(model.parameters()), "split", "8bit", model.parameters(), "fp32")
    assert model[0].weight.dtype is torch.float32
    model(torch.ones(2, 40)).sum().backward()
    with pytest.raises(UsageError, match="already has a gradient"):
        narrow(model[0].weight)
    model.zero_grad()
    with pytest.raises(UsageError, match="before the first forward"):
        narrow(model[0].weight)
    optimizer = AdamW(model.parameters())
    run(model, optimizer, range(1))
    elsewhere = DTensor.from_local(torch.zeros(33, 40), init_device_mesh("cpu", (1, 2)), [Replicate(), Replicate()])
    state = copy.deepcopy(optimizer.state_dict())
    state["state"][0]["exp_avg"] = elsewhere
    with pytest.raises(UsageError, match="another mesh"):
        optimizer.load_state_dict(state)


def test_unsupported_options_of_shards_raise(tmp_path):
    run_on_ranks(2, check_refusals, tmp_path)


def convert_and_resume(mesh):
    """Convert a torch.optim.AdamW that has a state to a lean one, as an engine does."""
    model, reference = build_sharded(mesh), build()
    theirs = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    other = torch.optim.AdamW(reference.parameters(), lr=1e-2, foreach=False)
    run(model, theirs, range(2))
    run(reference, other, range(2))
    theirs.zero_grad()
    optimizer = convert_optimizer(theirs, "split", "fp32", model.parameters())
    for step in range(2, 5):
        run(model, optimizer, [step])
        for p, q in zip(model.parameters(), reference.parameters(), strict=True):
            q.grad = p.grad.full_tensor().float()
        other.step()
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        assert p.dtype is torch.bfloat16
        assert equal(gather_full(join_fp32(p)), q.detach())


def shard_after_narrowing(mesh):
    """fully_shard creates parameters without remainders; loading the full FP32 state adds them."""
    model = build()
    wanted = {name: value.clone() for name, value in model.state_dict().items()}
    for p in model.parameters():
        narrow(p)
    state = full_precision(model)
    fully_shard(model, mesh=mesh)
    AdamW(model.parameters(), master="split").make_states()
    load_full_precision(model, state)
    assert all(equal(gather_full(value), wanted[name]) for name, value in full_precision(model).items())


def test_remainders_can_be_added_after_fully_shard(tmp_path):
    run_on_ranks(2, shard_after_narrowing, tmp_path)


def test_a_sharded_optimizer_is_converted(tmp_path):
    run_on_ranks(2, convert_and_resume, tmp_path)
