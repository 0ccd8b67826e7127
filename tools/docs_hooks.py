"""Hooks of mkdocs that add the README and other files above docs/, and unlink source files.

On a code host the same files link to each other and to the sources by relative paths.
"""

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]

PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "CONTRIBUTING.md", "CHANGELOG.md": "CHANGELOG.md"}
"""Pages above docs/, and their names in the site."""

LINK = re.compile(r"(?<!!)\[([^\]]+)\]\((?!https?:|#)([^)#\s]+)(#[^)\s]*)?\)")
IMAGE = re.compile(r"(!\[[^\]]*\]\()docs/")


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages above docs/."""
    for name, page in PAGES.items():
        text = (ROOT / name).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=IMAGE.sub(r"\1", text)))
    return files


def on_page_markdown(markdown: str, page: Any, files: Files, **_: Any) -> str:
    """Resolves links to the site's pages, and replaces other links by their text."""
    above = page.file.src_uri in PAGES.values()
    folder = ROOT if above else (ROOT / "docs" / page.file.src_uri).parent

    def resolved(link: re.Match[str]) -> str:
        target = (folder / link[2]).resolve()
        if not target.exists():
            raise FileNotFoundError(f"{page.file.src_uri} links to {link[2]}, which does not exist")
        shown = target.relative_to(ROOT).as_posix()
        name = PAGES.get(shown, shown.removeprefix("docs/"))
        if files.get_file_from_path(name) is None or not (shown in PAGES or shown.startswith("docs/")):
            return link[1]
        depth = page.file.src_uri.count("/")
        return f"[{link[1]}]({'../' * depth}{name}{link[3] or ''})"

    return LINK.sub(resolved, markdown)
