"""Text generation with a run's model: torchtitan's own model in one process, without a KV cache."""

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

__all__ = ["PromptTokenizer", "build_model", "sample_tokens"]


class PromptTokenizer:
    """Encodes prompts as documents are encoded in training, and decodes generated tokens.

    Args:
        folder: of a tokenizer.

    Raises:
        UserError: the folder has none, or it cannot be read.
    """

    def __init__(self, folder: str) -> None:
        self._encoder = DocumentEncoder(folder)
        self._tokenizer = load_tokenizer(folder)
        self.eos_id = self._encoder.eos_id
        """The end-of-text token; None without one."""

    def encode(self, prompt: str) -> list[int]:
        """The tokens of a prompt, with the BOS token and without the EOS token.

        Raises:
            UserError: there are none.
        """
        [tokens] = self._encoder([prompt])
        ids = [int(token) for token in tokens]
        if ids and ids[-1] == self.eos_id:
            ids.pop()
        if not ids and self._encoder.bos_id is not None:
            ids = [self._encoder.bos_id]  # if BOS and EOS are the same token
        if not ids:
            raise UserError("the tokenizer has no BOS token: give a --prompt")
        return ids

    def decode_stream(self, prompt: Sequence[int], tokens: Iterator[int]) -> Iterator[str]:
        """Decodes tokens as they are generated. Each yielded text consists of complete characters.

        Args:
            prompt: the tokens before the generated ones.
            tokens: the generated tokens.
        """
        ids = list(prompt)
        shown = self._tokenizer.decode(ids)
        for token in tokens:
            ids.append(token)
            text = self._tokenizer.decode(ids)
            if not text.endswith("\N{REPLACEMENT CHARACTER}"):
                yield text[len(shown) :]
                shown = text
        yield self._tokenizer.decode(ids)[len(shown) :]


def build_model(saved: SavedModel, device: torch.device) -> nn.Module:
    """Builds the model of a checkpoint on one device and loads its weights."""
    spec = copy.deepcopy(saved.config.model_spec)
    # Without the run's parallelism, which needs its ranks.
    config = Trainer.Config(model_spec=spec, override=copy.deepcopy(saved.config.override))
    config.training.seq_len = saved.config.training.seq_len
    # torchtitan's kernels are recompiled for each sequence length; these are not.
    config.override.imports = [*config.override.imports, *cpu_overrides.override_imports(config)]
    spec.model.update_from_config(config=config)
    apply_overrides(config.override, config)
    model = spec.model.build()
    tensors = model.state_dict()
    with torch.no_grad():
        for key in saved.mapping.shapes:
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
    eos_id: int | None,
    max_context: int,
) -> Iterator[int]:
    """Generates tokens one at a time until `eos_id`, which is not yielded.

    Args:
        model: on any device.
        tokens: the prompt, at least one.
        count: maximum number of new tokens.
        temperature: divides the logits; 0 is greedy decoding.
        top_k: samples from this many of the most likely tokens; None from all.
        seed: for sampling. The result does not depend on the device.
        eos_id: the end-of-text token; None for none.
        max_context: the model sees at most this many of the last tokens: the training's sequence length.
    """
    generator = torch.Generator().manual_seed(seed)
    device = next(model.parameters()).device
    ids = list(tokens)
    for _ in range(count):
        logits = _last_logits(model, torch.tensor([ids[-max_context:]], device=device))
        token = _sample(logits, temperature, top_k, generator)
        if token == eos_id:
            return
        ids.append(token)
        yield token


def _last_logits(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Logits [vocabulary] of the token after `tokens` [1, length], in float32 on the CPU."""
    positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    with torch.no_grad():
        masks = model.get_attention_masks(positions=positions)  # type: ignore[operator]
        return model(tokens, positions=positions, attention_masks=masks)[0, -1].float().cpu()


def _sample(logits: torch.Tensor, temperature: float, top_k: int | None, generator: torch.Generator) -> int:
    if temperature == 0:
        return int(logits.argmax())
    values, tokens = logits.topk(min(top_k or len(logits), len(logits)))
    sampled = torch.multinomial(torch.softmax(values / temperature, dim=0), 1, generator=generator)
    return int(tokens[sampled])
