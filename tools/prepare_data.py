"""Tokenizes text into files that training memory-maps. Examples:

    python tools/prepare_data.py data/fineweb --tokenizer assets/smollm \\
        --dataset HuggingFaceFW/fineweb-edu --dataset_config sample-10BT
    python tools/prepare_data.py data/mine --tokenizer assets/smollm --dataset_path my_texts/
    python tools/prepare_data.py data/mine --verify

Train on them with `dataset = "tokens"` and `dataset_path = "data/mine"` in `[dataloader]`. After an
interruption the same command resumes; the files do not depend on interruptions or on --processes.
"""

import argparse
import os
import sys

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from titan_async.data.prepare import SHARD_TOKENS, estimate_documents, prepare_tokens
from titan_async.data.text_source import TextSource
from titan_async.data.token_files import TokenFiles
from titan_async.errors import UserError


def main(argv: list[str] | None = None) -> int:
    """Runs the command and returns the exit status; a `UserError` is one line on stderr."""
    arguments = parse(argv)
    try:
        if arguments.verify:
            verify(arguments)
        else:
            prepare(arguments)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("Interrupted; the same command resumes.", file=sys.stderr)
        return 130
    return 0


def parse(argv: list[str] | None) -> argparse.Namespace:
    defaults = TextSource()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("folder", help="folder of the token files")
    parser.add_argument("--tokenizer", help="folder with a tokenizer.json (and tokenizer_config.json)")
    parser.add_argument(
        "--dataset",
        default=defaults.dataset,
        help='"owner/name" of the Hugging Face hub, or "shakespeare" (%(default)s)',
    )
    parser.add_argument("--dataset_path", help="file or folder of .txt, .jsonl, .jsonl.gz or .parquet")
    parser.add_argument("--dataset_config", help="configuration of the hub dataset, if it has several")
    parser.add_argument("--dataset_revision", help="commit or tag of the hub dataset; by default the latest")
    parser.add_argument(
        "--split", default=defaults.split, help="split of the hub dataset (%(default)s); documents for "
        "validation are selected when the files are read",
    )  # fmt: skip
    parser.add_argument(
        "--text_column", default=defaults.text_column, help="column or key of the text (%(default)s)"
    )
    parser.add_argument(
        "--processes", type=int, default=os.cpu_count(), help="for tokenization (%(default)s)"
    )
    parser.add_argument(
        "--shard_tokens", type=int, default=SHARD_TOKENS, help="tokens per file (%(default)s)"
    )
    parser.add_argument("--verify", action="store_true", help="only compare the files with their SHA-256")
    arguments = parser.parse_args(argv)
    if not arguments.verify and arguments.tokenizer is None:
        parser.error("--tokenizer is missing: name a folder with a tokenizer.json")
    return arguments


def prepare(arguments: argparse.Namespace) -> None:
    source = TextSource(
        dataset=arguments.dataset,
        dataset_path=arguments.dataset_path,
        dataset_config=arguments.dataset_config,
        dataset_revision=arguments.dataset_revision,
        split=arguments.split,
        text_column=arguments.text_column,
    )
    with progress_bar("documents") as bar:
        task = bar.add_task("", total=estimate_documents(source), rate="")
        index = prepare_tokens(
            source,
            arguments.tokenizer,
            arguments.folder,
            processes=arguments.processes,
            shard_tokens=arguments.shard_tokens,
            on_progress=Meter(bar, task),
        )
        bar.update(task, completed=index.documents, total=index.documents)
    print(
        f"{arguments.folder}: {index.tokens:,} tokens of {index.documents:,} documents in "
        f"{len(index.shards)} files"
    )


class Meter:
    """Shows the number of documents, and tokens per second since the start."""

    def __init__(self, bar: Progress, task: TaskID) -> None:
        self._bar, self._task = bar, task
        self._first: int | None = None

    def __call__(self, documents: int, tokens: int) -> None:
        if self._first is None:
            # Without the tokens of earlier, interrupted calls.
            self._first = tokens
            self._bar.reset(self._task, completed=documents, rate="")
        seconds = self._bar.tasks[self._task].elapsed or 0
        rate = f", {(tokens - self._first) / seconds / 1e6:,.2f} M/s" if seconds else ""
        self._bar.update(self._task, completed=documents, rate=f"{tokens / 1e6:,.1f} M tokens{rate}")


def verify(arguments: argparse.Namespace) -> None:
    files = TokenFiles(arguments.folder)
    with progress_bar("files") as bar:
        task = bar.add_task("", total=len(files.index.shards), rate="")
        files.verify(lambda shard: bar.advance(task))
    print(f"{arguments.folder}: the SHA-256 of all {len(files.index.shards)} files is correct")


def progress_bar(of_what: str) -> Progress:
    console = Console(stderr=True)
    return Progress(
        BarColumn(),
        TextColumn("{task.completed:,} " + of_what),
        TextColumn("{task.fields[rate]}"),
        TimeElapsedColumn(),
        TextColumn("remaining"),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
    )


if __name__ == "__main__":
    sys.exit(main())
