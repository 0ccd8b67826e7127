"""Plants faults in a copy of the tree, one at a time, and reports those that no test catches.

    python tools/planted_faults.py                         # every fault of planted_faults.toml
    python tools/planted_faults.py drain-without-delay     # one fault
    python tools/planted_faults.py --jobs 1 --json faults.json
    python tools/planted_faults.py --whole NAME            # with the whole suite

A fault replaces a few lines of a file in `titan_async/`. Then the test files in its entry of the table run in
the copy, up to the first failure:

    caught          a test failed
    hung            no test failed within the time limit, which counts as caught
    not caught      all tests passed
    broken          pytest could not collect the tests, so the fault is not a plausible one
    does not apply  the lines are not in the file exactly once: the code has changed, update the table

The exit status is 1 if a fault was neither caught nor hung. The test files first run once without a fault,
because a test that fails anyway catches nothing; `--no-check` skips this.
"""

import argparse
import contextlib
import json
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "tools" / "planted_faults.toml"

_SECONDS = 600  # for the test files of one fault
_SECONDS_OF_MANY = 3 * 3600  # for the whole suite, and for the files of all faults
_NOT_COPIED = (".git", ".venv", "outputs", "__pycache__", "*.egg-info", ".hypothesis", ".*_cache")


@dataclass(frozen=True)
class Fault:
    """An entry of the table."""

    name: str
    what: str
    file: str
    old: str
    new: str
    tests: list[str]


@dataclass(frozen=True)
class Result:
    """The outcome of a fault, the first test that failed or the reason, and the seconds of the tests."""

    outcome: str
    by: str = ""
    seconds: float = 0.0


def read_table(table: Path = TABLE) -> list[Fault]:
    """All faults, in the order of the table."""
    return [Fault(**entry) for entry in tomllib.loads(table.read_text(encoding="utf-8"))["fault"]]


def changed(text: str, fault: Fault) -> str:
    """The file's content with the fault; raises ValueError unless it has the lines exactly once."""
    if (count := text.count(fault.old)) != 1:
        raise ValueError(f"{fault.file} has the lines {count} times, not once")
    return text.replace(fault.old, fault.new)


def copy_tree(source: Path, target: Path) -> Path:
    """Copies the files that tests need, and exits unless `titan_async` is imported from the copy."""
    shutil.copytree(source, target, ignore=shutil.ignore_patterns(*_NOT_COPIED), symlinks=True)
    command = [sys.executable, "-c", "import titan_async; print(titan_async.__file__)"]
    found = subprocess.check_output(command, cwd=target, env=_environment(target), text=True).strip()
    if not Path(found).resolve().is_relative_to(target.resolve()):
        sys.exit(f"titan_async is imported from {found} instead of the copy in {target}")
    return target


def _environment(tree: Path) -> dict[str, str]:
    # An editable installation only provides what is not on the path: `titan_async.recipes`, the folder
    # recipes/ of the checkout. No fault is planted there.
    return {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def run_tests(tree: Path, tests: Sequence[str], timeout: float) -> Result:
    """Runs test files of a tree, or all if none are named, up to the first failure."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    start = time.monotonic()
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as output:
        # In a new session, so that the processes that tests start can be killed with it.
        process = subprocess.Popen(
            command, cwd=tree, env=_environment(tree), stdout=output, stderr=output, start_new_session=True
        )
        status = None
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                status = process.wait(timeout)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        text = output.read()
    seconds = time.monotonic() - start
    failed = re.search(r"^(?:FAILED|ERROR) (\S+::.*?)(?: - .*)?$", text, re.MULTILINE)
    if status is None:
        return Result("hung", f"no result within {timeout:.0f} s", seconds)
    if status == 0:
        return Result("not caught", "", seconds)
    if status == 1 and failed:
        return Result("caught", failed[1], seconds)
    return Result("broken", f"pytest ended with status {status}: {text.strip()[-100:]}", seconds)


def try_fault(tree: Path, fault: Fault, *, whole: bool = False) -> Result:
    """Plants a fault in a tree, runs its tests, and restores the file."""
    file = tree / fault.file
    content, times = file.read_text(encoding="utf-8"), file.stat()
    try:
        file.write_text(changed(content, fault), encoding="utf-8")
        return run_tests(tree, [] if whole else fault.tests, _SECONDS_OF_MANY if whole else _SECONDS)
    except ValueError as error:
        return Result("does not apply", str(error))
    finally:
        file.write_text(content, encoding="utf-8")
        # Compiled code is valid if its source has this time.
        os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="faults to plant (default: all)")
    parser.add_argument("--jobs", type=int, default=2, help="faults at the same time, each in its own copy")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results to this file")
    parser.add_argument("--whole", action="store_true", help="run the whole test suite for each fault")
    parser.add_argument("--no-check", action="store_true", help="skip the run without a fault")
    arguments = parser.parse_args(argv)
    table, jobs = {fault.name: fault for fault in read_table()}, max(arguments.jobs, 1)
    if unknown := [name for name in arguments.names if name not in table]:
        parser.error(f"there is no fault {unknown[0]}; choose from {', '.join(table)}")
    faults = [table[name] for name in arguments.names or table]

    with tempfile.TemporaryDirectory(prefix="planted_faults_") as folder, ThreadPoolExecutor(jobs) as pool:
        trees: queue.SimpleQueue[Path] = queue.SimpleQueue()
        for job in range(jobs):
            trees.put(copy_tree(ROOT, Path(folder, f"tree-{job}")))

        def attempt(fault: Fault) -> Result:
            tree = trees.get()
            try:
                return try_fault(tree, fault, whole=arguments.whole)
            finally:
                trees.put(tree)

        if not arguments.no_check:
            files = [] if arguments.whole else sorted({file for fault in faults for file in fault.tests})
            without = run_tests(Path(folder, "tree-0"), files, _SECONDS_OF_MANY)
            print(f"without a fault: {without.by or 'all tests pass'}  {without.seconds:.0f} s", flush=True)
            if without.outcome != "not caught":
                return 1
        records = []
        width = max(len(fault.name) for fault in faults)
        for fault, result in zip(faults, pool.map(attempt, faults), strict=True):
            outcome = f"{result.outcome}{result.by and ': '}{result.by}"
            print(f"{fault.name:<{width}}  {fault.file}  {outcome}  {result.seconds:.0f} s", flush=True)
            records.append({**asdict(fault), **asdict(result)})
    if arguments.json:
        arguments.json.write_text(json.dumps(records, indent=1) + "\n", encoding="utf-8")
    missed = [record["name"] for record in records if record["outcome"] not in ("caught", "hung")]
    print(f"{len(faults) - len(missed)} of {len(faults)} faults caught")
    for name in missed:
        print(f"not caught: {name}")
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
