"""Fuzzed recipe files: each resolves, or is refused with one line, in bounded time."""

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
MAX_SECONDS = 5  # of processor time

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


def change(table: dict[str, Any], rng: random.Random) -> None:
    """Deletes, renames, moves, replaces or adds a random key."""
    sections = sections_of(table)
    section = rng.choice(sections)
    kind = rng.choice(["delete", "rename", "move", "replace", "replace", "add"])
    key = rng.choice([*section, ""])
    if kind == "add" or key not in section:
        section[rng.choice(KEYS)] = copy.deepcopy(rng.choice(VALUES))
    elif kind == "replace":
        section[key] = copy.deepcopy(rng.choice(VALUES))
    elif kind == "delete":
        del section[key]
    elif kind == "rename":
        section[rng.choice([*KEYS, key[:-1], key + "s", key.upper()])] = section.pop(key)
    else:
        value = section.pop(key)
        rng.choice(sections)[key] = "moved" if isinstance(value, dict) else value


def corrupt(content: bytes, rng: random.Random) -> bytes:
    """Changes random bytes, the encoding, or the order or number of lines."""
    kind = rng.choice(["insert", "cut", "double", "swap", "encode", "nest"])
    at = rng.randrange(len(content) + 1)
    if kind == "insert":
        return content[:at] + rng.choice(ODD_BYTES) * rng.choice([1, 3]) + content[at:]
    if kind == "cut":
        return content[:at]
    if kind == "encode":
        text = content.decode("utf-8", "replace") + "# \xe9\n"
        return text.encode(rng.choice(["utf-16", "utf-16-le", "utf-32", "latin-1", "utf-8-sig"]), "replace")
    lines = content.splitlines(keepends=True)
    if kind == "nest":
        deep = rng.choice(
            [b"x = " + b"[" * 999, b"a." * 999 + b"a = 1", b"[" + b"a." * 99 + b"a]", b"x = {" * 9]
        )
        lines.insert(rng.randrange(len(lines) + 1), deep + b"\n")
    elif kind == "double":
        lines.insert(rng.randrange(len(lines) + 1), rng.choice(lines))
    else:
        rng.shuffle(lines)
    return b"".join(lines)


def check(content: bytes) -> bool:
    """Returns whether a recipe file of this content resolves. If not, the error must be a printable line."""
    Path("x.toml").write_bytes(content)
    begin = time.process_time()
    message = ""
    try:
        resolve_recipe(["x.toml"])
    except UserError as error:
        message = f"{error}."
    assert message.isprintable()
    assert time.process_time() - begin < MAX_SECONDS
    return not message


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
def test_the_unchanged_files_resolve(file: Path) -> None:
    assert check(file.read_bytes())
    assert check(tomli_w.dumps(tomllib.loads(file.read_text())).encode())


EXAMPLES = pytest.mark.parametrize("examples", [100, slow(300)])


@EXAMPLES
def test_fuzzed_keys_and_values(examples: int) -> None:
    @settings(fuzzed, max_examples=examples)
    @given(file=st.sampled_from(FILES), seed=st.integers(0, 2**32), changes=st.integers(1, 4))
    def fuzz(file: Path, seed: int, changes: int) -> None:
        rng, table = random.Random(seed), tomllib.loads(file.read_text())
        for _ in range(changes):
            change(table, rng)
        check(tomli_w.dumps(table).encode("utf-8", "surrogatepass"))

    fuzz()


@EXAMPLES
def test_fuzzed_bytes(examples: int) -> None:
    @settings(fuzzed, max_examples=examples)
    @given(file=st.sampled_from(FILES), seed=st.integers(0, 2**32), changes=st.integers(1, 3))
    def fuzz(file: Path, seed: int, changes: int) -> None:
        rng, content = random.Random(seed), file.read_bytes()
        for _ in range(changes):
            content = corrupt(content, rng)
        check(content)

    fuzz()
