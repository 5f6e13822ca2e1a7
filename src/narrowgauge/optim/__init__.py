"""Optimizers with less memory: exact FP32 masters in 16 + 16 bits, 8-bit moments, one launch for all parameters."""

from narrowgauge.optim.adafactor import Adafactor
from narrowgauge.optim.adamw import AdamW
from narrowgauge.optim.convert_optimizer import convert_optimizer, plain_state
from narrowgauge.optim.lion import Lion
from narrowgauge.optim.masters import full_precision, load_full_precision, narrow, widen
from narrowgauge.optim.muon import Muon
from narrowgauge.optim.muon_groups import split_for_muon
from narrowgauge.optim.sgd import SGD

__all__ = [
    "SGD",
    "Adafactor",
    "AdamW",
    "Lion",
    "Muon",
    "convert_optimizer",
    "full_precision",
    "load_full_precision",
    "narrow",
    "plain_state",
    "split_for_muon",
    "widen",
]
