"""Add to the documentation site: generated parts, files of the repository, and every page as Markdown.

MkDocs calls the functions `on_...` as hooks. A page names a generated part by the comment `<!-- generated: NAME -->`,
and shows another file by the line `--8<-- "FILE"`. Run as a program it lists the built versions.
"""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from scripts.docs_reference import filled

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
LINK = re.compile(r"\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
SHOWN = re.compile(r'^( *)--8<-- "(.+)"$', re.MULTILINE)
LANGUAGES = {".py": "python", ".yaml": "yaml"}
"""How files that are not pages are shown, by file extension."""
OUTSIDE = "repository"
"""Folder of the site for repository files that pages link to."""
BOOSTS = {
    "start/": 1.5,
    "fix/": 2,
    "reference/api": 0.3,
    "reference/cli": 0.3,
    "reference/configuration": 0.3,
    "reference/metrics": 0.3,
    "reference/policies": 0.5,
    "reference/python": 0.5,
    "research/": 0.3,
}
"""Weight of a search hit, by prefix of the page's path: answers before lists."""
_pages: dict[str, tuple[str, str]] = {}
"""Title and Markdown of each page of this build, by its path."""


def whole(text: str) -> str:
    """Return a page with its shown files, indented like their lines, and its generated parts."""

    def shown(mark: re.Match[str]) -> str:
        path = DOCS / mark[2]
        lines = SHOWN.sub(shown, path.read_text(encoding="utf-8")).splitlines()
        if language := LANGUAGES.get(path.suffix):
            lines = [f"```{language}", *lines, "```"]
        return "\n".join(mark[1] + line if line else "" for line in lines)

    return filled(SHOWN.sub(shown, text))


def outside_links(name: str, text: str) -> Iterator[tuple[str, Path]]:
    """Yield the links of a page that lead out of the documentation into the repository, with their files."""
    for link in LINK.findall(FENCE.sub("", text)):
        path, _, _ = link.partition("#")
        if urlsplit(link).scheme or not path:
            continue
        target = (DOCS / name).parent.joinpath(path).resolve()
        if DOCS not in target.parents and target.is_file():
            yield link, target


def place_of(target: Path) -> str:
    """Return the site's path of a repository file; Markdown is shown as text there."""
    place = f"{OUTSIDE}/{target.relative_to(ROOT)}"
    return f"{place}.txt" if target.suffix in ("", ".md") else place


def on_files(files: Any, config: Any) -> Any:
    """Add files outside of the documentation that pages link to."""
    from mkdocs.structure.files import File  # noqa: PLC0415 - tests use this module without MkDocs

    wanted = {
        target
        for path in DOCS.rglob("*.md")
        for _, target in outside_links(str(path.relative_to(DOCS)), path.read_text(encoding="utf-8"))
    }
    for target in sorted(wanted):
        files.append(File.generated(config, place_of(target), abs_src_path=str(target)))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Point links into the repository at the copies here, and keep the text for `.md` and llms.txt."""
    name = page.file.src_uri
    markdown = whole(markdown)
    for link, target in set(outside_links(name, markdown)):
        relative = os.path.relpath(place_of(target), Path(name).parent)
        markdown = markdown.replace(f"]({link})", f"]({relative})")
    page.meta["search"] = {"boost": next((boost for begin, boost in BOOSTS.items() if name.startswith(begin)), 1)}
    title = re.search(r"^# (.+)$", markdown, re.MULTILINE)
    _pages[name] = (title[1] if title else name, markdown)
    return markdown


def on_post_build(config: Any) -> None:
    """Write every page as Markdown beside it, and llms.txt, which lists them."""
    site = Path(config["site_dir"])
    for name, (_, text) in _pages.items():
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_text(text, encoding="utf-8")
    (site / "llms.txt").write_text(llms_text(config["site_description"], config["nav"]), encoding="utf-8")


def llms_text(description: str, nav: list[Any]) -> str:
    """Return the list of all pages in the form of llms.txt, with parts of the menu as headings."""
    lines = ["# thunderagent", "", f"> {description}"]
    for part in nav:
        for heading, entries in part.items():
            lines += ["", f"## {heading}", ""]
            lines += [f"- [{_pages[name][0]}]({name})" for name in _names(entries)]
    return "\n".join(lines) + "\n"


def _names(entries: Any) -> Iterator[str]:
    if isinstance(entries, str):
        yield entries
    else:
        for entry in entries:
            yield from _names(list(entry.values()) if isinstance(entry, dict) else entry)


def list_versions(folder: Path, latest: str) -> None:
    """Write the list that the menu of versions reads, and redirect the folder to the latest version."""
    versions = sorted((path.parent.name for path in folder.glob("*/index.html")), reverse=True)
    listed = [{"version": each, "title": each, "aliases": ["latest"] if each == latest else []} for each in versions]
    (folder / "versions.json").write_text(json.dumps(listed), encoding="utf-8")
    (folder / "index.html").write_text(
        f'<!doctype html><meta http-equiv="refresh" content="0; url={latest}/"><a href="{latest}/">{latest}</a>\n',
        encoding="utf-8",
    )


if __name__ == "__main__":
    list_versions(Path(sys.argv[1]), sys.argv[2])
