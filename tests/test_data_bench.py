"""The benchmark of data loaders still runs, in a small form; its figures are nobody's concern here."""

import json
import sys
from pathlib import Path

from tests.support import forks

BENCH = Path(__file__).parents[1] / "tools" / "bench" / "data.py"


def test_every_loader_is_measured(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    arguments = ("--repeats", 1, "--millions", 1, "--documents", 300, "--json", path)
    done = forks.run([sys.executable, BENCH, *arguments], timeout=600)
    assert done.returncode == 0, done.stderr
    results = json.loads(path.read_text())["parts"]["loaders"]
    assert [result["loader"] for result in results[:3]] == [
        "ours, token files",
        "ours, text",
        "torchtitan, text",
    ]
    assert len(results) == 6
    assert all(median > 0 for result in results for median in result["medians"])
