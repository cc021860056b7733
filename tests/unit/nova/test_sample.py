"""The sample model is one that Nova serves: a chat with images gets an answer."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="what thunderagent-nova needs is not installed")
pytest.importorskip("transformers", reason="what thunderagent-nova needs is not installed")

from tests.unit.nova import folder  # noqa: E402
from tests.unit.nova.test_models import staged  # noqa: E402
from thunderagent.cli import main  # noqa: E402
from thunderagent_nova.codec import Codec  # noqa: E402
from thunderagent_nova.models import Vlm  # noqa: E402


def test_the_sample_model_answers_a_chat_with_two_images_beside_each_other(tmp_path: Path) -> None:
    path = tmp_path / "tiny"
    assert main(["nova", "sample", str(path)]) == 0
    assert sum(file.stat().st_size for file in path.iterdir()) < 8 * 2**20
    vlm = Vlm.load(str(path), device=torch.device("cpu"), dtype=torch.float32)
    codec = Codec(path, vlm.model.config, most_pixels=4_000_000, most_tokens=4096)
    content = [{"type": "image"}, {"type": "image"}, {"type": "text", "text": "what is this?"}]
    asked = codec.prompt([{"role": "user", "content": content}], None, [folder.png(9), folder.png(99, 320, 200)])
    answer = staged(vlm, asked, tokens=5, cache=vlm.cache(3, 512))
    assert len(codec.text(answer)) <= 5
    assert codec.text(asked.token_ids).startswith("user: what is this?")
