"""Measures how many tokens per second data loaders deliver to one process, on CPU.

    python tools/bench/data.py [--repeats 5] [--millions 32] [--json results.json]

Compares TextDataLoader on token files, TextDataLoader on the same text, and torchtitan's own
HuggingFaceTextDataLoader on that text, streamed by `datasets`. The text consists of random words; its
documents have 1000 tokens on average, like web pages, or 50. The token files repeat the same documents up to
the given number of tokens.

Each loader runs in this process, without workers, for the same number of batches after a warm-up of two; the
loaders alternate. Figures are medians of the repetitions, in wall-clock time and in processor time, which
other programs affect less.
"""

import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from _harness import Bench, Measured, median, record_of, table

# Before tokenizers and datasets are imported. A rank has about one thread for its data loader.
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["HF_HUB_OFFLINE"] = "1"

import numpy as np

BENCH = Bench(__doc__, repeats=5, packages=("torchtitan", "datasets", "numpy"))
BENCH.add_argument("--millions", type=int, default=32, help="of tokens in the files (%(default)s)")
BENCH.add_argument("--documents", type=int, nargs="+", default=[1000, 50], help="tokens per document")

WORDS = "what light through yonder window breaks it is the east and Juliet sun arise fair kill envious moon"
TEXT_BATCHES = 20
"""A loader that tokenizes is measured on fewer batches."""


@dataclass
class Result:
    """One loader on documents of one length and sequences of another."""

    document: int
    seq_len: int
    batch_size: int
    loader: str
    clock: list[float] = field(default_factory=list)
    """Tokens per second, by repetition."""
    computed: list[float] = field(default_factory=list)
    """The same in processor time."""

    @property
    def medians(self) -> tuple[float, float]:
        return median(self.clock) or 0.0, median(self.computed) or 0.0


def write_text(file: Path, mean: int) -> None:
    """Writes documents of about `mean` tokens on average, one per line."""
    random, words = np.random.default_rng(0), np.array(WORDS.split())
    # A word has about 1.4 tokens of the default tokenizer. Lengths are distributed like those of web pages.
    lengths = np.maximum(random.lognormal(np.log(mean / 1.4) - 0.5, 1.0, 2_000_000 // mean), 2).astype(int)
    with file.open("w") as opened:
        for length in lengths:
            opened.write(json.dumps({"text": " ".join(words[random.integers(0, len(words), length)])}) + "\n")


def write_tokens(folder: Path, text: Path, tokens: int) -> None:
    """Writes token files of the text, repeated under other names up to `tokens` tokens."""
    from dataclasses import replace

    from titan_async.data import TextSource, prepare_tokens, shakespeare_tokenizer_folder
    from titan_async.data.token_files import write_index

    index = prepare_tokens(TextSource(dataset_path=str(text)), shakespeare_tokenizer_folder(), folder)
    times = max(1, round(tokens / index.tokens))
    shards = []
    for number in range(times * len(index.shards)):
        shard = index.shards[number % len(index.shards)]
        name = f"tokens-{number:05}.safetensors"
        if number >= len(index.shards):
            (folder / name).write_bytes((folder / shard.name).read_bytes())
        shards.append(replace(shard, name=name))
    counts = {"documents": index.documents * times, "tokens": index.tokens * times}
    write_index(folder, replace(index, shards=tuple(shards), **counts))


def loaders(text: Path, tokens: Path, seq_len: int, batch_size: int) -> dict[str, Callable[[], Any]]:
    """Functions that create the loaders."""
    import datasets
    from torchtitan.components.tokenizer import HuggingFaceTokenizer
    from torchtitan.hf_datasets import DatasetConfig
    from torchtitan.hf_datasets.text_datasets import DATASETS, HuggingFaceTextDataLoader

    from titan_async.data import shakespeare_tokenizer_folder
    from titan_async.training.dataloader import TextDataLoader

    DATASETS["bench"] = DatasetConfig(
        path=str(text),
        loader=lambda path: datasets.load_dataset(  # nosec B615  # of a file on this machine
            "json", data_files=path, streaming=True, split="train"
        ),
        sample_processor=lambda record: record["text"],
    )
    common = {
        "dp_world_size": 1,
        "dp_rank": 0,
        "tokenizer": HuggingFaceTokenizer(tokenizer_path=str(shakespeare_tokenizer_folder())),
        "seq_len": seq_len,
        "local_batch_size": batch_size,
    }
    return {
        "ours, token files": lambda: TextDataLoader.Config(dataset="tokens", dataset_path=str(tokens)).build(
            **common
        ),
        "ours, text": lambda: TextDataLoader.Config(dataset_path=str(text)).build(**common),
        "torchtitan, text": lambda: HuggingFaceTextDataLoader.Config(dataset="bench").build(**common),
    }


def run(make: Callable[[], Iterator], batches: int, result: Result) -> None:
    iterator = iter(make())
    for _ in range(2):
        next(iterator)
    clock, computed = time.perf_counter(), time.process_time()
    for _ in range(batches):
        next(iterator)
    tokens = batches * result.seq_len * result.batch_size
    result.clock.append(tokens / (time.perf_counter() - clock))
    result.computed.append(tokens / (time.process_time() - computed))


def measure(documents: list[int], repeats: int, millions: int) -> list[Result]:
    results = []
    for mean in documents:
        with tempfile.TemporaryDirectory() as folder:
            text, tokens = Path(folder, "text.jsonl"), Path(folder, "tokens")
            write_text(text, mean)
            write_tokens(tokens, text, millions * 10**6)
            for seq_len, batch_size in ((4096, 8), (256, 8)):
                made = loaders(text, tokens, seq_len, batch_size)
                row = {name: Result(mean, seq_len, batch_size, name) for name in made}
                whole = millions * 10**6 // (seq_len * batch_size) - 3
                for _ in range(repeats):
                    for name, make in made.items():
                        few = name != "ours, token files"
                        run(make, min(TEXT_BATCHES, whole) if few else min(whole, 1000), row[name])
                results += row.values()
    return results


@BENCH.part("loaders")
def _loaders(bench: Bench) -> Measured:
    results = measure(bench.arguments.documents, bench.repeats, bench.arguments.millions)
    theirs = {
        (result.document, result.seq_len): result.medians[1]
        for result in results
        if result.loader.startswith("torchtitan")
    }
    columns = {
        "document": lambda r: r.document,
        "sequence": lambda r: r.seq_len,
        "batch": lambda r: r.batch_size,
        "loader": lambda r: r.loader,
        "by the clock": lambda r: f"{r.medians[0] / 1e3:,.0f}",
        "computing": lambda r: f"{r.medians[1] / 1e3:,.0f}",
        "ratio": lambda r: f"{r.medians[1] / theirs[r.document, r.seq_len]:,.1f}",
    }
    title = "Thousands of tokens per second in one process"
    return Measured([record_of(result) for result in results], [table(title, columns, results)])


if __name__ == "__main__":
    BENCH.main()
