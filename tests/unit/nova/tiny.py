"""Small random vision-language models of the three families, and prompts for them."""

from __future__ import annotations

import random

import torch
from transformers import (
    Glm4vConfig,
    Glm4vForConditionalGeneration,
    InternVLConfig,
    InternVLForConditionalGeneration,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)

from thunderagent_nova.messages import Image, Prompt

FAMILIES = ("qwen2_5_vl", "qwen3_vl", "glm4v", "internvl")
IMAGE, START, END = 100, 101, 102
_PATCH = 8
_ROPE = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0}
_TEXT = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "tie_word_embeddings": False,
}
_TOKENS = {"image_token_id": IMAGE, "vision_start_token_id": START, "vision_end_token_id": END, "video_token_id": 103}


def model(family: str, *, encoder_layers: int = 5, seed: int = 0, width: int = 1) -> torch.nn.Module:
    """Draw a random model. `width` makes its encoder and text wider."""
    torch.manual_seed(seed)
    made = _MAKERS[family](encoder_layers, width).float().eval()
    generator = torch.Generator().manual_seed(seed)
    for parameter in made.parameters():  # some would be zero, and all tokens equal
        parameter.data = torch.randn(parameter.shape, generator=generator) * (0.3 if parameter.ndim == 1 else 0.25)
    made.get_input_embeddings().weight.data *= 8  # otherwise each answer converges to one token
    return made


def _text(width: int) -> dict[str, object]:
    wide = {key: _TEXT[key] * width for key in ("hidden_size", "intermediate_size", "num_attention_heads")}
    return {**_TEXT, **wide, "num_key_value_heads": 2 * width}


def _qwen2_5(layers: int, width: int) -> torch.nn.Module:
    vision = {
        "depth": layers, "hidden_size": 32 * width, "intermediate_size": 48 * width, "num_heads": 2 * width,
        "patch_size": _PATCH, "spatial_merge_size": 2, "temporal_patch_size": 2, "window_size": 32,
        "fullatt_block_indexes": [1, 3], "out_hidden_size": 64 * width,
    }  # fmt: skip
    text = {**_text(width), "rope_parameters": _ROPE}
    return Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(vision_config=vision, text_config=text, **_TOKENS))


def _qwen3(layers: int, width: int) -> torch.nn.Module:
    vision = {
        "depth": layers, "hidden_size": 32 * width, "intermediate_size": 48 * width, "num_heads": 2 * width,
        "patch_size": _PATCH, "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": 64 * width,
        "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 2],
    }  # fmt: skip
    text = {**_text(width), "rope_parameters": {**_ROPE, "mrope_interleaved": True}}
    return Qwen3VLForConditionalGeneration(Qwen3VLConfig(vision_config=vision, text_config=text, **_TOKENS))


def _glm4v(layers: int, width: int) -> torch.nn.Module:
    vision = {
        "depth": layers, "hidden_size": 32 * width, "intermediate_size": 48 * width, "num_heads": 2 * width,
        "patch_size": _PATCH, "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": 64 * width,
        "image_size": 64,
    }  # fmt: skip
    text = {**_text(width), "rope_parameters": {**_ROPE, "mrope_section": [2, 3, 3], "partial_rotary_factor": 1.0}}
    return Glm4vForConditionalGeneration(Glm4vConfig(vision_config=vision, text_config=text, **_GLM_TOKENS))


_GLM_TOKENS = {"image_token_id": IMAGE, "image_start_token_id": START, "image_end_token_id": END, "video_token_id": 103}


def _internvl(layers: int, width: int) -> torch.nn.Module:
    vision = {
        "num_hidden_layers": layers, "hidden_size": 32 * width, "intermediate_size": 48 * width,
        "num_attention_heads": 2 * width, "patch_size": [_PATCH, _PATCH], "image_size": [32, 32],
    }  # fmt: skip
    text = {**_text(width), "model_type": "qwen2"}
    config = InternVLConfig(vision_config=vision, text_config=text, image_token_id=IMAGE, downsample_ratio=0.5)
    return InternVLForConditionalGeneration(config)


_MAKERS = {"qwen2_5_vl": _qwen2_5, "qwen3_vl": _qwen3, "glm4v": _glm4v, "internvl": _internvl}


def image(family: str, seed: int, *, rows: int = 4, columns: int = 6) -> Image:
    """Draw one image in the form of the family's image processor."""
    generator = torch.Generator().manual_seed(seed)
    if family == "internvl":
        return Image(torch.randn((1 + seed % 2, 3, 32, 32), generator=generator), None, f"image-{seed}")
    pixels = torch.randn((rows * columns, 3 * 2 * _PATCH * _PATCH), generator=generator)
    return Image(pixels, torch.tensor([1, rows, columns]), f"image-{seed}")


def image_tokens(family: str, drawn: Image) -> int:
    """Return the number of prompt tokens of an image."""
    if family == "internvl":
        return len(drawn.pixels) * 4
    return len(drawn.pixels) // 4


def prompt(family: str, seed: int, *, images: int = 1, words: int = 9) -> Prompt:
    """Draw a random prompt: words, images between their marks, words."""
    chance = random.Random(seed)
    drawn = tuple(image(family, 10 * seed + index) for index in range(images))
    ids: list[int] = [chance.randrange(2, 90) for _ in range(words)]
    for each in drawn:
        ids += [START, *[IMAGE] * image_tokens(family, each), END, chance.randrange(2, 90)]
    return Prompt(tuple(ids), drawn)


def generate(made: torch.nn.Module, asked: Prompt, tokens: int) -> list[int]:
    """Return the greedy output of `transformers` itself."""
    ids = torch.tensor([asked.token_ids])
    extra: dict[str, object] = {}
    if asked.images:
        extra["pixel_values"] = torch.cat([each.pixels for each in asked.images])
        if asked.images[0].grid is not None:
            extra["image_grid_thw"] = torch.stack([each.grid for each in asked.images])
            extra["mm_token_type_ids"] = (ids == IMAGE).int()
    made.set_attn_implementation("sdpa")
    if hasattr(made.model, "rope_deltas"):
        made.model.rope_deltas = None
    with torch.inference_mode():
        out = made.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False, **extra
        )
    return out[0, ids.shape[1] :].tolist()
