"""Runs the study of the cost of one update of delay: all questions, or those named.

    python tools/study/run.py --compile     # all questions, two nights on two cores
    python tools/study/run.py q2 q3         # these two
    python tools/study/run.py --quick       # questions 1 to 3, shorter runs of one seed: 15 minutes

Each run is small and uses one core; as many runs as there are cores train at the same time. Each is written
to the results file when it ends, and the same command resumes from there. Learning rates are selected first.
tools/study/report.py writes the results into docs/.
"""

import argparse
import multiprocessing
import os
import shutil
import sys
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path
from typing import Any

# The workers inherit it.
os.environ["OMP_NUM_THREADS"] = "1"

import torch
from _results import DEFAULT_PATH, Results, own_rate_runs, resolved
from _runs import Question, Run, grid_runs, load_questions
from _training import compile_training, train
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from titan_async.errors import UserError

QUICK = ["q1", "q2", "q3"]
QUICK_STEPS = 200


def quick(question: Question) -> Question:
    """The question with one seed and shorter runs."""
    runs = (replace(run, seed=0, steps=QUICK_STEPS) for run in question.runs)
    return replace(question, runs=tuple(dict.fromkeys(runs)))


def run_questions(
    questions: list[Question], results: Results, workers: int, console: Console, compiled: bool = False
) -> None:
    """Runs everything that the results lack: first the grids of learning rates, then question by question."""
    grids = [Question(f"{question.name}, rates", tuple(grid_runs(question.runs))) for question in questions]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["_training"])
    with (
        ProcessPoolExecutor(
            workers, mp_context=context, initializer=_set_up_worker, initargs=(compiled,)
        ) as pool,
        _progress(console) as progress,
    ):
        _run_phase(grids, results, pool, progress)
        while searched := [
            Question(f"{question.name}, own rates", tuple(missing))
            for question in questions
            if (missing := own_rate_runs(question.runs, results))
        ]:
            _run_phase(searched, results, pool, progress)
        tuned = [replace(q, runs=tuple(resolved(q.runs, results))) for q in questions]
        _run_phase(tuned, results, pool, progress)


def _run_phase(
    questions: list[Question], results: Results, pool: ProcessPoolExecutor, progress: Progress
) -> None:
    scheduled: dict[Run, None] = {}
    bars: dict[Run, Any] = {}
    for question in questions:
        missing = [run for run in question.runs if results.get(run) is None and run not in scheduled]
        if question.runs:
            bar = progress.add_task(question.name, total=len(question.runs))
            progress.advance(bar, len(question.runs) - len(missing))
            bars |= dict.fromkeys(missing, bar)
        scheduled |= dict.fromkeys(missing)
    futures: dict[Future, Run] = {pool.submit(train, run): run for run in scheduled}
    try:
        for future in as_completed(futures):
            run = futures[future]
            results.add(run, future.result())
            progress.advance(bars[run])
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        raise


def _set_up_worker(compiled: bool) -> None:
    torch.set_num_threads(1)
    # Denormal weights would be slow.
    torch.set_flush_denormal(True)
    if compiled:
        compile_training()


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
    )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("questions", nargs="*", help="names or files of questions, such as q2; default all")
    parser.add_argument("--quick", action="store_true", help="one seed and shorter runs; default q1 q2 q3")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="runs at a time; default: cores")
    parser.add_argument("--compile", action="store_true", help="a quarter faster; needs a C++ compiler")
    parser.add_argument("--results", type=Path, help="the results file; default tools/study/results.jsonl")
    arguments = parser.parse_args(argv)
    path = arguments.results or (DEFAULT_PATH.with_stem("results-quick") if arguments.quick else DEFAULT_PATH)
    try:
        if arguments.compile and not shutil.which(compiler := os.environ.get("CXX", "g++")):
            raise UserError(f"There is no C++ compiler {compiler!r}: install it, or leave out --compile.")
        questions = load_questions(arguments.questions or (QUICK if arguments.quick else []))
        if arguments.quick:
            questions = [quick(question) for question in questions]
        run_questions(questions, Results(path), arguments.workers, Console(), arguments.compile)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"Interrupted; the same command resumes from {path}.", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
