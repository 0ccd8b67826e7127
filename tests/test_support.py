"""Support code of the tests: forks behave like new interpreters, and the default suite covers every value."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from itertools import combinations, compress, product
from operator import not_
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support import forks
from tests.support.selection import covering, is_left_out

PROGRAM = """
import atexit, os, sys, threading, time
atexit.register(lambda: print("atexit", flush=True))
print(__name__, sys.argv, os.getcwd(), os.environ["WORD"], os.getsid(0) == os.getpid(), flush=True)
print("error", file=sys.stderr)
threading.Thread(target=lambda: (time.sleep(0.1), print("thread"))).start()
{end}
"""
ENDS = ["pass", "sys.exit(3)", "sys.exit('a reason')", "1 / 0", "os.kill(os.getpid(), 9)", "os._exit(4)"]


@pytest.mark.parametrize("end", ENDS)
def test_a_fork_behaves_like_an_interpreter(end: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", PROGRAM.format(end=end), "a", "b c"]
    env = os.environ | {"WORD": "word"}
    real = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    fork = forks.run(command, cwd=tmp_path, env=env)
    assert (fork.returncode, fork.stdout) == (real.returncode, real.stdout)
    # A traceback also contains the frames of the fork server.
    assert fork.stderr.splitlines()[-1] == real.stderr.splitlines()[-1]
    assert fork.stderr.splitlines()[0] == real.stderr.splitlines()[0] == "error"


def test_modules_and_scripts_run_as_main(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("import sys\nprint(__name__, sys.argv[1:], sys.path[0])\n")
    for words in (["-m", "own", "1"], [tmp_path / "own.py", "1"]):
        done = forks.run([sys.executable, *words], cwd=tmp_path)
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout == f"__main__ ['1'] {tmp_path}\n"


def test_a_fork_gets_signals_and_can_lead_a_session(tmp_path: Path) -> None:
    program = "import os, time\nprint(os.getsid(0) == os.getpid(), flush=True)\ntime.sleep(100)\n"
    fork = forks.Forked([sys.executable, "-c", program], cwd=tmp_path, start_new_session=True)
    assert fork.stdout is not None and fork.stdout.readline() == "True\n" and fork.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        fork.wait(0.1)
    os.killpg(fork.pid, signal.SIGTERM)
    assert fork.wait(60) == -signal.SIGTERM


@pytest.mark.parametrize("sizes", [(2,), (3, 4), (2, 3, 4), (3, 3, 3, 3)])
@pytest.mark.parametrize("strength", [1, 2])
def test_covering_cases_contain_all_values(sizes: tuple[int, ...], strength: int) -> None:
    names = "abcd"[: len(sizes)]
    cases = [tuple(zip(names, case, strict=True)) for case in product(*map(range, sizes))]
    chosen = [case for case, needed in zip(cases, covering(cases, strength), strict=True) if needed]
    groups = list(combinations(range(len(sizes)), min(strength, len(sizes))))
    for group in groups:
        wanted = set(product(*(range(sizes[index]) for index in group)))
        assert {tuple(case[index][1] for index in group) for case in chosen} == wanted
    assert len(chosen) < len(cases) or strength >= len(sizes)


class Item:
    """A test of three crossed parameters of three values each, as pytest collects it."""

    def __init__(self, case: tuple[int, ...], slow: bool) -> None:
        self.nodeid, self._slow = f"test[{case}]", slow
        self.callspec = SimpleNamespace(params=dict(zip("abc", case, strict=True)))

    def get_closest_marker(self, name: str) -> SimpleNamespace | None:
        marks = {"covering": SimpleNamespace(args=(1,))} | ({"slow": SimpleNamespace()} if self._slow else {})
        return marks.get(name)


def test_default_covers_values_and_all_covers_pairs() -> None:
    cases = list(product(range(3), repeat=3))
    items = [Item(case, slow=case[0] == 2) for case in cases]
    pairs = set(compress(cases, covering([tuple(zip("abc", case, strict=True)) for case in cases], 2)))
    default, everything = (
        set(compress(cases, map(not_, is_left_out(items, slow_too)))) for slow_too in (False, True)
    )
    for kept, values, meeting in ((default, range(2), 1), (pairs, range(3), 2)):
        assert {case[0] for case in kept} == set(values)
        for indices in combinations((1, 2), meeting):
            met = {tuple(case[index] for index in indices) for case in kept}
            assert met == set(product(range(3), repeat=meeting))
        assert len(kept) == 3**meeting
    assert everything == default | pairs
