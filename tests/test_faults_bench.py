"""The kills of tools/bench/faults.py happen in the planned spans."""

from __future__ import annotations

import itertools
import json
import os
import sys
from pathlib import Path

from tests.support import forks

ROOT = Path(__file__).parents[1]

ACTS = """
import json, os, sys, time
from pathlib import Path

from tests.support import forks
from _faults import inject_kill
from titan_async.monitor.recorder import EventRecorder
from titan_async.pipelining.recording import Kind

class NullWriter:
    def __getattr__(self, name):
        return lambda *about, **more: None

class Clock:
    mark = staticmethod(time.time_ns)
    nanoseconds = staticmethod(lambda mark: mark)

plan, folder = json.loads(sys.argv[1]), sys.argv[2]

def act():
    inject_kill.install(0, plan=plan, folder=folder)
    recorder = EventRecorder(
        NullWriter(), Clock(), [0], first_step=10, memory=lambda: (0, 0, 0), failed=lambda error: None
    )
    for step in (11, 12):
        with recorder.span(Kind.STEP, step):
            for microbatch in range(3):
                print(step, microbatch, "begins", flush=True)
                recorder.begin(Kind.FORWARD, 0, step - 11, microbatch)
                time.sleep(0.1)
                print(step, microbatch, "ends", flush=True)
                recorder.end()
    print("survived", flush=True)

for _ in plan:
    child = os.fork()  # importing takes longest
    if not child:
        act()
        os._exit(0)
    print("status", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


def test_each_planned_kill_happens_once_and_in_its_span(tmp_path: Path) -> None:
    forward = 2  # the number of `Kind.FORWARD`
    plan = [
        {"phase": "on entering", "rank": 0, "step": 12, "kinds": [forward], "nth": 1},
        {"phase": "on leaving", "rank": 0, "step": 11, "kinds": [forward], "delay": 60.0},
        {"phase": "another rank", "rank": 1, "step": 11, "kinds": [forward]},
    ]
    done = forks.run(
        [sys.executable, "-c", ACTS, json.dumps(plan), tmp_path],
        env=os.environ | {"PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "tools" / "bench")))},
        timeout=240,
    )
    lines = done.stdout.splitlines()
    said = [pair for pair in itertools.pairwise(lines) if pair[1].startswith("status ")]
    assert [last for last, _ in said] == ["12 1 begins", "11 0 ends", "survived"], done.stderr
    assert [status for _, status in said] == ["status -9", "status -9", "status 0"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]
