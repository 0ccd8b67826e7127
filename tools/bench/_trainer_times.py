"""One rank of a training run that takes the processor time of its steps and stages, and writes it to a file.

Started as a process of its own: python _trainer_times.py FOLDER RECIPE.toml [flags].
"""

import json
import os
import sys
import time
from pathlib import Path
from statistics import median
from types import SimpleNamespace

from titan_async.config.device import ensure_device

ensure_device()  # before anything of torchtitan

from titan_async.config.recipe_file import resolve  # noqa: E402
from titan_async.training.telemetry import stage_times  # noqa: E402


def main(folder: str, argv: list[str]) -> None:
    # Of the thread, so that other programs, and ranks that wait, do not count.
    stage_times.time = SimpleNamespace(perf_counter=time.thread_time)  # type: ignore[assignment]
    trainer = resolve(argv).build()
    step, seconds = trainer.train_step, []

    def timed(*args: object) -> object:
        begin = time.thread_time()
        try:
            return step(*args)
        finally:
            seconds.append(time.thread_time() - begin)

    trainer.train_step = timed
    trainer.train()
    stages = trainer.stage_timer.seconds() if trainer.stage_timer is not None else []
    trainer.close()
    record = {"step": median(seconds[stage_times.SKIPPED :]), "stages": stages}
    Path(folder, f"{os.environ['RANK']}.json").write_text(json.dumps(record))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
