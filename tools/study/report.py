"""Updates the tables and figures of the study's pages in docs/.

    python tools/study/report.py            # from tools/study/results.jsonl
    python tools/study/report.py --quick    # prints the tables of `run.py --quick`

The text of the pages is written by hand; the tables between ``<!-- table NAME -->`` and ``<!-- end -->`` are
replaced. Nothing is trained.
"""

import argparse
import re
import sys
from pathlib import Path

from _gaps import Losses
from _long_tables import LONG_TABLES
from _plots import PLOTS
from _results import DEFAULT_PATH, Results
from _runs import Run
from _tables import TABLES
from matplotlib.figure import Figure
from run import QUICK_STEPS

from titan_async.errors import UserError
from titan_async.file_io import atomic_write
from titan_async.monitor.figures import save, style

DOCS = Path(__file__).parents[2] / "docs"
PAGES = ("study.md", "study_300.md")
_TABLE = re.compile(r"(<!-- table (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def tables(results: Results, base: Run) -> dict[str, str]:
    """Every table in Markdown, by name."""
    losses = Losses(results)
    short = {name: table(losses, base) for name, table in TABLES.items()}
    return short | {name: table(losses) for name, table in LONG_TABLES.items()}


def filled(document: str, made: dict[str, str]) -> str:
    """The document with its tables replaced.

    Raises:
        UserError: the document names an unknown table.
    """

    def replaced(match: re.Match[str]) -> str:
        if match[2] not in made:
            raise UserError(f"There is no table {match[2]!r}: name one of {', '.join(made)}.")
        return f"{match[1]}{made[match[2]]}\n{match[3]}"

    return _TABLE.sub(replaced, document)


def draw(results: Results, base: Run, folder: Path) -> None:
    """Draws all figures as SVG."""
    folder.mkdir(parents=True, exist_ok=True)
    losses = Losses(results)
    for name, (plot, size) in PLOTS.items():
        with style():
            figure = Figure(figsize=size, layout="constrained")
            plot(figure, losses, base)
            save(figure, folder / f"{name}.svg")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="print the tables of questions 1 to 3 of --quick"
    )
    parser.add_argument("--results", type=Path, help="the results file; default tools/study/results.jsonl")
    parser.add_argument("--docs", type=Path, default=DOCS, help="the folder of the pages; default docs/")
    arguments = parser.parse_args(argv)
    try:
        if arguments.quick:
            results = Results(arguments.results or DEFAULT_PATH.with_stem("results-quick"))
            made = tables(results, Run(steps=QUICK_STEPS))
            for name in ("optimizers", "feedback", "momentum"):
                print(f"{name}\n\n{made[name]}\n")
            return 0
        results = Results(arguments.results or DEFAULT_PATH)
        made = tables(results, Run())
        for path in (arguments.docs / page for page in PAGES):
            document = filled(path.read_text(encoding="utf-8"), made)
            with atomic_write(path) as partial:
                partial.write_text(document, encoding="utf-8")
        draw(results, Run(), arguments.docs / "study")
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
