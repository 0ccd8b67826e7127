"""Drawing tokens and showing text, with models whose next token is known."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.support.saved_runs import save_run
from titan_async.cli.main import main
from titan_async.data import shakespeare_tokenizer_folder
from titan_async.data.tokenizer import load_tokenizer
from titan_async.errors import UserError
from titan_async.huggingface.sampling import Vocabulary, sample_tokens

VOCAB = 12


class Counting(nn.Module):
    """After token t comes t + 1, or else t + 2, t + 3 and so on, each e times less likely."""

    def __init__(self) -> None:
        super().__init__()
        self.anything = nn.Parameter(torch.zeros(1))
        self.lengths: list[int] = []

    def get_attention_masks(self, positions: torch.Tensor) -> torch.Tensor:
        assert positions.tolist() == [list(range(positions.shape[1]))]
        return torch.ones(1)

    def forward(
        self, tokens: torch.Tensor, positions: torch.Tensor, attention_masks: torch.Tensor
    ) -> torch.Tensor:
        self.lengths.append(tokens.shape[1])
        steps = (torch.arange(VOCAB) - tokens[..., None] - 1) % VOCAB
        return -steps.float()


def draw(model: nn.Module | None = None, **options: object) -> list[int]:
    settings = {"count": 5, "temperature": 0.0, "top_k": None, "seed": 0, "end": None, "window": 100}
    return list(sample_tokens(model or Counting(), [3], **{**settings, **options}))


def test_no_temperature_takes_the_likeliest() -> None:
    assert draw() == [4, 5, 6, 7, 8]
    assert draw(temperature=3.0, top_k=1) == [4, 5, 6, 7, 8]


def test_it_stops_at_the_end_of_the_text() -> None:
    assert draw(end=6) == [4, 5]


def test_the_model_sees_what_it_was_trained_to_see() -> None:
    model = Counting()
    assert draw(model, window=3, count=6) == [4, 5, 6, 7, 8, 9]
    assert model.lengths == [1, 2, 3, 3, 3, 3]


def test_tokens_are_drawn_as_the_model_predicts() -> None:
    temperature, top_k, count = 2.0, 4, 4000
    tokens = [3, *draw(count=count, temperature=temperature, top_k=top_k)]
    steps = torch.tensor([(after - before - 1) % VOCAB for before, after in pairwise(tokens)])
    shares = torch.bincount(steps, minlength=VOCAB) / count
    expected = torch.softmax(-torch.arange(top_k) / temperature, dim=0)
    assert shares[top_k:].sum() == 0
    assert (shares[:top_k] - expected).abs().max() < 0.03


def test_the_seed_decides() -> None:
    many = [draw(count=50, temperature=1.0, seed=seed) for seed in (1, 1, 2)]
    assert many[0] == many[1] != many[2]


def test_text_comes_in_whole_characters() -> None:
    vocabulary = Vocabulary(str(shakespeare_tokenizer_folder()))
    text = "naïve - 漢字 \n  end"
    before, tokens = vocabulary.begin("So: "), vocabulary.begin(text)[1:]
    pieces = list(vocabulary.text(before, iter(tokens)))
    assert "".join(pieces) == text and len(pieces) > 5
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)


def test_a_text_begins_as_in_training(tmp_path: Path) -> None:
    vocabulary = Vocabulary(str(shakespeare_tokenizer_folder()))
    tokenizer = load_tokenizer(shakespeare_tokenizer_folder())
    assert vocabulary.begin("To be") == [0, *tokenizer.encode("To be").ids]
    assert vocabulary.begin("") == [0]
    assert vocabulary.end == 0
    (tmp_path / "tokenizer.json").write_text(tokenizer.to_str())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>"}))
    without = Vocabulary(str(tmp_path))
    assert without.begin("To be") == tokenizer.encode("To be").ids
    with pytest.raises(UserError, match="has no token to begin a text with: give a --prompt"):
        without.begin("")


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    save_run(folder)
    return folder


def sampled(capsys: pytest.CaptureFixture[str], *argv: object) -> str:
    assert main(["sample", *map(str, argv)]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def test_the_command_prints_prompt_and_text(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = (run_dir, "--prompt", "--ROMEO:", "--tokens", 12)
    first = sampled(capsys, *flags)
    assert first.startswith("--ROMEO:") and first.endswith("\n") and len(first) > len("--ROMEO:") + 12
    assert sampled(capsys, *flags) == first == sampled(capsys, *flags, "--seed=0")
    assert sampled(capsys, *flags, "--seed", 1) != first
    greedy = sampled(capsys, *flags, "--temperature", 0)
    assert sampled(capsys, *flags, "--top-k", 1, "--seed", 5) == greedy != first


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        ([], "titan-async sample takes RUN_DIR[/checkpoint/step-N], not nothing"),
        (["{run}", "--tokens", "0"], "--tokens: must be an integer of at least 1, not 0"),
        (["{run}", "--top-k", "x"], "--top-k: must be an integer of at least 0, not x"),
        (["{run}", "--seed", "-1"], "--seed: must be an integer of at least 0, not -1"),
        (["{run}", "--temperature", "-0.1"], "--temperature: must be 0 or a positive number, not -0.1"),
        (["{run}", "--temperature", "nan"], "--temperature: must be 0 or a positive number, not nan"),
        (["{run}", "--weights", "stale"], "{run}/checkpoint/step-7 has no stale weights: only runs under"),
        (["{run}", "--promt", "a"], "unknown flag --promt; did you mean --prompt?"),
        (["{run}/checkpoint/step-6"], "{run}/checkpoint has no whole checkpoint of step 6: use step 7"),
        (["absent"], "absent is no folder: name that of a run, or of a checkpoint in it"),
    ],
)
def test_a_mistake_is_one_sentence(
    argv: list[str], sentence: str, run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sample", *(word.format(run=run_dir) for word in argv)]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    assert captured.err.startswith(sentence.format(run=run_dir))
