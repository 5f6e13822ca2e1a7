"""Random batches for models of transformers, by what a model is for: which tensors it takes, and its labels.

Sequences have no padding, and all tokens but the padding token are equally likely. A model returns its own loss.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from narrowgauge.errors import UsageError

CAUSAL, MASKED, SEQ2SEQ = "causal LM", "masked LM", "seq2seq LM"
SEQUENCES, TOKENS, IMAGES = "sequence classification", "token classification", "image classification"
SPEECH = "speech recognition"
MAPPINGS = {
    SEQ2SEQ: "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    CAUSAL: "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    MASKED: "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    SEQUENCES: "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
    TOKENS: "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES",
    IMAGES: "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
    SPEECH: "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
}
"""The tables of transformers that list the classes of each purpose; BART is in several, and the first one counts."""
MASKED_SHARE = 0.15
"""The share of tokens that a masked language model predicts."""
IMAGE_SIZE = 224
"""Height and width for a model that takes images of any size."""
SPECTROGRAMS = ("whisper",)
"""The speech models whose input is known: a spectrogram of twice as many frames as the encoder has positions."""


@dataclass(frozen=True)
class Inputs:
    """How to make batches for a model."""

    make: Callable[[int, int], dict[str, Tensor]]
    """Makes a batch from its number of rows and a seed."""
    unit: str
    items_per_row: int
    is_causal: bool


def list_classes() -> dict[str, dict[str, str]]:
    """Return the classes whose inputs are known, by purpose: names, and the type of model that each is for."""
    from transformers.models.auto import modeling_auto

    found: dict[str, dict[str, str]] = {}
    for purpose, table in MAPPINGS.items():
        for model_type, names in getattr(modeling_auto, table, {}).items():
            if purpose == SPEECH and model_type not in SPECTROGRAMS:
                continue
            for name in [names] if isinstance(names, str) else names:
                found.setdefault(purpose, {})[name] = model_type
    return found


def find_purpose(cls: type[Any], model_type: str, option: str) -> str:
    """Return what a class is for, one of the keys of ``MAPPINGS``.

    Raises:
        UsageError: Its inputs are not known.
    """
    classes = list_classes()
    for purpose, names in classes.items():
        if cls.__name__ in names:
            return purpose
    related = [name for names in classes.values() for name, its_type in names.items() if its_type == model_type]
    hint = f"use {', '.join(dict.fromkeys(related))}" if related else f"known are models for {', '.join(MAPPINGS)}"
    raise UsageError(f"{option}: it is not known which inputs {cls.__name__} takes; {hint}, or write a task")


def make_inputs(purpose: str, config: Any, context: int | None, small: bool, option: str) -> Inputs:
    """Return how to make batches.

    Args:
        purpose: What the model is for.
        config: Its configuration.
        context: Tokens of a sequence. None: as many as the model takes, at most 2048.
        small: Whether to take at most 128 tokens by default, for a CPU.
        option: What the user wrote, for error messages.

    Raises:
        UsageError: The model does not take such sequences, or its configuration lacks a size.
    """
    if purpose == IMAGES:
        if context is not None:
            raise UsageError(f"--context {context}: {option} takes images, not tokens; leave it out")
        return Inputs(lambda rows, seed: _make_images(config, rows, seed), "image", 1, False)
    text = config.get_text_config()
    vocab, limit = getattr(text, "vocab_size", None), _get_limit(text)
    if not isinstance(vocab, int) or vocab < 2:
        raise UsageError(f"{option}: its configuration has no usable vocab_size ({vocab!r}); set it with --config")
    if context is None:
        most = min(128 if small else 2048, limit or 2048)
        context = 1 << max(most.bit_length() - 1, 0)  # RoBERTa has 514 positions, two of them for padding
    if context < 2 or (limit is not None and context > limit):
        expected = "at least 2" if limit is None else f"2 to {limit} (max_position_embeddings; see --config)"
        raise UsageError(f"--context {context}: {option} takes {expected} tokens")
    length = context

    def make(rows: int, seed: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        tokens = draw_tokens((rows, length), vocab, getattr(text, "pad_token_id", None), generator)
        if purpose == SPEECH:
            frames = torch.randn(rows, config.num_mel_bins, 2 * config.max_source_positions, generator=generator)
            return {"input_features": frames, "labels": tokens}
        return {"input_ids": tokens, "labels": _make_labels(purpose, config, tokens, vocab, generator)}

    return Inputs(make, "token", (2 if purpose == SEQ2SEQ else 1) * length, purpose == CAUSAL)


def draw_tokens(shape: tuple[int, ...], vocab: int, padding: Any, generator: torch.Generator) -> Tensor:
    """Return random tokens, without the padding token."""
    if not isinstance(padding, int) or not 0 <= padding < vocab:
        return torch.randint(0, vocab, shape, generator=generator)
    tokens = torch.randint(0, vocab - 1, shape, generator=generator)
    return tokens + (tokens >= padding)


def _get_limit(text: Any) -> int | None:
    """Return the largest number of tokens; None: unknown or unlimited."""
    limit = getattr(text, "max_position_embeddings", getattr(text, "max_target_positions", None))
    return limit if isinstance(limit, int) and limit > 0 else None


def _make_labels(purpose: str, config: Any, tokens: Tensor, vocab: int, generator: torch.Generator) -> Tensor:
    if purpose == CAUSAL:  # the model shifts them
        return tokens.clone()
    if purpose == MASKED:
        chosen = torch.rand(tokens.shape, generator=generator) < MASKED_SHARE
        chosen[:, 0] = True
        return tokens.where(chosen, torch.tensor(-100))
    if purpose == SEQ2SEQ:
        return draw_tokens(tuple(tokens.shape), vocab, getattr(config, "pad_token_id", None), generator)
    if purpose == TOKENS:
        return torch.randint(0, _get_labels(config), tokens.shape, generator=generator)
    return _make_class_labels(config, len(tokens), generator)


def _make_images(config: Any, rows: int, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    vision = getattr(config, "vision_config", None) or config
    size = getattr(vision, "image_size", None) or IMAGE_SIZE
    height, width = (size, size) if isinstance(size, int) else tuple(size)[-2:]
    pixels = torch.randn(rows, getattr(vision, "num_channels", 3), height, width, generator=generator)
    return {"pixel_values": pixels, "labels": _make_class_labels(config, rows, generator)}


def _make_class_labels(config: Any, rows: int, generator: torch.Generator) -> Tensor:
    """Return labels of rows: classes, several classes at once, or numbers, as the configuration says."""
    labels, problem = _get_labels(config), getattr(config, "problem_type", None)
    if problem == "multi_label_classification":
        return torch.randint(0, 2, (rows, labels), generator=generator).float()
    if problem == "regression" or labels == 1:
        return torch.randn((rows, labels) if labels > 1 else (rows,), generator=generator)
    return torch.randint(0, labels, (rows,), generator=generator)


def _get_labels(config: Any) -> int:
    return int(getattr(config, "num_labels", None) or 2)
