"""A model's folder as downloaded: weights, a tokenizer of characters, a chat template, an image processor."""

from __future__ import annotations

import sys
from io import BytesIO
from pathlib import Path

from PIL import Image as Pictures
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import GotOcr2ImageProcessor, PreTrainedTokenizerFast, Qwen2VLImageProcessor

from tests.unit.nova import tiny

FIRST_CHARACTER = 3  # lower ids are padding, begin and unknown
TEMPLATE = """\
{%- for message in messages %}{{ message.role }}: {% if message.content is string %}{{ message.content }}\
{%- else %}{% for part in message.content %}{% if part.type == 'image' %}<image>{% else %}{{ part.text }}{% endif %}\
{%- endfor %}{% endif %};{% endfor %}assistant: """


def write(folder: Path, family: str = "qwen2_5_vl", *, side: int = 64, **size: int) -> None:
    """Write a small random model to a folder; images have at most `side` squared pixels."""
    tiny.model(family, **size).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    processor(family, side).save_pretrained(folder)


def tokenizer() -> PreTrainedTokenizerFast:
    """Make a tokenizer whose tokens are the printable characters; two more mark where tiles begin and end."""
    letters = [chr(code) for code in range(32, 127)]
    vocabulary = {"<pad>": 0, "<bos>": 1, "<unk>": 2, "<image>": tiny.IMAGE, "<img>": tiny.START, "</img>": tiny.END}
    vocabulary |= {letter: FIRST_CHARACTER + i for i, letter in enumerate(letters)}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    made.decoder = decoders.Fuse()
    marks = ["<image>", "<img>", "</img>"]
    fast = PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>", additional_special_tokens=marks)
    fast.chat_template = TEMPLATE
    return fast


def processor(family: str, side: int) -> GotOcr2ImageProcessor | Qwen2VLImageProcessor:
    """Make the family's image processor, for small images."""
    if family == "internvl":
        tile = {"height": 32, "width": 32}
        return GotOcr2ImageProcessor(size=tile, crop_to_patches=True, min_patches=1, max_patches=2)
    pixels = {"shortest_edge": 32 * 32, "longest_edge": side * side}
    return Qwen2VLImageProcessor(patch_size=8, merge_size=2, temporal_patch_size=2, size=pixels)


def png(red: int = 0, width: int = 64, height: int = 48) -> bytes:
    """Return the bytes of a picture."""
    file = BytesIO()
    Pictures.new("RGB", (width, height), (red, 2 * red % 256, 255 - red)).save(file, "PNG")
    return file.getvalue()


if __name__ == "__main__":
    write(Path(sys.argv[1]), side=256, width=4, encoder_layers=12)
