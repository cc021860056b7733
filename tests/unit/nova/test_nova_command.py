"""`thunderagent nova serve`: its options, and its imports."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import fields

import pytest

from thunderagent.cli import build_parser, main
from thunderagent.errors import ConfigurationError
from thunderagent_nova.config import POLICIES, NovaConfig, config_of, static_split
from thunderagent_nova.scheduler import POLICIES as SCHEDULED


def config(*options: str) -> NovaConfig:
    return config_of(build_parser().parse_args(["nova", "serve", "--model", "m", *options]))


def test_every_field_has_an_option_and_its_default() -> None:
    """An option that is not given has the class's default."""
    given = config()
    assert {field.name: getattr(given, field.name) for field in fields(NovaConfig) if field.name != "model"} == {
        field.name: field.default for field in fields(NovaConfig) if field.name != "model"
    }
    assert (given.name, config("--model-name", "n").name) == ("m", "n")
    assert config("--slots", "3", "--policy", "chunked", "--split", "24,30").slots == 3
    assert set(POLICIES) == set(SCHEDULED)


@pytest.mark.parametrize(("text", "units"), [("adaptive", None), ("24", (24, 24)), ("24,30", (24, 30))])
def test_splits_are_read(text: str, units: tuple[int, int] | None) -> None:
    """Splits are by load, one for both stages, or one for each."""
    assert static_split(text) == units


@pytest.mark.parametrize(
    "options",
    [
        ("--split", "x"),
        ("--split", "0"),
        ("--split", "1,2,3"),
        ("--slots", "0"),
        ("--keep-slots", "-1"),
        ("--physical-layers", "1"),
        ("--resident-layers", "2"),
    ],
)
def test_meaningless_option_is_refused(options: tuple[str, ...]) -> None:
    """The refusal is in words, and comes before a model is loaded."""
    with pytest.raises(ConfigurationError):
        config(*options)
    assert main(["nova", "serve", "--model", "m", *options]) == 2


def test_serving_the_proxy_imports_nothing_of_nova() -> None:
    """It does not import torch either, so torch is optional. Even the parser imports it only on demand."""
    code = (
        "import sys; from thunderagent.cli import build_parser; build_parser().parse_args(['serve']);"
        "import thunderagent.serving.serving;"
        "print([name for name in sys.modules if name.startswith(('thunderagent_nova', 'torch', 'transformers'))])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"
