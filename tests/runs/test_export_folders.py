"""``narrowgauge export --format hf`` and ``--format fp8``: folders that transformers loads, equal to the masters."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hf_task import FAMILIES, make_folder
from safetensors.torch import load_file, save_file
from torch import Tensor

from narrowgauge.cli import main
from narrowgauge.kernels.cast import cast
from narrowgauge.runs.checkpoints import checkpoint, sharded
from narrowgauge.runs.checkpoints.layout import SHARD_TABLE, STATE
from narrowgauge.runs.checkpoints.tensor_reader import TensorReader
from narrowgauge.runs.export.fp8_folder import round_up_to_bf16

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # a CPU without BF16 products
TASK = f"{Path(__file__).parent / 'hf_task.py'}:make"
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
TOKENS = torch.arange(1, 17)[None]
Run = Callable[[str, str], tuple[Path, Path]]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Returns the source folder and the run of a model family under a recipe. Each is made once."""
    root = tmp_path_factory.mktemp("export")

    def get(family: str, recipe: str) -> tuple[Path, Path]:
        source, run = root / family, root / f"{family}-{recipe}"
        if not source.exists():
            make_folder(source, family)
        if not run.exists():
            options = ["--device", "cpu", "--recipe", recipe, "--steps", "2", "--log", "none", "--out", str(run)]
            assert main(["train", TASK, "--source", str(source), *options]) == 0
            configuration = json.loads((run / "run.json").read_text())
            configuration["options"]["model"] = str(source)  # as `train --model` writes it
            (run / "run.json").write_text(json.dumps(configuration))
        return source, run

    return get


def read_masters(run: Path) -> dict[str, Tensor]:
    saved = checkpoint.load_newest(run)
    assert saved is not None
    return saved.weights


def read_tensors(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def load(folder: Path, **options: Any) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, **options).eval()


@torch.no_grad()
def compute_logits(model: Any) -> Tensor:
    return model(TOKENS).logits.float()


def export(run: Path, *options: str) -> int:
    return main(["export", str(run), *options])


@pytest.mark.parametrize("recipe", ["bf16", "bf16-lean", "fp8-lean"])
@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_loads_the_master_weights_bit_for_bit(
    trained: Run, family: str, recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, run = trained(family, recipe)
    masters = read_masters(run)
    assert all(tensor.dtype == torch.float32 for tensor in masters.values())
    assert any(not tensor.equal(tensor.bfloat16().float()) for tensor in masters.values())
    capsys.readouterr()
    dtype = {"bf16": "fp32", "bf16-lean": "bf16", "fp8-lean": "fp16"}[recipe]
    for name, size in ((dtype, "60KB"), ("bf16", "5GB")):
        folder = tmp_path / f"{name}-{size}"
        assert (
            export(run, "--format", "hf", "--dtype", name, "--max-shard-size", size, "--out", str(folder), "--json")
            == 0
        )
        data = json.loads(capsys.readouterr().out)
        stored = read_tensors(folder)
        tied = {"lm_head.weight"} if family != "Llama" else set()
        assert stored.keys() == masters.keys() - tied
        assert all(tensor.equal(masters[key].to(DTYPES[name])) for key, tensor in stored.items())
        assert data["tensors"] == len(stored) and len(data["files"]) == (
            1 if size == "5GB" else len(list(folder.glob("*.safetensors")))
        )
        assert all((folder / file).stat().st_size == count for file, count in data["files"].items())
        assert (folder / "model.safetensors.index.json").exists() == (len(data["files"]) > 1) == (size == "60KB")
        assert json.loads((folder / "config.json").read_text())["dtype"] == str(DTYPES[name]).removeprefix("torch.")
        loaded = load(folder)
        assert loaded.dtype == DTYPES[name]
        plain = load(source, dtype=torch.float32)
        plain.load_state_dict({key: tensor.to(DTYPES[name]).float() for key, tensor in masters.items()})
        assert compute_logits(loaded.float()).equal(compute_logits(plain))


def test_files_of_the_tokenizer_are_copied_and_code_is_not(trained: Run, tmp_path: Path) -> None:
    _, run = trained("Llama", "bf16")
    assert export(run, "--format", "hf", "--out", str(tmp_path / "hf")) == 0
    assert sorted(path.name for path in (tmp_path / "hf").iterdir()) == [
        "chat_template.jinja", "config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
        "tokenizer_config.json",
    ]  # fmt: skip
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")("abc")["input_ids"] == [3, 4, 5]
    assert transformers.GenerationConfig.from_pretrained(tmp_path / "hf").eos_token_id == 2


def test_a_checkpoint_folder_and_the_fields_that_the_run_changed(trained: Run, tmp_path: Path) -> None:
    _, original = trained("Llama", "bf16")
    run = Path(shutil.copytree(original, tmp_path / "run"))
    configuration = json.loads((run / "run.json").read_text())
    configuration["options"]["config"] = {"rms_norm_eps": 0.25}
    (run / "run.json").write_text(json.dumps(configuration))
    newest = checkpoint.find_newest(run)
    assert newest is not None
    assert export(newest, "--format", "hf") == 0
    assert load(run / "hf-00000002").config.rms_norm_eps == 0.25
    assert export(newest, "--format", "hf") == 2  # it is there


def test_experts_are_stored_as_transformers_stores_them(trained: Run, tmp_path: Path) -> None:
    source, run = trained("Mixtral", "bf16")
    assert export(run, "--format", "hf", "--out", str(tmp_path / "hf")) == 0
    stored = read_tensors(tmp_path / "hf")
    assert stored.keys() == read_tensors(source).keys() and any(".experts.7.w3." in name for name in stored)
    plain = load(source, dtype=torch.float32)
    plain.load_state_dict({name: tensor.bfloat16().float() for name, tensor in read_masters(run).items()})
    assert compute_logits(load(tmp_path / "hf").float()).equal(compute_logits(plain))


def split_into_ranks(run: Path) -> None:
    """Replace the checkpoint of a run by one with the same tensors in the shards of two ranks."""
    saved = checkpoint.load_newest(run)
    assert saved is not None
    trees, tensors = sharded.split_tensors(saved.weights, saved.state)
    folder = checkpoint.create_hidden(run, saved.step)
    parts: list[dict[str, Tensor]] = [{}, {}]
    table = {}
    for number, (name, tensor) in enumerate(tensors.items()):
        first = math.ceil(len(tensor) / 2) if tensor.dim() else 0
        pieces = [(0, tensor[:first]), (first, tensor[first:])] if first else [(0, tensor)]
        chunks = []
        for rank, (start, piece) in enumerate(pieces):
            if piece.numel() or not tensor.numel():
                parts[rank][str(number)] = piece.contiguous().clone()
                offset = [start, *[0] * (tensor.dim() - 1)][: tensor.dim()]
                place = {"file": f"shard-{rank}.safetensors", "number": number}
                chunks.append({"offset": offset, "size": list(piece.shape), **place})
        dtype = str(tensor.dtype).removeprefix("torch.")
        table[name] = {"dtype": dtype, "shape": list(tensor.shape), "chunks": chunks}
    for rank, part in enumerate(parts):
        save_file(part, folder / f"shard-{rank}.safetensors")
    (folder / SHARD_TABLE).write_text(json.dumps({"format": 1, "tensors": table}))
    (folder / STATE).write_text(checkpoint.dump_state(**trees))
    checkpoint.commit(run, saved.step, 1)


def test_checkpoints_of_several_ranks_give_the_same_files(trained: Run, tmp_path: Path) -> None:
    _, run = trained("Qwen3", "fp8-lean")
    shutil.copytree(run, tmp_path / "run")
    split_into_ranks(tmp_path / "run")
    path = checkpoint.find_newest(tmp_path / "run")
    assert path is not None and checkpoint.is_sharded(path)
    for format in ("hf", "fp8"):
        for name, one in (("one", run), ("ranks", tmp_path / "run")):
            assert export(one, "--format", format, "--out", str(tmp_path / f"{name}-{format}")) == 0
        one, ranks = tmp_path / f"one-{format}", tmp_path / f"ranks-{format}"
        assert all((ranks / file.name).read_bytes() == file.read_bytes() for file in one.iterdir())


@pytest.mark.parametrize("factor", [1.0, 1.0 + 2**-23, 3.1e-5, 448.0, 0.0123, 2.0**-100, 1.0 - 2**-24, 1.99609375001])
def test_factors_are_rounded_up_to_bf16(factor: float) -> None:
    exact = torch.tensor(factor, dtype=torch.float32)
    up = round_up_to_bf16(exact)
    assert up.equal(up.bfloat16().float()) and exact <= up <= exact * (1 + 2**-7)


@pytest.mark.parametrize("recipe", ["bf16-lean", "fp8-lean"])
@pytest.mark.parametrize("family", FAMILIES)
def test_fp8_folders_hold_our_cast_of_the_masters(trained: Run, family: str, recipe: str, tmp_path: Path) -> None:
    compressors = pytest.importorskip("compressed_tensors.compressors")
    from compressed_tensors.quantization import QuantizationConfig

    _, run = trained(family, recipe)
    assert export(run, "--format", "fp8", "--out", str(tmp_path / "fp8")) == 0
    assert export(run, "--format", "hf", "--out", str(tmp_path / "hf")) == 0
    stored, masters = read_tensors(tmp_path / "fp8"), read_masters(run)
    config = json.loads((tmp_path / "fp8" / "config.json").read_text())["quantization_config"]
    scheme = QuantizationConfig.model_validate(config).config_groups["group_0"]
    assert config["ignore"] == ["lm_head"] and len(config["config_groups"]) == 1
    layers = [name.removesuffix(".weight") for name in stored if stored[name].dtype == torch.float8_e4m3fn]
    assert len(layers) == 14 and all(".layers." in layer for layer in layers)
    static = recipe == "fp8-lean"
    assert config["config_groups"]["group_0"]["input_activations"]["dynamic"] is not static
    decompressor = compressors.BaseCompressor.get_value_from_registry(config["format"])
    dequantized = {}
    for name, tensor in stored.items():
        layer, _, end = name.rpartition(".")
        if end in ("weight_scale", "input_scale"):
            assert tensor.dtype == torch.float32 and tensor.shape == (1,) and layer in layers
        elif layer not in layers:
            assert tensor.equal(masters[name].bfloat16())
            dequantized[name] = tensor.float()
        else:
            master, factor = masters[name], stored[f"{layer}.weight_scale"]
            least = master.abs().max() / 448
            assert least * (1 - 1e-6) <= factor <= least * (1 + 2**-7) and factor.equal(factor.bfloat16().float())
            bits = tensor.view(torch.uint8)
            assert bits.equal(cast(master, factor.reciprocal()[0], torch.float8_e4m3fn).view(torch.uint8))
            scaled = np.clip(master.numpy() * factor.reciprocal().numpy(), -448, 448)  # not our code
            assert np.array_equal(bits.numpy(), scaled.astype(ml_dtypes.float8_e4m3fn).view(np.uint8))
            part = {"weight": tensor, "weight_scale": factor}
            dequantized[name] = decompressor.decompress(part, scheme)["weight"]
            assert dequantized[name].equal(tensor.float() * factor)
            assert (f"{layer}.input_scale" in stored) == static
    _check_input_scales(run, stored, layers if static else [])

    # transformers loads it, in the stored scales and weights; what it computes differs by the rounding of activations.
    loaded = load(tmp_path / "fp8", dtype=torch.float32)
    logits, reference = compute_logits(loaded), compute_logits(load(tmp_path / "hf", dtype=torch.float32))
    for layer in layers:
        assert loaded.get_submodule(layer).weight.equal(dequantized[f"{layer}.weight"])
    error = ((logits - reference).norm() / reference.norm()).item()
    assert 1e-4 < error < 0.08, error
    in_bf16 = compute_logits(load(tmp_path / "fp8"))
    assert (in_bf16 - reference).norm() / reference.norm() < 0.08


def _check_input_scales(run: Path, stored: dict[str, Tensor], layers: list[str]) -> None:
    """Static inputs have the trained scale of the layer that casts the input."""
    newest = checkpoint.find_newest(run)
    assert newest is not None
    scales = TensorReader(newest).read_engine_state("tensor_scales") if layers else None
    first = {"k_proj": "q_proj", "v_proj": "q_proj", "up_proj": "gate_proj"}
    for layer in layers:
        parent, _, name = layer.rpartition(".")
        row = scales["sites"].index(f"{parent}.{first.get(name, name)}.input")
        assert scales["history"][:, row].max() > 0
        exact = 1 / scales["scale"][row]
        assert exact <= stored[f"{layer}.input_scale"] <= exact * (1 + 2**-7), layer


def test_layers_that_the_run_kept_in_bf16_stay_there(trained: Run, tmp_path: Path) -> None:
    _, run = trained("Llama", "fp8[keep=*.0.self_attn.k_proj+model.layers.1.mlp.down_proj]")
    assert export(run, "--format", "fp8", "--out", str(tmp_path / "fp8")) == 0
    stored = read_tensors(tmp_path / "fp8")
    ignored = json.loads((tmp_path / "fp8" / "config.json").read_text())["quantization_config"]["ignore"]
    attention = [f"model.layers.0.self_attn.{name}_proj" for name in "qkv"]  # vLLM computes the three as one
    assert sorted(ignored) == sorted([*attention, "model.layers.1.mlp.down_proj", "lm_head"])
    assert all(stored[f"{layer}.weight"].dtype == torch.bfloat16 for layer in ignored)
    assert compute_logits(load(tmp_path / "fp8")).isfinite().all()


def test_current_scaling_gives_dynamic_activations(trained: Run, tmp_path: Path) -> None:
    _, original = trained("Llama", "fp8-lean")
    run = Path(shutil.copytree(original, tmp_path / "run"))
    saved = checkpoint.load_newest(run)
    assert saved is not None and saved.state["engine"]["tensor_scales"]["mode"] == "delayed"
    saved.state["engine"]["tensor_scales"]["mode"] = "current"
    checkpoint.save(run, saved.step, saved.weights, saved.state)
    assert export(run, "--format", "fp8", "--out", str(tmp_path / "fp8")) == 0
    groups = json.loads((tmp_path / "fp8" / "config.json").read_text())["quantization_config"]["config_groups"]
    assert [group["input_activations"]["dynamic"] for group in groups.values()] == [True]
    assert not any(name.endswith("input_scale") for name in read_tensors(tmp_path / "fp8"))


@pytest.mark.parametrize("options, message", [
    (["--format", "gguf"], "invalid choice: 'gguf'"),
    (["--format", "fp8", "--dtype", "bf16"], "--dtype bf16: --format fp8 writes FP8"),
    (["--dtype", "bf16"], "--dtype bf16: --format safetensors writes FP32"),
    (["--model", "x"], "--model is for --format hf"),
    (["--max-shard-size", "1GB"], "--max-shard-size is for --format hf"),
    (["--format", "hf", "--file", "x"], "--file is for --format safetensors"),
    (["--format", "hf", "--max-shard-size", "0"], "'0' is not a size"),
    (["--format", "hf", "--max-shard-size", "5 apples"], "'5 apples' is not a size"),
    (["--format", "hf", "--model", "absent"], "--model absent: there is no such folder"),
    (["--format", "hf", "--model", "."], "the folder has no config.json"),
    (["--format", "hf", "--model", "wide"], "gate_proj.weight is [96, 64] in the run, and [128, 64] in the model (6"),
    (["--format", "hf", "--model", "deep"], "the run has no model.layers.2."),
    (["--format", "hf", "--model", "short"], "the run has model.layers.1."),
    (["--format", "hf", "--model", "broken"], "config.json is not JSON"),
    (["--format", "hf", "--model", "odd"], "config.json asks for Python code"),
    (["--format", "hf", "--out", "full"], "full is not empty, and is not replaced"),
    (["--format", "fp8", "--out", "file"], "file exists and is not a folder"),
    (["--format", "hf", "--step", "7"], "has checkpoints of steps"),
])  # fmt: skip
def test_bad_input_is_one_line(
    trained: Run, options: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    source, run = trained("Llama", "bf16")
    monkeypatch.chdir(tmp_path)
    config = json.loads((source / "config.json").read_text())
    changes: dict[str, dict[str, Any]] = {
        "wide": {"intermediate_size": 128},
        "deep": {"num_hidden_layers": 3},
        "short": {"num_hidden_layers": 1},
        "odd": {"auto_map": {"AutoModel": "x.Y"}},
    }
    for name, fields in changes.items():
        Path(name).mkdir()
        Path(name, "config.json").write_text(json.dumps({**config, **fields}))
    Path("broken").mkdir()
    Path("broken/config.json").write_text("{")
    Path("full").mkdir()
    Path("full/precious").write_text("")
    Path("file").write_text("")
    before = sorted(tmp_path.rglob("*"))
    target = [] if "--out" in options or "--format" not in options else ["--out", "new/folder"]
    capsys.readouterr()
    try:
        code = export(run, *options, *target)
    except SystemExit as stopped:  # argparse
        code = stopped.code
    out, err = capsys.readouterr()
    assert code == 2 and out == "" and len(err.splitlines()) == 1 and message in err, err
    assert sorted(tmp_path.rglob("*")) == before


def test_runs_that_cannot_be_exported_are_refused_in_one_line(
    trained: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, original = trained("Llama", "bf16")

    def refuse(run: Path, message: str, *options: str, format: str = "hf") -> None:
        capsys.readouterr()
        assert export(run, "--format", format, "--out", str(tmp_path / "out"), *options) == 2
        err = capsys.readouterr().err
        assert message in err.splitlines()[-1] and "Traceback" not in err and len(err.splitlines()) == 1, err
        assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".out*"))

    def copy(name: str) -> Path:
        return Path(shutil.copytree(original, tmp_path / name))

    configuration = json.loads((original / "run.json").read_text())
    run = copy("unnamed")
    (run / "run.json").write_text(json.dumps({**configuration, "task": "gpt2-124m", "options": {}}))
    refuse(run, "trained gpt2-124m, and names no Hugging Face model; give the model's folder with --model")
    assert export(run, "--format", "hf", "--model", str(source), "--out", str(tmp_path / "named")) == 0
    (run / "run.json").write_text(json.dumps({**configuration, "options": {"model": "/absent/folder"}}))
    refuse(run, "trained the model in /absent/folder: there is no such folder; give the folder of its config.json with")
    refuse(tmp_path / "nothing", "no checkpoint there")

    def overwrite(run: Path, name: str, value: float) -> None:
        """Save a checkpoint with another weight."""
        saved = checkpoint.load_newest(run)
        assert saved is not None
        saved.weights[name][0, 0] = value
        checkpoint.save(run, saved.step, saved.weights, saved.state)

    run = copy("large")
    overwrite(run, "lm_head.weight", 7e4)
    refuse(run, "--dtype fp16: lm_head.weight has a value of 7e+04, and FP16 ends at 65504", "--dtype", "fp16")
    overwrite(run, "model.layers.1.mlp.up_proj.weight", float("nan"))
    refuse(run, "up_proj.weight has values that are not finite", format="fp8")

    _, experts = trained("Mixtral", "bf16")
    refuse(experts, "--format fp8 has no layout for model.layers.0.mlp.", format="fp8")
    _, run = trained("Qwen3", "bf16")
    run = Path(shutil.copytree(run, tmp_path / "untied"))
    saved = checkpoint.load_newest(run)
    assert saved is not None
    saved.weights["lm_head.weight"] = saved.weights["lm_head.weight"] + 1
    checkpoint.save(run, saved.step, saved.weights, saved.state)
    refuse(run, "has trained lm_head.weight and model.embed_tokens.weight apart")

    run = copy("damaged")
    file = next(run.rglob("weights.safetensors"))
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    for path in run.glob("checkpoints/step-*"):
        if path != file.parent:
            shutil.rmtree(path)
    refuse(file.parent, "weights.safetensors does not match its SHA-256")


def test_a_full_disk_leaves_nothing(trained: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A limit on the file size fails like a full disk."""
    import resource
    import signal

    _, run = trained("Llama", "bf16")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        code = export(run, "--format", "hf", "--out", str(tmp_path / "hf"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert code == 2 and f"cannot write {tmp_path / 'hf'}" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
