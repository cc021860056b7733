"""A chat becomes the prompt that the model's own tokenizer and image processor make, and tokens become text."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="what thunderagent-nova needs is not installed")
pytest.importorskip("transformers", reason="what thunderagent-nova needs is not installed")

from PIL import Image as Pictures  # noqa: E402

from tests.unit.nova import folder, tiny  # noqa: E402
from thunderagent_nova.chat import ApiError  # noqa: E402
from thunderagent_nova.codec import Codec  # noqa: E402
from thunderagent_nova.models import Vlm  # noqa: E402

IMAGE_PART = {"type": "image"}


@pytest.fixture(scope="module", params=["qwen2_5_vl", "qwen3_vl", "glm4v", "internvl"])
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Vlm, Codec]:
    path: Path = tmp_path_factory.mktemp(request.param)
    folder.write(path, request.param)
    vlm = Vlm.load(str(path), device=torch.device("cpu"), dtype=torch.float32)
    return vlm, Codec(path, vlm.model.config, most_pixels=10_000, most_tokens=200)


def said(*content: object) -> list[dict[str, object]]:
    return [{"role": "user", "content": list(content)}]


def test_each_image_gets_as_many_tokens_as_the_encoder_makes(loaded: tuple[Vlm, Codec]) -> None:
    """This holds for two images of different sizes."""
    vlm, codec = loaded
    text = {"type": "text", "text": "look"}
    images = [folder.png(9), folder.png(200, 32, 96)]
    prompt = codec.prompt(said(IMAGE_PART, text, IMAGE_PART), None, images)
    made = [len(encoded.features) for encoded in vlm.encode(prompt.images)]
    runs = "".join("i" if token == tiny.IMAGE else "t" for token in prompt.token_ids).split("t")
    assert [len(run) for run in runs if run] == made
    assert len({image.digest for image in prompt.images}) == 2
    assert codec.image_token_id == tiny.IMAGE


def test_text_comes_back(loaded: tuple[Vlm, Codec]) -> None:
    """The template's text comes back; special tokens are no text."""
    _, codec = loaded
    prompt = codec.prompt([{"role": "user", "content": "hello there"}], None, [])
    assert codec.text(prompt.token_ids) == "user: hello there;assistant: "
    assert codec.text([tiny.IMAGE]) == ""


def test_an_image_that_the_prompt_forges_is_refused(loaded: tuple[Vlm, Codec]) -> None:
    """An image's mark that is written as text is no image."""
    _, codec = loaded
    with pytest.raises(ApiError, match="place"):
        codec.prompt([{"role": "user", "content": "<image>"}], None, [])


@pytest.mark.parametrize(("data", "status"), [(b"no image", 400), (folder.png(0, 200, 200), 413), (b"", 400)])
def test_images_that_cannot_be_read_are_refused(loaded: tuple[Vlm, Codec], data: bytes, status: int) -> None:
    """So are images that are too large, before their pixels are unpacked."""
    _, codec = loaded
    with pytest.raises(ApiError) as refused:
        codec.prompt(said(IMAGE_PART), None, [data])
    assert refused.value.status == status


@pytest.mark.parametrize("kind", ["ICO", "EPS", "TIFF"])
def test_unsupported_image_kinds_are_refused(loaded: tuple[Vlm, Codec], kind: str) -> None:
    """Pillow unpacks some before their pixels are counted, and gives others to another program."""
    _, codec = loaded
    file = BytesIO()
    Pictures.new("RGB", (16, 16)).save(file, kind)
    with pytest.raises(ApiError, match="cannot identify"):
        codec.prompt(said(IMAGE_PART), None, [file.getvalue()])


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP"])
def test_the_usual_kinds_of_images_are_read(loaded: tuple[Vlm, Codec], kind: str) -> None:
    _, codec = loaded
    file = BytesIO()
    Pictures.new("RGB", (64, 48)).save(file, kind)
    assert len(codec.prompt(said(IMAGE_PART), None, [file.getvalue()]).images) == 1


@pytest.mark.parametrize("sides", [(201, 1), (1, 201)])
def test_an_image_that_is_far_longer_than_wide_is_refused(tmp_path: Path, sides: tuple[int, int]) -> None:
    """Its image processor makes no grid of it."""
    folder.write(tmp_path)
    config = Vlm.load(str(tmp_path), device=torch.device("cpu"), dtype=torch.float32).model.config
    codec = Codec(tmp_path, config, most_pixels=10_000, most_tokens=200)
    with pytest.raises(ApiError, match="aspect ratio") as refused:
        codec.prompt(said(IMAGE_PART), None, [folder.png(0, *sides)])
    assert refused.value.status == 400


def test_reading_ends_when_no_slot_has_room(loaded: tuple[Vlm, Codec]) -> None:
    """This holds however many images a body has: the last one here is never read."""
    _, codec = loaded
    with pytest.raises(ApiError, match="more than 200"):
        codec.prompt(said(*[IMAGE_PART] * 101), None, [*[folder.png(1)] * 100, b"no image"])


def test_a_cut_image_is_refused(loaded: tuple[Vlm, Codec]) -> None:
    """Its header is complete, its pixels are not."""
    _, codec = loaded
    with pytest.raises(ApiError):
        codec.prompt(said(IMAGE_PART), None, [folder.png(7)[:60]])


def test_a_folder_without_a_processor_is_refused(tmp_path: Path) -> None:
    """The error says so in words."""
    folder.write(tmp_path)
    config = Vlm.load(str(tmp_path), device=torch.device("cpu"), dtype=torch.float32).model.config
    (tmp_path / "preprocessor_config.json").unlink()
    with pytest.raises(ValueError, match="image processor"):
        Codec(tmp_path, config, most_pixels=1, most_tokens=1)
