"""From a chat to a prompt and back: the tokenizer, the chat template and the image processor of a model's folder.

A template puts one token where an image goes. It becomes as many as the encoder makes of that image.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import jinja2
import transformers
from PIL import Image as Pictures
from PIL import UnidentifiedImageError

from thunderagent_nova.chat import ApiError, Json
from thunderagent_nova.messages import Image, Prompt

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
"""Pillow knows more: some unpack all pixels before their number is known, or run other programs."""


class Codec:
    """Encodes and decodes for one model. Thread-safe."""

    def __init__(self, folder: Path, config: Any, *, most_pixels: int, most_tokens: int) -> None:
        """Load what a model's folder has; `config` is the model's. OSError or ValueError if something is missing.

        The limits are pixels per image, and tokens of a whole prompt: reading stops there, because a small file may
        hold many pixels.
        """
        self._tokenizer = transformers.AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
        self._processor = _image_processor(folder)
        self._most_pixels = most_pixels
        self._most_tokens = most_tokens
        self.image_token_id: int = config.image_token_id
        self._tile_tokens = _tile_tokens(config)
        self._around = tuple(
            [self._tokenizer.convert_tokens_to_ids(mark)] if self._tile_tokens else [] for mark in ("<img>", "</img>")
        )
        self.stop_ids = frozenset(_stop_ids(folder, self._tokenizer, config))

    def prompt(self, messages: Sequence[Json], tools: Sequence[Any] | None, images: Sequence[bytes]) -> Prompt:
        """Return the prompt of a chat; ApiError if the template or an image is refused. Some 10 ms per image."""
        try:
            text = self._tokenizer.apply_chat_template(
                list(messages), tools=list(tools) if tools else None, tokenize=False, add_generation_prompt=True
            )
        except (jinja2.TemplateError, ValueError, TypeError) as error:
            raise ApiError(f"The model's chat template refuses this: {error}", param="messages") from None
        token_ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        read: list[Image] = []
        room_tokens = self._most_tokens - len(token_ids)
        for image in images:
            read.append(self._read(image))
            room_tokens -= self._tokens_of(read[-1])
            if room_tokens < 0:
                raise ApiError(f"The prompt has more than {self._most_tokens} tokens.", param="messages")
        return Prompt(tuple(self._with_room(token_ids, read)), tuple(read))

    def text(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens, without special ones."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def _with_room(self, token_ids: Sequence[int], images: Sequence[Image]) -> list[int]:
        """Expand each image's placeholder to its tokens."""
        if token_ids.count(self.image_token_id) != len(images):
            raise ApiError("The chat template does not put each image in its place.", param="messages")
        rest, ids = iter(images), []
        begin, end = self._around
        for token_id in token_ids:
            if token_id == self.image_token_id:
                ids += [*begin, *[token_id] * self._tokens_of(next(rest)), *end]
            else:
                ids.append(token_id)
        return ids

    def _tokens_of(self, image: Image) -> int:
        if image.grid is None:
            return self._tile_tokens * len(image.pixels)
        patches = 1
        for length in image.grid:
            patches *= int(length)
        return patches // int(self._processor.merge_size) ** 2

    def _read(self, data: bytes) -> Image:
        try:
            with Pictures.open(BytesIO(data), formats=FORMATS) as picture:
                width, height = picture.size
                if width * height > self._most_pixels:
                    raise ApiError(f"An image of {width}x{height} is too large.", status=413, param="image_url")
                pixels = picture.convert("RGB")
            made = self._processor(images=[pixels], return_tensors="pt")  # refuses what is far longer than wide
        except (UnidentifiedImageError, OSError, ValueError, SyntaxError, Pictures.DecompressionBombError) as error:
            raise ApiError(f"An image cannot be read: {error}", param="image_url") from None
        grids = made.get("image_grid_thw")
        grid = None if grids is None else tuple(int(length) for length in grids[0])
        return Image(made["pixel_values"], grid, hashlib.sha256(data).hexdigest())


def _tile_tokens(config: Any) -> int:
    """Return how many tokens a tile becomes; 0 for a family that has grids."""
    ratio = getattr(config, "downsample_ratio", None)
    if ratio is None:
        return 0
    (height, width), (down, across) = config.vision_config.image_size, config.vision_config.patch_size
    return int((height // down) * (width // across) * ratio**2)


def _image_processor(folder: Path) -> Any:
    """Load the image processor by its class: the automatic way requires torchvision, which it does not need."""
    for name, key in (("preprocessor_config.json", ""), ("processor_config.json", "image_processor")):
        path = folder / name
        said = json.loads(path.read_text()) if path.exists() else {}
        said = said.get(key, {}) if key else said
        kind = getattr(transformers, str(said.get("image_processor_type", "")).removesuffix("Fast"), None)
        if kind is not None:
            return kind.from_pretrained(str(folder), local_files_only=True)
    raise ValueError(f"{folder} says no image processor that is known")


def _stop_ids(folder: Path, tokenizer: Any, config: Any) -> set[int]:
    """Return the tokens that end an answer: from the folder's generation config, the text model, and the tokenizer."""
    path = folder / "generation_config.json"
    said = [json.loads(path.read_text()).get("eos_token_id") if path.exists() else None]
    said += [getattr(config.get_text_config(), "eos_token_id", None), tokenizer.eos_token_id]
    ids: set[int] = set()
    for each in said:
        ids |= set(each) if isinstance(each, list) else set() if each is None else {each}
    return ids
