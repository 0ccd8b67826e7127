"""Sampling tokens and decoding them, with models whose next token is known."""

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
from titan_async.huggingface.sampling import PromptTokenizer, sample_tokens

VOCAB = 12


class Counting(nn.Module):
    """Token t is followed by t + 1, t + 2, t + 3 and so on, each e times less likely."""

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


def sample(model: nn.Module | None = None, **options: object) -> list[int]:
    settings = {
        "count": 5, "temperature": 0.0, "top_k": None, "seed": 0, "eos_id": None, "max_context": 100
    }  # fmt: skip
    return list(sample_tokens(model or Counting(), [3], **{**settings, **options}))


def test_temperature_zero_is_greedy() -> None:
    assert sample() == [4, 5, 6, 7, 8]
    assert sample(temperature=3.0, top_k=1) == [4, 5, 6, 7, 8]


def test_sampling_stops_at_eos() -> None:
    assert sample(eos_id=6) == [4, 5]


def test_context_is_limited() -> None:
    model = Counting()
    assert sample(model, max_context=3, count=6) == [4, 5, 6, 7, 8, 9]
    assert model.lengths == [1, 2, 3, 3, 3, 3]


def test_samples_follow_the_distribution() -> None:
    temperature, top_k, count = 2.0, 4, 4000
    tokens = [3, *sample(count=count, temperature=temperature, top_k=top_k)]
    steps = torch.tensor([(after - before - 1) % VOCAB for before, after in pairwise(tokens)])
    shares = torch.bincount(steps, minlength=VOCAB) / count
    expected = torch.softmax(-torch.arange(top_k) / temperature, dim=0)
    assert shares[top_k:].sum() == 0
    assert (shares[:top_k] - expected).abs().max() < 0.03


def test_samples_depend_on_the_seed_only() -> None:
    first, again, other = [sample(count=50, temperature=1.0, seed=seed) for seed in (1, 1, 2)]
    assert first == again != other


def test_stream_decodes_complete_characters() -> None:
    tokenizer = PromptTokenizer(str(shakespeare_tokenizer_folder()))
    text = "naïve - 漢字 \n  end"
    prompt, tokens = tokenizer.encode("So: "), tokenizer.encode(text)[1:]
    pieces = list(tokenizer.decode_stream(prompt, iter(tokens)))
    assert "".join(pieces) == text and len(pieces) > 5
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)


def test_prompt_is_encoded_as_in_training(tmp_path: Path) -> None:
    tokenizer = PromptTokenizer(str(shakespeare_tokenizer_folder()))
    reference = load_tokenizer(shakespeare_tokenizer_folder())
    assert tokenizer.encode("To be") == [0, *reference.encode("To be").ids]
    assert tokenizer.encode("") == [0]
    assert tokenizer.eos_id == 0
    (tmp_path / "tokenizer.json").write_text(reference.to_str())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>"}))
    without_bos = PromptTokenizer(str(tmp_path))
    assert without_bos.encode("To be") == reference.encode("To be").ids
    with pytest.raises(UserError, match="has no BOS token: give a --prompt"):
        without_bos.encode("")


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    save_run(folder)
    return folder


def run_sample(capsys: pytest.CaptureFixture[str], *argv: object) -> str:
    assert main(["sample", *map(str, argv)]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def test_sample_prints_prompt_and_text(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = (run_dir, "--prompt", "--ROMEO:", "--tokens", 12)
    first = run_sample(capsys, *flags)
    assert first.startswith("--ROMEO:") and first.endswith("\n") and len(first) > len("--ROMEO:") + 12
    assert run_sample(capsys, *flags) == first == run_sample(capsys, *flags, "--seed=0")
    assert run_sample(capsys, *flags, "--seed", 1) != first
    greedy = run_sample(capsys, *flags, "--temperature", 0)
    assert run_sample(capsys, *flags, "--top-k", 1, "--seed", 5) == greedy != first


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
        (["{run}/checkpoint/step-6"], "{run}/checkpoint has no complete checkpoint of step 6: use step 7"),
        (["absent"], "absent is not a folder: name that of a run, or of a checkpoint in it"),
    ],
)
def test_user_error_is_one_line(
    argv: list[str], sentence: str, run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sample", *(word.format(run=run_dir) for word in argv)]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    assert captured.err.startswith(sentence.format(run=run_dir))
