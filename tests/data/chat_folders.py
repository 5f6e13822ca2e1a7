"""Makes folders with small tokenizers that have the chat templates of common models, for tests of fine-tuning data."""

import functools
import json

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

LLAMA3 = """{{- bos_token }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- endif %}
"""
CHATML = """{%- if tools %}
    {{- '<|im_start|>system\n' + tools | tojson + '<|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{%- endif %}
"""
GEMMA = """{{ bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {{- raise_exception('System role not supported') }}
{%- endif %}
{%- for message in messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
    {%- endif %}
    {%- set role = 'model' if message['role'] == 'assistant' else message['role'] %}
    {{- '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<start_of_turn>model\n' }}
{%- endif %}
"""
MARKED = """{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\n' }}
    {%- if message.role == 'assistant' %}
        {%- generation %}{{- message.content + '<|im_end|>' }}{%- endgeneration %}
    {%- else %}
        {{- message.content + '<|im_end|>' }}
    {%- endif %}
    {{- '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{%- endif %}
"""
THINKING = """{#- As Qwen3: only the last turn has a block for thoughts. #}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\n' }}
    {%- if message.role == 'assistant' and loop.last %}
        {{- '<think>\n\n</think>\n\n' }}
    {%- endif %}
    {{- message.content + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{%- endif %}
"""
CLOSING = """{#- As Phi-3: a conversation ends with end-of-text unless it is to be continued. #}
{%- for message in messages %}
    {{- '<|' + message.role + '|>\n' + message.content + '<|end|>\n' }}
{%- endfor %}
{{- '<|assistant|>\n' if add_generation_prompt else eos_token }}
"""
FORCED = """{#- As DeepSeek R1: the prompt starts to think, and turns have no thoughts. #}
{%- for message in messages %}
    {{- '<|' + message.role + '|>' + message.content + '<|end|>' }}
{%- endfor %}
{{- '<|assistant|><think>\n' if add_generation_prompt }}
"""
DATED = """{{- 'Today is ' + strftime_now('%d %b %Y') + '\n' }}""" + CHATML
ENDLESS = """{%- for message in messages %}
    {{- message.role + ': ' + message.content + '\n' }}
{%- endfor %}
{{- 'assistant: ' if add_generation_prompt }}
"""
IMAGES = """{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\n' }}
    {%- for part in message.content %}{{- part.words }}{%- endfor %}
    {{- '<|im_end|>\n' }}
{%- endfor %}
{{- '<|im_start|>assistant\n' if add_generation_prompt }}
"""
SPECIAL = (
    "<s>", "</s>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|im_start|>", "<|im_end|>",
    "<start_of_turn>", "<end_of_turn>", "<|user|>", "<|assistant|>", "<|end|>",
)  # fmt: skip
TEXT = ["Hi there, how are you? I am fine, thanks. The answer is four.\n\nassistant user system model 2 + 2 = 4"] * 3


@functools.cache
def _train():
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        TEXT, trainers.BpeTrainer(vocab_size=360, special_tokens=list(SPECIAL), initial_alphabet=alphabet)
    )
    return tokenizer.to_str()


def make_folder(folder, template=None, adds_bos=False, **settings):
    """Write a tokenizer into a folder.

    Args:
        folder: The folder, which is made.
        template: The chat template, or None.
        adds_bos: Whether the tokenizer puts <s> before each text.
        settings: More fields of tokenizer_config.json; None removes a field.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer.from_str(_train())
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    if adds_bos:
        tokenizer.post_processor = processors.Sequence(
            [
                processors.ByteLevel(trim_offsets=True),
                processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]),
            ]
        )
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "chat_template": template,
        **settings,
    }
    config = {name: value for name, value in config.items() if value is not None}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def write_lines(path, records):
    """Write records as JSON lines."""
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def chat(*contents, system=None):
    """Make a record of messages that alternate between user and assistant."""
    turns = [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)]
    return {"messages": [{"role": "system", "content": system}] * (system is not None) + turns}
