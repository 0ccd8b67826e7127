"""Recipe files that chance has changed: each resolves, or is refused in one line, and soon."""

from __future__ import annotations

import copy
import math
import random
import time
import tomllib
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.saved_runs import ROOT
from tests.support.selection import slow
from titan_async.config.recipe_file import resolve_recipe
from titan_async.errors import UserError

FILES = sorted((ROOT / "toml_configs").glob("*.toml"))
MOST_SECONDS = 5  # of the processor

VALUES: list[Any] = [
    -1, 0, 1, 2**31, 2**63, 2**64, -(2**80), 0.5, -0.5, 1e308, math.inf, -math.inf, math.nan, True, False,
    "", "none", "300", "a\0b", "\x1b[31m\n", "__import__('os').system('x')", "../../x", "/", "\u202e",
    "a" * 5000, [], [1], [[]], {}, {"a": 1}, {"mode": "x"}, [{}], [{"pattern": ".*"}],
]  # fmt: skip

KEYS = ["steps", "mode", "lr", "recipe", "include", "module", "model_spec", "0", "", "a.b", "\x1b", "_x", "é"]

ODD_BYTES = [
    b"\0",
    b"\xff",
    b"\xef\xbb\xbf",
    b"\r",
    b"\x1b",
    b"'",
    b'"""',
    b"[",
    b"]",
    b"{",
    b"=",
    b"#",
    b".",
    b"\n",
]


def sections_of(table: dict[str, Any]) -> list[dict[str, Any]]:
    inner = [value for value in table.values() if isinstance(value, dict)]
    return [table, *(section for value in inner for section in sections_of(value))]


def change(table: dict[str, Any], chance: random.Random) -> None:
    """Deletes, renames, moves or replaces a key of a recipe, or adds one."""
    sections = sections_of(table)
    section = chance.choice(sections)
    kind = chance.choice(["delete", "rename", "move", "replace", "replace", "add"])
    key = chance.choice([*section, ""])
    if kind == "add" or key not in section:
        section[chance.choice(KEYS)] = copy.deepcopy(chance.choice(VALUES))
    elif kind == "replace":
        section[key] = copy.deepcopy(chance.choice(VALUES))
    elif kind == "delete":
        del section[key]
    elif kind == "rename":
        section[chance.choice([*KEYS, key[:-1], key + "s", key.upper()])] = section.pop(key)
    else:
        value = section.pop(key)
        chance.choice(sections)[key] = "moved" if isinstance(value, dict) else value


def spoil(content: bytes, chance: random.Random) -> bytes:
    """Changes bytes, or the encoding, or the order or number of lines."""
    kind = chance.choice(["insert", "cut", "double", "swap", "encode", "nest"])
    at = chance.randrange(len(content) + 1)
    if kind == "insert":
        return content[:at] + chance.choice(ODD_BYTES) * chance.choice([1, 3]) + content[at:]
    if kind == "cut":
        return content[:at]
    if kind == "encode":
        text = content.decode("utf-8", "replace") + "# \xe9\n"
        return text.encode(
            chance.choice(["utf-16", "utf-16-le", "utf-32", "latin-1", "utf-8-sig"]), "replace"
        )
    lines = content.splitlines(keepends=True)
    if kind == "nest":
        deep = chance.choice(
            [b"x = " + b"[" * 999, b"a." * 999 + b"a = 1", b"[" + b"a." * 99 + b"a]", b"x = {" * 9]
        )
        lines.insert(chance.randrange(len(lines) + 1), deep + b"\n")
    elif kind == "double":
        lines.insert(chance.randrange(len(lines) + 1), chance.choice(lines))
    else:
        chance.shuffle(lines)
    return b"".join(lines)


def check(content: bytes) -> bool:
    """Whether a recipe file of this content resolves; if not, that is said in a printable line."""
    Path("x.toml").write_bytes(content)
    begin = time.process_time()
    said = ""
    try:
        resolve_recipe(["x.toml"])
    except UserError as error:
        said = f"{error}."
    assert said.isprintable()
    assert time.process_time() - begin < MOST_SECONDS
    return not said


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("fuzzed"))
        yield


fuzzed = settings(
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)


@pytest.mark.parametrize("file", FILES, ids=lambda path: path.stem)
def test_the_files_themselves_resolve(file: Path) -> None:
    assert check(file.read_bytes())
    assert check(tomli_w.dumps(tomllib.loads(file.read_text())).encode())


EXAMPLES = pytest.mark.parametrize("examples", [100, slow(300)])


@EXAMPLES
def test_other_keys_and_values(examples: int) -> None:
    @settings(fuzzed, max_examples=examples)
    @given(file=st.sampled_from(FILES), seed=st.integers(0, 2**32), changes=st.integers(1, 4))
    def try_out(file: Path, seed: int, changes: int) -> None:
        chance, table = random.Random(seed), tomllib.loads(file.read_text())
        for _ in range(changes):
            change(table, chance)
        check(tomli_w.dumps(table).encode("utf-8", "surrogatepass"))

    try_out()


@EXAMPLES
def test_other_bytes(examples: int) -> None:
    @settings(fuzzed, max_examples=examples)
    @given(file=st.sampled_from(FILES), seed=st.integers(0, 2**32), changes=st.integers(1, 3))
    def try_out(file: Path, seed: int, changes: int) -> None:
        chance, content = random.Random(seed), file.read_bytes()
        for _ in range(changes):
            content = spoil(content, chance)
        check(content)

    try_out()
