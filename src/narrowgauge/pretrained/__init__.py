"""Loads the folder of a Hugging Face model directly in the form in which a recipe trains it.

folder.py                what a folder holds: config.json and the headers of its .safetensors files
hub.py                   a model on the Hugging Face Hub as a folder in its cache
hub_headers.py           its weights' headers alone, for forecasts
transformers_model.py    the class of transformers and its configuration
match.py                 which stored tensor is which parameter, without reading any
load.py                  reads the tensors, piece by piece, into BF16 with remainders or into FP32
lora_options.py          the options of LoRA, or the folder of an adapter
adapters.py              adds adapters with PEFT, on the meta device, and gives them values
fingerprint.py           whether a folder is still the one that a run started from
model_factory.py         all of it as the model of a Task
"""

from narrowgauge.pretrained.folder import PretrainedFolder, open_folder
from narrowgauge.pretrained.load import load_model
from narrowgauge.pretrained.model_factory import PretrainedModel

__all__ = ["PretrainedFolder", "PretrainedModel", "load_model", "open_folder"]
