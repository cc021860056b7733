"""A model in separate stages gives the same as a whole one."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="what thunderagent-nova needs is not installed")
pytest.importorskip("transformers", reason="what thunderagent-nova needs is not installed")

from transformers import LlamaConfig, LlamaForCausalLM  # noqa: E402

from tests.unit.nova import tiny  # noqa: E402
from thunderagent_nova.models import (  # noqa: E402
    FIRST_VERSION,
    LAST_VERSION,
    UnsupportedModelError,
    UnsupportedVersionError,
    Vlm,
    check_version,
)

TOKENS = 12


def staged(vlm: Vlm, prompt, *, tokens: int, chunk: int = 10_000, slot: int = 0, cache=None) -> list[int]:
    """Encode, prefill and decode one prompt alone, in a slot of its own."""
    cache = cache or vlm.cache(3, 128)
    with torch.inference_mode():
        layout = vlm.layout(prompt)
        encoded = vlm.encode(prompt.images) if prompt.images else []
        size = len(prompt.token_ids)
        for begin in range(0, size, chunk):
            first = vlm.prefill(prompt, layout, encoded, cache, slot, range(begin, min(size, begin + chunk)))
        out = [int(first)]
        while len(out) < tokens:
            ids = torch.zeros(slot + 1, dtype=torch.long)
            index = torch.full((slot + 1,), cache.idle_position)
            stand = torch.zeros(slot + 1, dtype=torch.long)
            ids[slot], index[slot] = out[-1], size + len(out) - 1
            stand[slot] = index[slot] + layout.offset
            out.append(int(vlm.step(ids, index, stand, cache)[slot]))
    return out


@pytest.mark.parametrize("family", tiny.FAMILIES)
@pytest.mark.parametrize("images", [0, 1, 2])
def test_staged_tokens_equal_generate(family: str, images: int):
    """Encode, prefill and single steps give the tokens of `generate()`."""
    model = tiny.model(family)
    prompt = tiny.prompt(family, 3, images=images)
    expected = tiny.generate(model, prompt, TOKENS)
    assert staged(Vlm(model), prompt, tokens=TOKENS, slot=2) == expected


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_chunked_prefill_gives_the_keys_of_a_whole_one(family: str):
    """Prefill in chunks of 5, which cut images, differs from prefill in one piece by less than 1e-5."""
    vlm = Vlm(tiny.model(family))
    prompt = tiny.prompt(family, 4, images=2)
    whole, chunked = vlm.cache(1, 128), vlm.cache(1, 128)
    assert staged(vlm, prompt, tokens=6, cache=whole) == staged(vlm, prompt, tokens=6, chunk=5, cache=chunked)
    assert whole.keys.abs().max() > 0.1
    assert (whole.keys - chunked.keys).abs().max() < 1e-5
    assert (whole.values - chunked.values).abs().max() < 1e-5


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_images_need_no_token_between_them(family: str):
    """Without the words between them they stand as with them, and all that follows stands nearer by these."""
    vlm = Vlm(tiny.model(family))
    apart = tiny.prompt(family, 5, images=3)
    is_image = [token == tiny.IMAGE for token in apart.token_ids]
    begin = is_image.index(True)
    end = len(is_image) - is_image[::-1].index(True)
    kept = [index for index in range(len(is_image)) if not begin <= index < end or is_image[index]]
    beside = replace(apart, token_ids=tuple(apart.token_ids[index] for index in kept))
    expected, before = [], 0
    wide = vlm.layout(apart)
    for index in range(len(is_image)):
        if index in kept:
            expected.append(wide.positions[:, 0, index] - before)
        else:
            before += 1
    narrow = vlm.layout(beside)
    assert torch.equal(narrow.positions[:, 0], torch.stack(expected, dim=1))
    assert narrow.offset == wide.offset
    assert len(staged(vlm, beside, tokens=4)) == 4


def test_a_model_of_another_family_is_refused():
    tiny_llama = LlamaConfig(
        hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, vocab_size=8
    )
    with pytest.raises(UnsupportedModelError, match="llama is none of"):
        Vlm(LlamaForCausalLM(tiny_llama))


@pytest.mark.parametrize("version", ["5.16.1", "5.25.0", "5.25.0.dev0", "6.0.0"])
def test_a_version_of_transformers_that_was_not_tested_is_refused_with_the_remedy(version: str):
    with pytest.raises(UnsupportedVersionError, match=r"5\.17 to 5\.24; pip install 'transformers>=5\.17,<5\.25'"):
        check_version(version)


def test_the_versions_that_are_taken_are_those_of_the_package_s_requirement():
    for version in ("5.17.0", "5.18.0", "5.24.3"):
        check_version(version)
    project = Path(__file__).parents[3] / "packages" / "thunderagent-nova" / "pyproject.toml"
    required = tomllib.loads(project.read_text())["project"]["dependencies"]
    (major, first), (_, last) = FIRST_VERSION, LAST_VERSION
    assert f"transformers>={major}.{first},<{major}.{last + 1}" in required
