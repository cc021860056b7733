"""What README.md and a page that is not built offer to newcomers."""

from __future__ import annotations

import re
from pathlib import Path

from scripts.docs_site import SHOWN

ROOT = Path(__file__).parents[2]
INTEGRATIONS = ROOT / "docs/integrations"


def shown_in(page: str) -> set[str]:
    """Return the files that a page of integrations shows as tabs, which only the built site does."""
    return {Path(name).name for _, name in SHOWN.findall((INTEGRATIONS / page).read_text())}


def test_every_example_for_a_framework_is_found_without_building_the_site() -> None:
    """README.md links each file, and the page of the agents names its own."""
    linked = set(re.findall(r"\]\(docs/integrations/([\w-]+\.md)\)", (ROOT / "README.md").read_text()))
    assert linked >= shown_in("index.md") | shown_in("training.md")
    text = (INTEGRATIONS / "index.md").read_text().partition("\n=== ")[0]
    assert set(re.findall(r"`([\w-]+\.md)`", text)) == shown_in("index.md")
