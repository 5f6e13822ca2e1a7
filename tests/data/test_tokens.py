"""Token files: what is read, what is refused with which error, and how windows are sampled."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from narrowgauge.data import tokens
from narrowgauge.data.tokens import TokenData
from narrowgauge.errors import UsageError


def write_llmc(path, values, magic=20240520, version=1, count=None, dtype="<u2"):
    header = np.zeros(256, "<i4")
    header[:3] = magic, version, len(values) if count is None else count
    path.write_bytes(header.tobytes() + np.asarray(values, dtype).tobytes())
    return path


def write_nano(path, values):
    path.write_bytes(np.asarray(values, "<u2").tobytes())
    return path


def refusal(function, *arguments):
    with pytest.raises(UsageError) as caught:
        function(*arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_the_three_bin_formats_are_read(tmp_path):
    values = [5, 50256, 0, 7]
    assert tokens.read_bin(write_nano(tmp_path / "a.bin", values)).tolist() == values
    assert tokens.read_bin(write_llmc(tmp_path / "b.bin", values)).tolist() == values
    wide = [5, 128255, 0]
    long = write_llmc(tmp_path / "c.bin", wide, magic=20240801, version=7, dtype="<u4")
    assert tokens.read_bin(long).tolist() == wide
    assert isinstance(tokens.read_bin(long), np.memmap)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "empty"),
        (b"abc", "3 bytes"),
        (b"PK\x03\x04" + bytes(100), "PyTorch checkpoint"),
        (b"\x80\x02" + bytes(100), "pickle"),
        (np.array([20240520, 1, 5], "<i4").tobytes(), "less than a header"),
        (np.array([20240520, 1, 5], ">i4").tobytes() + bytes(2000), "big-endian"),
    ],
)
def test_a_file_of_another_type_is_refused(tmp_path, content, words):
    path = tmp_path / "x.bin"
    path.write_bytes(content)
    message = refusal(tokens.read_bin, path)
    assert words in message
    assert str(path) in message


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"count": 11}, "says 11 tokens but it holds 10"),
        ({"count": 9}, "says 9 tokens but it holds 10"),
        ({"version": 2}, "version 2"),
        ({"magic": 20240522}, "magic 20240522"),
        ({"magic": 20240801}, "version 1, expected 7"),
        ({"magic": 20240801, "version": 7}, "says 10 tokens but it holds 5"),
    ],
)
def test_an_llmc_header_must_fit_its_file(tmp_path, fields, words):
    assert words in refusal(tokens.read_bin, write_llmc(tmp_path / "x.bin", range(10), **fields))


def test_a_header_without_tokens_is_refused(tmp_path):
    assert "no tokens" in refusal(tokens.read_bin, write_llmc(tmp_path / "x.bin", []))


def test_every_truncation_of_an_llmc_file_is_refused(tmp_path):
    whole = write_llmc(tmp_path / "x.bin", range(20)).read_bytes()
    for size in [*range(4, 1024, 51), *range(1024, len(whole))]:
        (tmp_path / "y.bin").write_bytes(whole[:size])
        refusal(tokens.read_bin, tmp_path / "y.bin")


def test_a_token_outside_the_vocabulary_is_named_with_its_position(tmp_path, monkeypatch):
    monkeypatch.setattr(tokens, "BLOCK_TOKENS", 64)  # so that the position is after the first block
    values = np.arange(1000) % 100
    values[777] = 100
    path = write_nano(tmp_path / "x.bin", values)
    message = refusal(tokens.open_tokens, path, 100, 8)
    assert "token 100 at position" in message
    tokens.open_tokens(path, 101, 8)
    assert "token 100 at position 777" in refusal(tokens.check_range, tokens.read_bin(path), 100, "x")


def test_too_few_tokens_for_a_window_are_refused(tmp_path):
    for count in range(1, 18):
        data = tokens.open_tokens(write_nano(tmp_path / "x.bin", range(count)), 100, 8)
        assert "--context" in refusal(data.count_windows, "train", 8)
    data = tokens.open_tokens(write_nano(tmp_path / "x.bin", range(18)), 100, 8)
    assert data.count_windows("train", 8) == data.count_windows("eval", 8) == [1]


def test_a_single_file_gives_its_last_twentieth_to_evaluation(tmp_path):
    data = tokens.open_tokens(write_nano(tmp_path / "x.bin", range(2000)), 2000, 8)
    assert data.shards["train"][0].tolist() == list(range(1900))
    assert data.shards["eval"][0].tolist() == list(range(1900, 2000))


def test_a_folder_is_split_by_the_names_of_its_files(tmp_path):
    write_nano(tmp_path / "train.bin", [1] * 50)
    write_llmc(tmp_path / "fineweb_train_000001.bin", [2] * 50)
    write_nano(tmp_path / "val.bin", [3] * 50)
    (tmp_path / "meta.pkl").write_bytes(b"ignored")
    assert tokens.holds_tokens(tmp_path)
    data = tokens.open_tokens(tmp_path, 10, 8)
    assert [shard[0] for shard in data.shards["train"]] == [2, 1]
    assert [shard[0] for shard in data.shards["eval"]] == [3]
    assert data.size("train") == 100


def test_shards_may_be_in_one_folder_per_split(tmp_path):
    for name, value in (("train/000.bin", 1), ("train/001.bin", 2), ("val/000.bin", 3), ("checkpoints/x.bin", 9)):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        write_llmc(tmp_path / name, [value] * 50)
    assert tokens.holds_tokens(tmp_path)
    data = tokens.open_tokens(tmp_path, 10, 8)
    assert [shard[0] for shard in data.shards["train"]] == [1, 2]
    assert [shard[0] for shard in data.shards["eval"]] == [3]


def test_a_damaged_shard_is_named(tmp_path):
    for number in range(3):
        write_llmc(tmp_path / f"fineweb_train_{number:06}.bin", range(50))
    write_llmc(tmp_path / "fineweb_val_000000.bin", range(50), count=60)
    assert "fineweb_val_000000.bin says 60 tokens" in refusal(tokens.open_tokens, tmp_path, 100, 8)
    write_llmc(tmp_path / "fineweb_val_000000.bin", range(51, 101))
    assert "fineweb_val_000000.bin: token 100 at position 49" in refusal(tokens.open_tokens, tmp_path, 100, 8)


def test_the_tokens_of_a_long_file_are_checked_once(tmp_path, monkeypatch, cache_folder):
    monkeypatch.setattr(tokens, "BLOCK_TOKENS", 64)
    path = write_nano(tmp_path / "x.bin", np.arange(1000) % 100)
    tokens.open_tokens(path, 100, 8)
    assert [file.read_text() for file in cache_folder.iterdir()] == ["99"]
    monkeypatch.setattr(tokens, "check_range", lambda *_: pytest.fail("read again"))
    tokens.open_tokens(path, 100, 8)
    monkeypatch.undo()
    assert "token 99" in refusal(tokens.open_tokens, path, 99, 8)


def test_a_folder_without_an_evaluation_file_holds_out_its_end(tmp_path):
    write_nano(tmp_path / "a.bin", range(100))
    write_nano(tmp_path / "b.bin", range(100, 103))
    data = tokens.open_tokens(tmp_path, 200, 8)
    assert np.concatenate(data.shards["train"]).tolist() == list(range(94))
    assert np.concatenate(data.shards["eval"]).tolist() == list(range(94, 103))


@given(st.lists(st.integers(1, 40), min_size=1, max_size=6), st.integers(1, 20))
def test_a_split_keeps_every_token_in_order(sizes, context):
    ends = np.cumsum(sizes)
    shards = [np.arange(end - size, end) for size, end in zip(sizes, ends, strict=True)]
    train, evaluation = tokens.split_tail(shards, context)
    assert np.concatenate([*train, *evaluation]).tolist() == list(range(ends[-1]))
    assert sum(map(len, evaluation)) == min(ends[-1], max(int(0.05 * ends[-1]), context + 1))


@pytest.fixture
def counting():
    """Return two training arrays whose tokens are their positions, so that a window shows its origin."""
    return TokenData([np.arange(30, dtype=np.uint16), np.arange(100, 140, dtype=np.uint16)], [np.arange(9)], 200)


def test_a_window_is_contiguous_and_targets_are_shifted_by_one(counting):
    inputs, targets = counting.sample(3, "train", 64, 8, seed=0)
    assert inputs.shape == targets.shape == (64, 8)
    assert inputs.dtype == targets.dtype == torch.int64
    assert inputs.is_contiguous()
    assert targets.is_contiguous()
    assert torch.equal(inputs + 1, targets)
    assert torch.equal(inputs - inputs[:, :1], torch.arange(8).expand(64, 8))


def test_every_window_is_sampled_and_none_spans_two_files(counting):
    starts = {int(x) for step in range(60) for x in counting.sample(step, "train", 64, 8, seed=0)[0][:, 0]}
    assert starts == set(range(22)) | set(range(100, 132))


def test_a_sample_is_a_function_of_its_arguments(counting):
    base = counting.sample(3, "train", 16, 8, seed=0)[0]
    assert torch.equal(base, counting.sample(3, "train", 16, 8, seed=0)[0])
    assert not torch.equal(base, counting.sample(4, "train", 16, 8, seed=0)[0])
    assert not torch.equal(base, counting.sample(3, "train", 16, 8, seed=1)[0])
    assert not torch.equal(base, counting.sample(3, "train", 16, 8, seed=-1)[0])


def test_an_unknown_split_is_refused(counting):
    assert "train and eval" in refusal(counting.sample, 0, "test", 1, 8, 0)
