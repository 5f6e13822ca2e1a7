"""Packed documents in fused blocks: what masks they are found in, and training on them as on the documents alone."""

from __future__ import annotations

import copy
import gc
import itertools
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from model_families import LANGUAGE, make_batch, without_dropout
from test_family_training import fail_in_own_code, fuse_in_fp32
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from narrowgauge import Engine
from narrowgauge.forecast.trace.fake_gpu import simulate_gpu
from narrowgauge.hardware import find_gpu
from narrowgauge.nn.fused import attention, documents, modules, recorded
from narrowgauge.nn.fused.casts import WantedGradient
from narrowgauge.nn.fused.documents import Documents, find_documents
from narrowgauge.nn.fused.graphs import BlockGraphs


def make_mask(*rows: list[int]) -> Tensor:
    """Return the mask of documents with these lengths."""
    numbers = torch.stack([torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in rows])
    length = numbers.shape[1]
    same: Tensor = numbers[:, None, :, None] == numbers[:, None, None]
    return same & torch.ones(length, length, dtype=torch.bool).tril()


def list_partitions(length: int) -> list[list[int]]:
    found = []
    for cuts in itertools.product((False, True), repeat=length - 1):
        places = [0, *(place for place, cut in enumerate(cuts, 1) if cut), length]
        found.append([end - start for start, end in itertools.pairwise(places)])
    return found


def get_lengths(found: Documents | None) -> list[int]:
    assert found is not None and found.bounds is not None and found.bounds.dtype is torch.int32
    lengths = [length for length in found.bounds.diff().tolist() if length]
    assert max(lengths) <= found.longest and found.bounds[0] == 0
    return lengths


lengths_of_a_row = st.lists(st.integers(1, 9), min_size=1, max_size=6)


@settings(max_examples=60, deadline=None)
@given(st.lists(lengths_of_a_row, min_size=1, max_size=3))
def test_documents_are_found(rows: list[list[int]]) -> None:
    total = max(sum(row) for row in rows) + 1
    rows = [[*row, total - sum(row)] for row in rows]
    found = find_documents(make_mask(*rows), len(rows))
    assert get_lengths(found) == [length for row in rows for length in row]


def test_one_mask_for_all_rows() -> None:
    assert get_lengths(find_documents(make_mask([3, 2, 4]), 3)) == [3, 2, 4] * 3
    assert get_lengths(find_documents(make_mask([3, 2, 4]).expand(3, 1, 9, 9), 3)) == [3, 2, 4] * 3


def test_one_document_in_each_row_is_a_causal_mask() -> None:
    for mask in (make_mask([7], [7]), make_mask([7]), make_mask([7]).expand(2, 1, 7, 7)):
        assert find_documents(mask, 2) == Documents(None, 7)
    assert get_lengths(find_documents(make_mask([7], [3, 4]), 2)) == [7, 3, 4]


def test_all_masks_of_three_tokens_and_all_single_changes_of_five() -> None:
    """Those of documents are found, and no other one."""
    for length in (3, 5):
        known = {tuple(make_mask(row).flatten().tolist()): row for row in list_partitions(length)}
        if length == 3:
            tried = set(itertools.product((False, True), repeat=9))
        else:
            tried = {(*one[:place], not one[place], *one[place + 1 :]) for one in known for place in range(25)}
        for values in tried:
            found = find_documents(torch.tensor(values).view(1, 1, length, length), 1)
            expected = known.get(values)
            if expected is None:
                assert found is None, values
            elif len(expected) > 1:
                assert get_lengths(found) == expected
            else:
                assert found == Documents(None, length)


def list_other_masks() -> dict[str, Tensor]:
    causal, token = make_mask([8]), torch.arange(8)
    left, right = causal.clone(), causal.clone()
    left[..., :2] = False
    right[..., 6:] = False
    prefix = causal | (token < 3)
    hole = make_mask([3, 5])
    hole[0, 0, 6, 5] = False
    empty = make_mask([3, 5])
    empty[0, 0, 4] = False
    back = make_mask([3, 5])
    back[0, 0, 5, 1:3] = True
    return {
        "left padding": left, "left padding that sees itself": left | torch.eye(8, dtype=torch.bool),
        "right padding": right, "window": causal & (token[:, None] - token < 3), "prefix": prefix,
        "bidirectional": torch.ones(1, 1, 8, 8, dtype=torch.bool), "nothing": torch.zeros(1, 1, 8, 8, dtype=torch.bool),
        "hole": hole, "empty row": empty, "back to the document before": back,
        "bidirectional documents": make_mask([3, 5]) | make_mask([3, 5]).transpose(2, 3),
        "documents and padding": make_mask([3, 5]) & (token < 6), "per head": make_mask([3, 5]).repeat(1, 2, 1, 1),
    }  # fmt: skip


@pytest.mark.parametrize("name", [name for name in list_other_masks() if name != "left padding that sees itself"])
def test_other_masks_stay_masks(name: str) -> None:
    mask = list_other_masks()[name]
    assert find_documents(mask, 1) is None
    if mask.shape[1] == 1:
        assert find_documents(torch.cat([make_mask([3, 5]), mask]), 2) is None


def test_padding_whose_tokens_see_themselves_is_documents_of_one_token() -> None:
    mask = list_other_masks()["left padding that sees itself"]
    assert get_lengths(find_documents(mask, 1)) == [1, 1, 6]


def test_sizes_are_rounded_so_that_few_graphs_serve_all_batches() -> None:
    sizes = set()
    for seed in range(6):
        lengths = torch.randint(70, 120, (2, 9), generator=torch.Generator().manual_seed(seed)).tolist()
        found = find_documents(make_mask(*([*row, 1200 - sum(row)] for row in lengths)), 2)
        assert found is not None and found.bounds is not None
        sizes.add((len(found.bounds), found.longest))
    assert sizes <= {(33, 512), (33, 1024)}


def test_too_many_short_documents_stay_a_mask() -> None:
    assert find_documents(make_mask([1] * 65 + [400]), 1) is None
    assert len(get_lengths(find_documents(make_mask([1] * 63 + [400]), 1))) == 64
    assert len(get_lengths(find_documents(make_mask([32] * 128), 1))) == 128


def count_reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    read, calls = documents._read_mask, []

    def counted(*args: Any) -> Documents | None:
        calls.append(1)
        return read(*args)

    monkeypatch.setattr(documents, "_read_mask", counted)
    return calls


def test_a_mask_is_read_once_and_again_after_a_change(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = count_reads(monkeypatch)
    mask = make_mask([3, 5])
    assert find_documents(mask, 1) is find_documents(mask, 1) and len(calls) == 1
    assert get_lengths(find_documents(mask, 2)) == [3, 5, 3, 5] and len(calls) == 2
    mask.copy_(make_mask([4, 4]))
    assert get_lengths(find_documents(mask, 2)) == [4, 4, 4, 4]
    mask[0, 0, 7, 7] = False
    assert find_documents(mask, 2) is None and find_documents(mask, 2) is None and len(calls) == 4
    twin = copy.deepcopy(mask)
    twin.copy_(make_mask([2, 6]))
    assert get_lengths(find_documents(twin, 1)) == [2, 6]


def test_what_was_found_does_not_keep_a_mask_alive() -> None:
    gc.collect()
    mask, before = make_mask([3, 5]), len(documents._found)
    found, seen = find_documents(mask, 1), weakref.ref(mask)
    assert found is not None and len(documents._found) == before + 1
    del mask
    gc.collect()
    assert seen() is None and len(documents._found) == before


def test_masks_that_cannot_be_read_stay_masks() -> None:
    with torch.inference_mode():
        assert find_documents(make_mask([3, 5]), 1) is None
    with FakeTensorMode():
        assert find_documents(torch.ones(1, 1, 8, 8, dtype=torch.bool), 1) is None
    assert find_documents(make_mask([3, 5]).to("meta"), 1) is None
    with simulate_gpu(find_gpu("h200")) as gpu:
        mask = torch.ones(1, 1, 8, 8, dtype=torch.bool, device="cuda")
        assert mask.is_cuda and find_documents(mask, 1) is None and not gpu.values_read


LENGTHS = ([9, 10], [4, 1, 14])
POSITIONS = torch.stack([torch.cat([torch.arange(length) for length in row]) for row in LENGTHS])


def make_packed(seed: int = 0) -> dict[str, Any]:
    """Return a batch of documents, whose first tokens are predicted from nothing."""
    tokens = make_batch(seed)
    return {
        "input_ids": tokens, "labels": tokens.masked_fill(POSITIONS == 0, -100), "position_ids": POSITIONS,
        "use_cache": False,
    }  # fmt: skip


def compute_unpacked(model: nn.Module, seed: int = 0) -> Tensor:
    """Return the mean loss of the same documents, each run by itself."""
    tokens, total, count = make_batch(seed), torch.zeros(()), 0
    for row, lengths in zip(tokens, LENGTHS, strict=True):
        for part in row.split(lengths):
            if len(part) > 1:
                total = total + model(input_ids=part[None], labels=part[None]).loss.float() * (len(part) - 1)
                count += len(part) - 1
    return total / count


def forbid_masks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let attention of documents be the only one that runs."""
    calls, attend = [], attention.attend_documents

    def counted(*args: Any) -> Tensor:
        calls.append(1)
        return attend(*args)

    monkeypatch.setattr(attention, "attend_documents", counted)
    monkeypatch.setattr(attention, "_attend_by_own_code", fail_in_own_code)
    return calls


@pytest.mark.parametrize("family", ["llama", "qwen3", "phi", "starcoder2"])
def test_losses_and_gradients_are_those_of_the_documents_alone(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = without_dropout(LANGUAGE[family]()).train()
    twin = copy.deepcopy(model)
    expected = compute_unpacked(twin)
    expected.backward()
    fused = fuse_in_fp32(model)
    calls, reads = forbid_masks(monkeypatch), count_reads(monkeypatch)
    found = fused(**make_packed()).loss
    found.backward()
    assert len(calls) == 2 and len(reads) == 1  # two layers, one mask
    assert found.item() == pytest.approx(expected.item(), rel=1e-5)
    for (name, one), two in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert one.grad is not None and two.grad is not None
        torch.testing.assert_close(one.grad, two.grad, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: name + text)


@pytest.mark.parametrize(
    ("recipe", "tolerance"),
    [("bf16", 1e-2), ("fp8", 2e-2), ("fp8[checkpoint=full]", 2e-2), ("bf16[checkpoint=selective]", 1e-2)],
)
def test_training_on_packed_documents(recipe: str, tolerance: float, monkeypatch: pytest.MonkeyPatch) -> None:
    model = without_dropout(LANGUAGE["llama"]()).train()
    plain, losses = copy.deepcopy(model), {}
    calls, reads = forbid_masks(monkeypatch), count_reads(monkeypatch)
    for kind, one in (("fused", model), ("unpacked", plain)):
        losses[kind] = []
        if kind == "unpacked":
            monkeypatch.undo()
        engine = Engine(
            one, torch.optim.AdamW(one.parameters(), lr=1e-3), recipe if kind == "fused" else "bf16",
            fused=kind == "fused",
        )  # fmt: skip
        for step in range(4):
            with engine.forward():
                loss = one(**make_packed(step % 2)).loss if kind == "fused" else compute_unpacked(one, step % 2)
            engine.backward(loss)
            assert engine.step().applied
            losses[kind].append(loss.item())
    assert len(reads) == 4 and len(calls) >= 8
    assert losses["fused"] == pytest.approx(losses["unpacked"], rel=tolerance)


def test_bounds_beside_a_mask_say_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """TRL passes them to all models. Without a mask only the model's own attention knows what they mean."""
    model = fuse_in_fp32(without_dropout(LANGUAGE["llama"]()).train())
    bounds = torch.tensor([0, 9, 19, 23, 24, 38], dtype=torch.int32)
    more = {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": 14, "max_length_k": 14,
            "seq_idx": torch.zeros(2, 19, dtype=torch.int32)}  # fmt: skip
    batch = make_packed()
    expected = model(**batch).loss
    monkeypatch.setattr(attention, "_attend_by_own_code", fail_in_own_code)
    assert torch.equal(model(**batch, **more).loss, expected)
    with pytest.raises(AssertionError, match="own attention ran"):
        model(input_ids=batch["input_ids"], use_cache=False, **more)


@pytest.mark.parametrize("recipe", ["bf16", "fp8[products=all]", "fp8[checkpoint=full]"])
def test_gradients_are_those_with_the_mask(
    recipe: str, monkeypatch: pytest.MonkeyPatch, set_cpu_formats: Callable[..., None]
) -> None:
    set_cpu_formats("fp32")  # native attention in BF16 rounds probabilities, which a mask puts into other tiles
    model = without_dropout(LANGUAGE["qwen3"]()).train()
    results = []
    for masked in (True, False):
        one = copy.deepcopy(model)
        engine = Engine(one, torch.optim.SGD(one.parameters(), lr=0.1), recipe, fused=True)
        with monkeypatch.context() as patch:
            if masked:
                patch.setattr(modules, "find_documents", lambda *_: None)
            else:
                calls = forbid_masks(patch)
            with engine.forward():
                loss = one(**make_packed()).loss
            engine.backward(loss)
        results.append({"loss": loss.detach(), **{name: p.grad for name, p in one.named_parameters()}})
    assert calls
    for name, expected in results[0].items():
        assert expected is not None and results[1][name] is not None
        assert (results[1][name] - expected).norm() <= 1e-3 * expected.norm(), name


def test_a_causal_mask_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block that is called with such a mask computes as without it, also if it is not causal by itself."""
    for family, masked in (("llama", False), ("bert", True)):
        model = fuse_in_fp32(without_dropout(LANGUAGE[family]()).train())
        tokens = make_batch()
        seen = []
        attend = torch.nn.functional.scaled_dot_product_attention

        def note(*args: Any, seen: list[Any] = seen, attend: Any = attend, **kwargs: Any) -> Tensor:
            seen.append((args[3], kwargs["is_causal"]))
            result: Tensor = attend(*args, **kwargs)
            return result

        mask = make_mask([19], [19])
        expected = model(input_ids=tokens, attention_mask=mask.clone().fill_(True) if masked else None).logits
        with monkeypatch.context() as patch:
            patch.setattr(attention.F, "scaled_dot_product_attention", note)
            found = model(input_ids=tokens, attention_mask=mask).logits
        assert seen == [(None, True)] * 2
        assert torch.equal(found, expected) != masked


def test_bounds_are_inputs_of_a_recording(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bounds of each batch are copied to where a recorded block reads them; the mask is not an input."""
    inputs: list[Any] = []
    model = fuse_in_fp32(without_dropout(LANGUAGE["llama"]()).train())
    monkeypatch.setattr(BlockGraphs, "find", lambda self, given, wanted: inputs.append(given))
    model(**make_packed())
    given_input = inputs[0]
    named = recorded.name_arguments(given_input)
    assert list(named) == ["cos", "sin", recorded.BOUNDS]
    places = [torch.empty_like(tensor) for tensor in recorded._list_inputs(given_input)]
    replaced = recorded._replace_inputs(given_input, places)
    assert replaced.call.documents.bounds is places[-1] and "attention_mask" not in replaced.call.kwargs
    keys, call, wanted = BlockGraphs(), given_input.call, WantedGradient()
    other = given_input._replace(call=replace(call, documents=replace(call.documents, longest=64)))
    assert keys._find_calls(given_input, wanted) is keys._find_calls(given_input, wanted)
    assert keys._find_calls(given_input, wanted) is not keys._find_calls(other, wanted)
