"""Chat templates in the style of published families, and a tokenizer for them."""

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from drawloom.components.data.hugging_face_tokenizer import HuggingFaceTokenizer

CHATML = """
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""

TOOLS = """
{%- if tools %}{{- '<|im_start|>system\\n' + (tools | tojson) + '<|im_end|>\\n' }}{%- endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + (message.content or '') }}
{%- for call in message.tool_calls or [] %}{{- '<tool_call>' + (call.function | tojson) + '</tool_call>' }}{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""

THINKING = """
{%- for message in messages %}
{%- set content = message.content %}
{%- if message.role == 'assistant' %}
{%- set answer = content.split('</think>')[-1].lstrip('\\n') %}
{%- set thought = content.split('</think>')[0].split('<think>')[-1].strip('\\n') if '</think>' in content else '' %}
{%- set content = '<think>\\n' + thought + '\\n</think>\\n\\n' + answer if loop.last else answer %}
{%- endif %}
{{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""

HEADERS = """
{{- bos_token }}
{%- for message in messages %}
{{- '<|start|>' + message.role + '<|end|>\\n\\n' + message.content | trim + '<|eot|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant<|end|>\\n\\n' }}{%- endif %}
"""

BRACKETS = """
{{- bos_token }}
{%- set system = messages[0].content if messages[0].role == 'system' else '' %}
{%- for message in messages %}
{%- if message.role == 'user' %}
{%- set first = system + '\\n\\n' if loop.last and system else '' %}
{{- '[INST] ' + first + message.content + ' [/INST]' }}
{%- elif message.role == 'assistant' %}{{- ' ' + message.content | trim + eos_token }}
{%- endif %}
{%- endfor %}
"""

ROLES = """
{%- for message in messages %}
{%- if message.role == 'assistant' %}{{- '<|assistant|>' }}{% generation %}{{- '\\n<plan></plan>' + message.content }}
{%- for call in message.tool_calls or [] %}{{- '<tool>' + call.function.name + '</tool>' }}{%- endfor %}
END{% endgeneration %}
{%- else %}{{- '<|' + message.role + '|>\\n' + message.content }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}
"""

UNENDED = ROLES.replace("END", "")
"""A template in the style of GLM: only the next turn's token ends an answer."""

CONTROL = [
    "<plan>",
    "</plan>",
    *(f"<|{role}|>" for role in ("system", "user", "assistant", "tool")),
    "<s>",
    "</s>",
    "<|im_start|>",
    "<|im_end|>",
    "<|start|>",
    "<|end|>",
    "<|eot|>",
    "[INST]",
    "[/INST]",
]


def tokenizer_folder(folder: Path, template: str | None = CHATML) -> Path:
    """Write a folder with a chat template and a byte-level tokenizer with control tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    text = ["user assistant system hello there\n\n\n good day"] * 20
    tokenizer.train_from_iterator(text, trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet))
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in CONTROL])
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config: dict[str, Any] = {"bos_token": "<s>", "eos_token": "</s>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), "utf-8")
    if template is not None:
        (folder / "chat_template.jinja").write_text(template, "utf-8")
    return folder


def open_tokenizer(folder: Path) -> HuggingFaceTokenizer:
    """Open the tokenizer of a folder."""
    tokenizer = HuggingFaceTokenizer(path=folder)
    tokenizer.open()
    return tokenizer


def say(*contents: str, system: str | None = None) -> list[dict[str, str]]:
    """Return a conversation in turns between a user and an assistant."""
    turns = [{"role": ("user", "assistant")[n % 2], "content": content} for n, content in enumerate(contents)]
    return turns if system is None else [{"role": "system", "content": system}, *turns]
