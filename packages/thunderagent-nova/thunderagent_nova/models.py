"""Vision-language models of `transformers`, taken apart into encode, prefill and one step of decoding.

Theory of operation
-------------------
The three families differ in how an image is laid out and where its features go. `Family` says it: what the encoder
wants, which positions a prompt has, which layers the encoder runs. The rest is one path. Attention is ours ("nova",
registered with `transformers`): heads that share keys are folded into the query rows, so keys are never repeated, and
masks may differ by row.

Everything here is called by one thread for each stage. Weights are only read. What runs between two layers of the
encoder (another stream, weights that come and go) hangs on `before_layer` and `after_layer`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Any, Final

import torch
import transformers
from torch import nn
from torch.nn import functional
from transformers import AttentionInterface, AutoModelForImageTextToText

from thunderagent_nova.kv import Rows, Run, SlotCache
from thunderagent_nova.messages import Image, Prompt

FIRST_VERSION: Final = (5, 17)
LAST_VERSION: Final = (5, 24)
"""Of `transformers`, whose models are called in parts here: the versions that this package was tested with."""

_ATTENTION = "nova"


def _attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **_kwargs: object,
) -> tuple[torch.Tensor, None]:
    """Attend with [batch, heads, tokens, size] in and [batch, tokens, heads, size] out."""
    batch, heads, tokens, size = query.shape
    groups = heads // key.shape[1]
    if attention_mask is None:
        causal = bool(getattr(module, "is_causal", False) if is_causal is None else is_causal) and tokens > 1
        out = functional.scaled_dot_product_attention(
            query, key, value, is_causal=causal, scale=scaling, enable_gqa=groups > 1
        )
        return out.transpose(1, 2).contiguous(), None
    folded = query.reshape(batch, key.shape[1], groups * tokens, size)
    mask = attention_mask
    if tokens > 1:
        mask = mask[:, :, None].expand(-1, -1, groups, -1, -1).reshape(mask.shape[0], 1, groups * tokens, -1)
    else:
        mask = mask.expand(-1, -1, groups, -1)
    out = functional.scaled_dot_product_attention(folded, key, value, attn_mask=mask, scale=scaling)
    return out.reshape(batch, heads, tokens, size).transpose(1, 2).contiguous(), None


AttentionInterface.register(_ATTENTION, _attend)


@dataclass(frozen=True, slots=True)
class Encoded:
    """What the encoder made of one image: [tokens, hidden], and one such for each DeepStack layer."""

    features: torch.Tensor
    deep: tuple[torch.Tensor, ...] = ()


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the tokens of a prompt stand: [3 or 1, 1, tokens], on the model's device."""

    positions: torch.Tensor
    offset: int  # position of a generated token minus its index
    is_image: torch.Tensor  # [tokens], on the host


def _patch_projection(convolution: nn.Conv3d) -> nn.Linear:
    """Return the convolution over whole patches as the matrix product that it is: cuDNN is slow at it in bf16."""
    weight = convolution.weight.data.flatten(1)
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=convolution.bias is not None, device="meta")
    linear.weight, linear.bias = nn.Parameter(weight), convolution.bias
    linear.register_forward_pre_hook(lambda _linear, args: (args[0].flatten(1),))
    return linear


class _GridFamily:
    """Qwen2.5-VL, Qwen3-VL, GLM-4V: patches in a grid, positions in three dimensions."""

    axes = 3

    def __init__(self, model: Any) -> None:
        self._model = model
        self.image_token_id: int = model.config.image_token_id
        visual = model.model.visual
        self.layers: nn.ModuleList = visual.blocks
        if isinstance(visual.patch_embed.proj, nn.Conv3d):
            visual.patch_embed.proj = _patch_projection(visual.patch_embed.proj)
        # Lengths on the host, or each layer waits for the card. GLM-4V also computes with them.
        self._lengths_on_host = model.config.model_type.startswith("qwen")

    def encode(self, images: Sequence[Image], device: torch.device) -> list[Encoded]:
        grids = torch.stack([torch.as_tensor(image.grid) for image in images])
        pixels = torch.cat([image.pixels for image in images]).to(device, non_blocking=True)
        extra = {}
        if self._lengths_on_host:
            frames = torch.repeat_interleave(grids[:, 1] * grids[:, 2], grids[:, 0])
            extra["cu_seqlens"] = functional.pad(frames.cumsum(0, dtype=torch.int32), (1, 0))
        out = self._model.model.get_image_features(pixels, grids.to(device), return_dict=True, **extra)
        sizes = [len(part) for part in out.pooler_output]
        layers = getattr(out, "deepstack_features", None) or ()  # by image since 5.18
        deep = [torch.split(layer, sizes) if isinstance(layer, torch.Tensor) else layer for layer in layers]
        return [Encoded(part, tuple(layer[i] for layer in deep)) for i, part in enumerate(out.pooler_output)]

    def positions(self, prompt: Prompt, ids: torch.Tensor, is_image: torch.Tensor) -> tuple[torch.Tensor, int]:
        """Let each image stand as one place after the other: two of them need no token between them."""
        merge = self._model.config.vision_config.spatial_merge_size
        grids = iter([torch.as_tensor(image.grid) for image in prompt.images])
        parts: list[torch.Tensor] = []
        index = stand = 0
        while index < len(ids):
            if is_image[index]:
                grid = next(grids)
                parts.append(self._model.model.get_vision_position_ids(stand, grid, 1, merge, device=ids.device))
                stand += int(max(grid[1], grid[2])) // merge
            else:
                words = int(is_image[index:].int().argmax()) or len(ids) - index
                parts.append(torch.arange(stand, stand + words).expand(3, -1))
                stand += words
            index += parts[-1].shape[1]
        return torch.cat(parts, dim=1)[:, None], stand - len(ids)


class _TileFamily:
    """InternVL: tiles of one size, positions in one dimension."""

    axes = 1

    def __init__(self, model: Any) -> None:
        self._model = model
        self.image_token_id: int = model.config.image_token_id
        self.layers: nn.ModuleList = model.model.vision_tower.encoder.layer

    def encode(self, images: Sequence[Image], device: torch.device) -> list[Encoded]:
        pixels = torch.cat([image.pixels for image in images]).to(device, non_blocking=True)
        tiles = self._model.model.get_image_features(pixels, return_dict=True).pooler_output
        parts = torch.split(tiles, [len(image.pixels) for image in images])
        return [Encoded(part.flatten(0, 1)) for part in parts]

    def positions(self, prompt: Prompt, ids: torch.Tensor, is_image: torch.Tensor) -> tuple[torch.Tensor, int]:  # noqa: ARG002
        return torch.arange(len(ids)).view(1, 1, -1), 0


_FAMILIES: dict[str, Callable[[Any], _GridFamily | _TileFamily]] = {
    "qwen2_5_vl": _GridFamily,
    "qwen3_vl": _GridFamily,
    "glm4v": _GridFamily,
    "internvl": _TileFamily,
}


class UnsupportedModelError(ValueError):
    """The model is of no family that is known here."""


class UnsupportedVersionError(ValueError):
    """The version of `transformers` is none that this package was tested with."""


def check_version(version: str = transformers.__version__) -> None:
    """Raise UnsupportedVersionError unless this package was tested with that version of `transformers`."""
    major, minor, *_ = version.split(".")
    if not FIRST_VERSION <= (int(major), int(minor)) <= LAST_VERSION:
        first, last = (".".join(map(str, each)) for each in (FIRST_VERSION, LAST_VERSION))
        raise UnsupportedVersionError(
            f"transformers {version}: Nova calls parts of its models and was tested with {first} to {last}; "
            f"pip install 'transformers>={first},<{LAST_VERSION[0]}.{LAST_VERSION[1] + 1}'"
        )


class Vlm:
    """A model in three stages. Its weights stay where they are."""

    def __init__(self, model: Any) -> None:
        family = _FAMILIES.get(model.config.model_type)
        if family is None:
            raise UnsupportedModelError(f"{model.config.model_type} is none of {', '.join(_FAMILIES)}")
        model.set_attn_implementation(_ATTENTION)
        model.eval().requires_grad_(requires_grad=False)
        self.family = family(model)
        self._language = model.model.language_model
        named = signature(self._language.forward).parameters
        self._cache_argument = "cache" if "cache" in named else "past_key_values"  # until 5.23
        self._head = model.lm_head
        self._embed = model.get_input_embeddings()
        self.model = model
        self.device: torch.device = self._embed.weight.device
        self.dtype: torch.dtype = self._embed.weight.dtype
        text = model.config.get_text_config()
        self.text_layers: int = text.num_hidden_layers
        self.key_heads: int = text.num_key_value_heads
        self.head_size: int = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        self.before_layer: Callable[[int], None] | None = None
        self.after_layer: Callable[[int], None] | None = None
        for index, layer in enumerate(self.encoder_layers):
            layer.register_forward_pre_hook(lambda _layer, _args, index=index: self._before(index))
            layer.register_forward_hook(lambda _layer, _args, _out, index=index: self._after(index))

    @classmethod
    def load(cls, path: str, *, device: torch.device, dtype: torch.dtype) -> Vlm:
        """Load a model from a folder. Raises UnsupportedVersionError, UnsupportedModelError, OSError, ValueError."""
        check_version()
        model = AutoModelForImageTextToText.from_pretrained(path, dtype=dtype, local_files_only=True)
        return cls(model.to(device))

    @property
    def encoder_layers(self) -> nn.ModuleList:
        """The layers of the encoder, in order."""
        return self.family.layers

    def cache(self, slots: int, slot_tokens: int) -> SlotCache:
        """Make a KV cache that fits this model."""
        shape = (self.text_layers, slots, self.key_heads, slot_tokens, self.head_size)
        return SlotCache(*shape, dtype=self.dtype, device=self.device)

    def layout(self, prompt: Prompt) -> Layout:
        """Say where the tokens of a prompt stand. Costs a few milliseconds on the host."""
        ids = torch.tensor(prompt.token_ids)
        is_image = ids == self.family.image_token_id
        positions, offset = self.family.positions(prompt, ids, is_image)
        return Layout(positions.to(self.device), offset, is_image)

    def encode(self, images: Sequence[Image]) -> list[Encoded]:
        """Encode images in one pass."""
        return self.family.encode(images, self.device)

    def prefill(
        self, prompt: Prompt, layout: Layout, encoded: Sequence[Encoded], cache: SlotCache, slot: int, span: range
    ) -> torch.Tensor | None:
        """Prefill the tokens of a span into a slot. At the prompt's end, return the first token, [1]."""
        begin, end = span.start, span.stop
        ids = torch.tensor(prompt.token_ids[begin:end], device=self.device)
        embeds = self._embed(ids)
        extra = self._put_images(embeds, layout.is_image, encoded, begin, end)
        hidden = self._forward(
            embeds[None], layout.positions[:, :, begin:end], cache.run(slot, begin, end),
            cache.mask_of_run(begin, end, self.dtype), extra,
        )  # fmt: skip
        if end < len(prompt.token_ids):
            return None
        return self._head(hidden[:, -1]).argmax(-1)

    def step(self, ids: torch.Tensor, positions: torch.Tensor, stands: torch.Tensor, cache: SlotCache) -> torch.Tensor:
        """Decode one token for each of the first rows: ids, indices and positions in, [rows] each; ids out."""
        rows = len(ids)
        where = stands.view(1, rows, 1).expand(self.family.axes, rows, 1)
        hidden = self._forward(
            self._embed(ids)[:, None], where, cache.rows(rows, positions),
            cache.mask_of_rows(positions, self.dtype), {},
        )  # fmt: skip
        return self._head(hidden[:, -1]).argmax(-1)

    def _forward(
        self, embeds: torch.Tensor, where: torch.Tensor, view: Run | Rows, mask: torch.Tensor | None,
        extra: dict[str, Any],
    ) -> torch.Tensor:  # fmt: skip
        out = self._language(
            inputs_embeds=embeds,
            position_ids=where if self.family.axes == 3 else where[0],
            attention_mask=mask,
            use_cache=True,
            **{self._cache_argument: view},
            **extra,
        )
        return out.last_hidden_state

    def _put_images(
        self, embeds: torch.Tensor, is_image: torch.Tensor, encoded: Sequence[Encoded], begin: int, end: int
    ) -> dict[str, Any]:
        here = is_image[begin:end]
        not_here = int(is_image.sum()) - sum(len(image.features) for image in encoded)  # in a prefix that was kept
        first, count = int(is_image[:begin].sum()) - not_here, int(here.sum())
        if not count:
            return {}
        where = here.nonzero()[:, 0].to(self.device, non_blocking=True)
        features = torch.cat([image.features for image in encoded])[first : first + count]
        embeds[where] = features.to(embeds.dtype)
        if not encoded[0].deep:
            return {}
        deep = [
            torch.cat([image.deep[i] for image in encoded])[first : first + count] for i in range(len(encoded[0].deep))
        ]
        return {"visual_pos_masks": here[None].to(self.device), "deepstack_visual_embeds": deep}

    def _before(self, index: int) -> None:
        if self.before_layer is not None:
            self.before_layer(index)

    def _after(self, index: int) -> None:
        if self.after_layer is not None:
            self.after_layer(index)
