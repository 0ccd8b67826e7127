"""Text that a run's model makes: by torchtitan's own model, in one process, without a cache of keys."""

import copy
from collections.abc import Iterator, Sequence

import torch
from torch import nn
from torchtitan.config.override import apply_overrides
from torchtitan.trainer import Trainer

from titan_async.data import DocumentEncoder
from titan_async.data.tokenizer import load_tokenizer
from titan_async.errors import UserError
from titan_async.huggingface.saved_model import SavedModel
from titan_async.training.models import cpu_overrides

__all__ = ["Vocabulary", "build_model", "sample_tokens"]


class Vocabulary:
    """Text to tokens and back, as in training.

    Args:
        folder: of a tokenizer.

    Raises:
        UserError: the folder has none, or it cannot be read.
    """

    def __init__(self, folder: str) -> None:
        self._encoder = DocumentEncoder(folder)
        self._tokenizer = load_tokenizer(folder)
        self.end = self._encoder.eos_id
        """The token that ends a text; None without one."""

    def begin(self, prompt: str) -> list[int]:
        """The tokens of a text that begins with `prompt`.

        Raises:
            UserError: there are none.
        """
        [tokens] = self._encoder([prompt])
        ids = [int(token) for token in tokens]
        if ids and ids[-1] == self.end:
            ids.pop()  # what ends a document
        if not ids and self._encoder.bos_id is not None:
            ids = [self._encoder.bos_id]  # where one token both begins and ends documents
        if not ids:
            raise UserError("the tokenizer has no token to begin a text with: give a --prompt")
        return ids

    def text(self, before: Sequence[int], tokens: Iterator[int]) -> Iterator[str]:
        """The text of `tokens`, in pieces, as they come.

        A piece is whole characters, of which a token may have a part only.

        Args:
            before: the tokens in front of them.
            tokens: the new ones.
        """
        ids = list(before)
        shown = self._tokenizer.decode(ids)
        for token in tokens:
            ids.append(token)
            text = self._tokenizer.decode(ids)
            if not text.endswith("\N{REPLACEMENT CHARACTER}"):
                yield text[len(shown) :]
                shown = text
        yield self._tokenizer.decode(ids)[len(shown) :]


def build_model(saved: SavedModel, device: torch.device) -> nn.Module:
    """The model of a checkpoint, with its weights, as it trains on one device."""
    spec = copy.deepcopy(saved.config.model_spec)
    # Without the run's parallelism, which would want its ranks.
    config = Trainer.Config(model_spec=spec, override=copy.deepcopy(saved.config.override))
    config.training.seq_len = saved.config.training.seq_len
    # torchtitan's kernels are compiled anew for each length of the text; these are not.
    config.override.imports = [*config.override.imports, *cpu_overrides.override_imports(config)]
    spec.model.update_from_config(config=config)
    apply_overrides(config.override, config)
    model = spec.model.build()
    tensors = model.state_dict()
    with torch.no_grad():
        for key in saved.layout.shapes:
            tensors[key].copy_(saved.read(key))
    return model.to(device).eval()


def sample_tokens(
    model: nn.Module,
    tokens: Sequence[int],
    *,
    count: int,
    temperature: float,
    top_k: int | None,
    seed: int,
    end: int | None,
    window: int,
) -> Iterator[int]:
    """Tokens that follow `tokens`, drawn one after the other until `end`, which is left out.

    Args:
        model: on any device.
        tokens: at least one.
        count: of new tokens, at most.
        temperature: divides the logits; 0 takes the likeliest token.
        top_k: draws among so many of the likeliest; None among all.
        seed: of the draws, which do not depend on the device.
        end: the token that ends a text.
        window: the longest sequence of the training; the model sees no more of the text.
    """
    generator = torch.Generator().manual_seed(seed)
    device = next(model.parameters()).device
    ids = list(tokens)
    for _ in range(count):
        logits = _last_logits(model, torch.tensor([ids[-window:]], device=device))
        token = _draw(logits, temperature, top_k, generator)
        if token == end:
            return
        ids.append(token)
        yield token


def _last_logits(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Logits [vocabulary] in float32, on the CPU, of what follows `tokens` [1, length]."""
    positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    with torch.no_grad():
        masks = model.get_attention_masks(positions=positions)  # type: ignore[operator]
        return model(tokens, positions=positions, attention_masks=masks)[0, -1].float().cpu()


def _draw(logits: torch.Tensor, temperature: float, top_k: int | None, generator: torch.Generator) -> int:
    if temperature == 0:
        return int(logits.argmax())
    among = min(top_k or len(logits), len(logits))
    values, tokens = logits.topk(among)
    chosen = torch.multinomial(torch.softmax(values / temperature, dim=0), 1, generator=generator)
    return int(tokens[chosen])
