"""`thunderagent nova sample`: a small random model in a folder, to try Nova with. What it says means nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLImageProcessor,
)

_PATCH: Final = 14
_IMAGE, _VIDEO, _BEGIN, _END = 100, 101, 102, 103
_UNKNOWN: Final = "<unk>"
_SPECIAL: Final = {"<pad>": 0, _UNKNOWN: 1, "<image>": _IMAGE, "<video>": _VIDEO, "<vision>": _BEGIN, "</vision>": _END}
_TEMPLATE: Final = """\
{%- for message in messages %}{{ message.role }}: {% if message.content is string %}{{ message.content }}\
{%- else %}{% for part in message.content %}{% if part.type == 'image' %}<vision><image></vision>\
{%- else %}{{ part.text }}{% endif %}{%- endfor %}{% endif %};{% endfor %}assistant: """


def write(folder: Path) -> None:
    """Write a model of the family of Qwen2.5-VL with its tokenizer of characters and its image processor: 4 MB."""
    torch.manual_seed(0)
    Qwen2_5_VLForConditionalGeneration(_config()).save_pretrained(folder)
    _tokenizer().save_pretrained(folder)
    pixels = {"shortest_edge": (2 * _PATCH) ** 2, "longest_edge": (16 * _PATCH) ** 2}
    Qwen2VLImageProcessor(patch_size=_PATCH, merge_size=2, temporal_patch_size=2, size=pixels).save_pretrained(folder)


def _config() -> Any:
    vision = {
        "depth": 4, "hidden_size": 64, "intermediate_size": 128, "num_heads": 4, "patch_size": _PATCH,
        "spatial_merge_size": 2, "temporal_patch_size": 2, "window_size": 112, "out_hidden_size": 128,
        "fullatt_block_indexes": [1, 3],
    }  # fmt: skip
    text = {
        "vocab_size": 128, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32768,
        "pad_token_id": 0, "bos_token_id": None, "eos_token_id": None, "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "mrope_section": [4, 6, 6], "rope_theta": 10000.0},
    }  # fmt: skip
    ids = {
        "image_token_id": _IMAGE, "video_token_id": _VIDEO,
        "vision_start_token_id": _BEGIN, "vision_end_token_id": _END,
    }  # fmt: skip
    return Qwen2_5_VLConfig(vision_config=vision, text_config=text, **ids)


def _tokenizer() -> PreTrainedTokenizerFast:
    """Return one whose tokens are the printable characters."""
    vocabulary = _SPECIAL | {chr(code): 2 + index for index, code in enumerate(range(32, 127))}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token=_UNKNOWN))
    made.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    made.decoder = decoders.Fuse()
    marks = [mark for mark in _SPECIAL if mark not in ("<pad>", _UNKNOWN)]
    fast = PreTrainedTokenizerFast(tokenizer_object=made, unk_token=_UNKNOWN, additional_special_tokens=marks)
    fast.chat_template = _TEMPLATE
    return fast
