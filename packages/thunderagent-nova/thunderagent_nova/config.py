"""The options of `thunderagent nova serve`."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Final

from thunderagent.errors import ConfigurationError

POLICIES: Final = ("nova", "multi_stream", "chunked", "pf_limit")

DESCRIPTION: Final = """\
Serve a vision-language model to agents on one device: images are encoded and prompts prefilled beside decoding, on
parts of the device that follow the load. Needs the extra nova (torch, transformers, pillow).

Examples:
  thunderagent nova serve --model ./Qwen2.5-VL-7B-Instruct
  thunderagent nova sample ./tiny && thunderagent nova serve --model ./tiny
      a small random model, to try it without one
  thunderagent nova serve --model ./model --keep-slots 8 --cached-images 64
      what agents send again each turn is kept
  thunderagent serve --backends http://127.0.0.1:8400 --engine-tags true
      the proxy in front of it
"""


@dataclass(frozen=True, slots=True)
class NovaConfig:
    """The given options; `add_arguments` describes each."""

    model: Path
    model_name: str = ""
    host: str = "127.0.0.1"
    port: int = 8400
    device: str = "auto"
    dtype: str = "auto"
    policy: str = "nova"
    split: str = "adaptive"
    profile: Path | None = None
    output_tokens: int = 55
    slots: int = 16
    slot_tokens: int = 4096
    keep_slots: int = 0
    cached_images: int = 0
    physical_layers: int = 0
    resident_layers: int = 0
    decode_limit: int = 5
    budget_tokens: int = 128
    share_step: int = 8
    max_image_pixels: int = 4_000_000
    max_waiting: int = 256

    def __post_init__(self) -> None:
        """Reject invalid values: ConfigurationError."""
        static_split(self.split)
        at_least = {"slots": 1, "slot_tokens": 2, "decode_limit": 1, "budget_tokens": 1, "share_step": 1}
        at_least |= {"max_image_pixels": 1, "max_waiting": 1, "output_tokens": 1}
        at_least |= dict.fromkeys(("keep_slots", "cached_images", "physical_layers", "resident_layers", "port"), 0)
        for name, least in at_least.items():
            if getattr(self, name) < least:
                raise ConfigurationError(f"--{name.replace('_', '-')} is {least} at least")
        if self.physical_layers == 1:
            raise ConfigurationError("--physical-layers must be 0, or at least 2: one computes while another is loaded")
        if self.resident_layers and not self.physical_layers:
            raise ConfigurationError("--resident-layers needs --physical-layers: without it all layers are resident")

    @property
    def name(self) -> str:
        """Return the name that clients ask for."""
        return self.model_name or self.model.resolve().name


def static_split(text: str) -> tuple[int, int] | None:
    """Return the units beside encoding and beside prefill that `24` or `24,30` names; None for `adaptive`."""
    if text == "adaptive":
        return None
    numbers = text.split(",")
    if not all(number.isdecimal() and int(number) for number in numbers) or len(numbers) > 2:
        raise ConfigurationError(f"--split is adaptive, or units as 24 or 24,30, and not {text!r}")
    return int(numbers[0]), int(numbers[-1])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add every option."""
    parser.add_argument("--model", type=Path, required=True, metavar="DIR", help="folder of the model's files")
    texts: dict[str, tuple[str, str]] = {
        "model_name": ("NAME", "name that clients ask for (default: the folder's)"),
        "host": ("HOST", "address to listen on; it asks nobody for a key"),
        "port": ("N", "port to listen on; 0 takes a free one"),
        "split": ("UNITS", "units (SMs, cores) of decoding beside another stage: adaptive, or always 24, or 24,30"),
        "profile": ("FILE", "measured stage times, from which the adaptive split is made; else the paper's, scaled"),
        "output_tokens": ("N", "mean tokens of an answer, for that"),
        "share_step": ("N", "shares of a GPU are multiples of so many SMs"),
        "slots": ("N", "requests that fit in the KV cache at the same time"),
        "slot_tokens": ("N", "tokens of a prompt with its answer, at most"),
        "keep_slots": ("N", "slots more, in which programs keep their KV cache between turns"),
        "cached_images": ("N", "images whose encoding is kept"),
        "physical_layers": ("N", "layers of the encoder in the device's memory at a time; 0: all"),
        "resident_layers": ("N", "layers that stay there beside these"),
        "decode_limit": ("N", "pf_limit: decode once so many wait for it"),
        "budget_tokens": ("N", "chunked: tokens of a step"),
        "max_image_pixels": ("N", "refuse larger images"),
        "max_waiting": ("N", "refuse requests while so many wait"),
    }
    choices = {
        "device": (("auto", "cuda", "cpu"), "where it runs"),
        "dtype": (("auto", "bfloat16", "float16", "float32"), "of the weights; auto: bfloat16 on a GPU, else float32"),
        "policy": (POLICIES, "who runs when; all but nova are there to compare with"),
    }
    kinds = {"int": int, "Path | None": Path}
    for field in fields(NovaConfig):
        option = f"--{field.name.replace('_', '-')}"
        default = "" if field.default in ("", None) else " (default: %(default)s)"
        if field.name in choices:
            values, text = choices[field.name]
            parser.add_argument(option, choices=values, default=field.default, help=text + default)
        elif field.name in texts:
            metavar, text = texts[field.name]
            kind = kinds.get(str(field.type), str)
            parser.add_argument(option, type=kind, default=field.default, metavar=metavar, help=text + default)


def config_of(args: argparse.Namespace) -> NovaConfig:
    """Return the given options: ConfigurationError if invalid."""
    return NovaConfig(**{field.name: getattr(args, field.name) for field in fields(NovaConfig)})
