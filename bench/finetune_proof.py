"""Is fine-tuning in low precision as good as in FP32? Pre-trains on Python source, and fine-tunes on docstrings.

usage: python bench/finetune_proof.py FOLDER [pretrain=600] [steps=200] [rows=4] [seeds=3] [layers=12] ...

    code        Python files of the standard library and of torch, in pieces: the text for pre-training
    docstrings  functions of transformers without their docstring as prompt, the docstring as completion
    model       transformers' Llama, 124 million parameters, with a byte-pair encoding of 32,768 tokens of the code

The model is pre-trained with ``narrowgauge train`` from random weights, exported as a folder, and then fine-tuned by
``narrowgauge validate``: all weights (bf16-lean, fp8-lean, and BF16 weights without masters) against FP32, and LoRA
adapters on a base in FP8 against adapters on a base in FP32. The loss is that of held-out docstrings. Everything that
exists in FOLDER already is used again. JSON goes to $OUT/finetune-proof.json where OUT is set.
"""

import ast
import json
import os
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

folder = Path(sys.argv[1])
options = {
    "pretrain": 600, "steps": 200, "rows": 4, "seeds": 3, "layers": 12, "width": 768, "hidden": 2560,
    "vocabulary": 32768, "context": 1024, "batch": 32, "megabytes": 60,
}  # fmt: skip
for argument in sys.argv[2:]:
    name, _, value = argument.partition("=")
    options[name] = int(value)
LONGEST = 2000
"""Characters of a function that are given as prompt."""
PIECE = 3000
"""Characters of a piece of a file: less than the context, so that nothing is cut."""


def say(*words):
    print(f"[{time.perf_counter():.0f} s]", *words, flush=True)


def list_files(*roots):
    for root in roots:
        yield from sorted(path for path in Path(root).rglob("*.py") if "test" not in str(path))


def read(path):
    try:
        return path.read_text()
    except (UnicodeDecodeError, OSError):
        return ""


def find_package(name):
    import importlib.util

    return Path(importlib.util.find_spec(name).origin).parent


def write_lines(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def write_code(path):
    left, records = options["megabytes"] * 1e6, []
    for file in list_files(sysconfig.get_paths()["stdlib"], find_package("torch")):
        text = read(file)
        if "site-packages/transformers" in str(file) or not 200 < len(text) < 200_000:
            continue
        records += [{"text": text[start : start + PIECE]} for start in range(0, len(text), PIECE)]
        left -= len(text)
        if left < 0:
            break
    write_lines(path, records)
    say(f"code: {len(records)} pieces, {sum(len(record['text']) for record in records) / 1e6:.1f} MB")


def list_docstrings(text):
    """Yield the source of each function without its docstring, and the docstring."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return
    lines = text.splitlines(keepends=True)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and (found := ast.get_docstring(node)) and len(found) > 40:
            first, last = node.body[0].lineno, node.body[0].end_lineno
            source = "".join(lines[node.lineno - 1 : first - 1] + lines[last : node.end_lineno])
            yield source[:LONGEST], found


def write_docstrings(path):
    seen, records = set(), []
    for file in list_files(find_package("transformers")):
        for source, found in list_docstrings(read(file)):
            if found not in seen:
                seen.add(found)
                records.append({"prompt": source, "completion": found})
    write_lines(path, records)
    say(f"docstrings: {len(records)} functions")


def write_model(path):
    import torch
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=options["vocabulary"],
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = [json.loads(line)["text"] for line in (folder / "code.jsonl").read_text().splitlines()]
    tokenizer.train_from_iterator(texts[::4], trainer)
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|end|>")
    config = transformers.LlamaConfig(
        hidden_size=options["width"], intermediate_size=options["hidden"], num_hidden_layers=options["layers"],
        num_attention_heads=options["width"] // 64, vocab_size=options["vocabulary"], tie_word_embeddings=True,
        max_position_embeddings=options["context"], bos_token_id=0, eos_token_id=0, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(path)
    fast.save_pretrained(path)
    say(f"model: {sum(parameter.numel() for parameter in model.parameters()) / 1e6:.0f} million parameters")


def run(*arguments):
    say("narrowgauge", *arguments)
    done = subprocess.run([sys.executable, "-m", "narrowgauge", *map(str, arguments)], stdout=subprocess.PIPE)
    if done.returncode not in (0, 1):
        sys.exit(done.returncode)
    return json.loads(done.stdout)


folder.mkdir(parents=True, exist_ok=True)
results = {"options": options}
for name, write in (("code.jsonl", write_code), ("docstrings.jsonl", write_docstrings), ("random", write_model)):
    if not (folder / name).exists():
        write(folder / name)
if not (folder / "pretrained").exists():
    found = run(
        "train", "--model", folder / "random", "--data", folder / "code.jsonl", "--recipe", "fp8", "--lr", "6e-4",
        "--steps", options["pretrain"], "--context", options["context"], "--batch", options["batch"], "--epochs", 100,
        "--out", folder / "run", "--log", "none", "--checkpoint-every", 0, "--json",
    )  # fmt: skip
    results["pretraining"] = found
    say(
        "pre-trained:",
        {key: found.get(key) for key in ("loss", "eval_loss", "first_loss", "last_loss") if key in found},
    )
    run("export", folder / "run", "--format", "hf", "--dtype", "fp32", "--out", folder / "pretrained", "--json")
common = [
    "validate", "--model", folder / "pretrained", "--data", folder / "docstrings.jsonl", "--steps", options["steps"],
    "--seeds", options["seeds"], "--context", options["context"], "--batch", options["rows"], "--no-layers", "--json",
]  # fmt: skip
for name, more in {
    "all weights": ["--candidates", "bf16-lean,fp8-lean,bf16[master=none]", "--lr", "3e-5"],
    "adapters": ["--candidates", "bf16-lean,fp8-lean", "--lora", "rank=16"],
}.items():
    found = results[name] = run(*common, *more)
    for candidate, outcome in found.get("candidates", {}).items():
        say(name, candidate, {key: outcome.get(key) for key in ("verdict", "gap", "interval", "low", "high", "seeds")})
    if os.environ.get("OUT"):
        (Path(os.environ["OUT"]) / "finetune-proof.json").write_text(json.dumps(results, indent=1))
