"""The configuration of a rehearsal: the recipe's layers, experts and ranks, a fraction of its widths."""

import copy
import dataclasses
import json
import random
from pathlib import Path
from string import ascii_lowercase
from typing import Any

from torchtitan.config import Configurable
from torchtitan.models.common.rope import RoPE
from torchtitan.trainer import Trainer

from titan_async.data import shakespeare_tokenizer_folder
from titan_async.errors import UserError
from titan_async.training.dataloader import TextDataLoader
from titan_async.training.preflight.layout import non_data_parallel_size

__all__ = ["SEQ_LEN", "narrowed", "prepared", "world_size"]

SEQ_LEN = 64
"""Tokens of a sequence in a rehearsal, unless the recipe has fewer."""

_VOCABULARY = 2048  # of the text that replaces the recipe's

_DOCUMENTS = 16  # per rank

_WIDTHS = (
    "dim",
    "hidden_dim",
    "head_dim",
    "embedding_dim",
    "in_features",
    "out_features",
    "normalized_shape",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
)
"""Fields of torchtitan's modules that are widths; numbers of layers, heads, experts and tokens are not."""

_NUMBERED_OUTPUTS = ("lm_head", "router.gate")
"""Modules whose `out_features` is the vocabulary size or the number of experts."""


def world_size(config: Trainer.Config) -> int:
    """The product of the degrees of parallelism.

    Raises:
        UserError: if a degree is -1.
    """
    parallelism = config.parallelism
    if parallelism.data_parallel_shard_degree < 1:
        raise UserError(
            "parallelism.data_parallel_shard_degree is -1, which depends on the number of GPUs: set it to "
            "the degree of the run to rehearse"
        )
    return (
        non_data_parallel_size(parallelism)
        * parallelism.data_parallel_replicate_degree
        * parallelism.data_parallel_shard_degree
    )


def prepared(config: Trainer.Config, *, steps: int, folder: str) -> Trainer.Config:
    """A copy that trains on generated text, eagerly, for a few short steps, and saves after the last.

    Args:
        config: the recipe's; not changed.
        steps: updates.
        folder: for the files of the run.

    Raises:
        UserError: if the model's vocabulary is too small for the text.
    """
    vocabulary = getattr(config.model_spec.model, "vocab_size", _VOCABULARY)
    if vocabulary < _VOCABULARY:
        raise UserError(
            f"a rehearsal needs a vocabulary of at least {_VOCABULARY} tokens, but the model has "
            f"{vocabulary}: use a recipe with a larger one"
        )
    changes: dict[str, Any] = {
        "comm": {"mode": "fake_backend"},
        "compile": {"enable": False},
        "validator": {"enable": False},
        "profiler": {"enable_profiling": False, "enable_memory_snapshot": False},
        "metrics": {"enable_tensorboard": False, "enable_wandb": False},
        "training": {"steps": steps, "seq_len": min(config.training.seq_len, SEQ_LEN)},
        # Updates during warm-up and decay could be smaller than the rounding of the weights.
        "lr_scheduler": {"warmup_steps": 0, "decay_ratio": 0.0, "total_steps": None},
        "checkpoint": {
            "enable": True,
            "interval": steps + 1,
            "async_mode": "disabled",
            "initial_load_path": None,
            "load_step": -1,
            "load_only": False,
            "last_save_model_only": False,
            "last_save_in_hf": False,
        },
        "debug": {"seed": 0, "enable_structured_logging": False},
        # Ranks run one after another, so stage times cannot be measured.
        "pipeline": {
            "balance": "layers",
            "synchronous_steps": min(config.pipeline.resolved_synchronous_steps(config.training.steps), 1),
        },
    }
    fields: dict[str, Any] = {
        name: dataclasses.replace(
            section, **{key: value for key, value in new.items() if hasattr(section, key)}
        )
        for name, new in changes.items()
        if (section := getattr(config, name, None)) is not None
    }
    text = _text_in(folder, _DOCUMENTS * world_size(config))
    return dataclasses.replace(
        config,
        **fields,
        model_spec=dataclasses.replace(config.model_spec, model=copy.deepcopy(config.model_spec.model)),
        dataloader=TextDataLoader.Config(dataset_path=text, validation_fraction=0.0),
        hf_assets_path=str(shakespeare_tokenizer_folder()),
        dump_folder=folder,
    )


def _text_in(folder: str, documents: int) -> str:
    """The path of a file of random documents, the same on every rank and in every run."""
    path, generator = Path(folder, "text.jsonl"), random.Random(0)
    words = ["".join(generator.choices(ascii_lowercase, k=generator.randint(2, 9))) for _ in range(1000)]
    with open(path, "w", encoding="utf-8") as file:
        for _ in range(documents):
            file.write(json.dumps({"text": " ".join(generator.choices(words, k=40))}) + "\n")
    return str(path)


def narrowed(config: Trainer.Config, divisor: int) -> Trainer.Config:
    """A copy whose model has every width divided by `divisor`.

    Raises:
        UserError: if it does not divide a width.
    """
    model = copy.deepcopy(config.model_spec.model)
    for name, node, _, _ in model.traverse(Configurable.Config, recurse=True):
        for field in _WIDTHS:
            width = getattr(node, field, None)
            if isinstance(width, int) and not (field == "out_features" and name.endswith(_NUMBERED_OUTPUTS)):
                setattr(node, field, _divided(width, divisor, f"{name}.{field}".lstrip(".")))
                if isinstance(node, RoPE.Config) and getattr(node, field) % 2:
                    raise UserError(
                        f"the width divisor {divisor} makes {name}.{field} odd, but rotary embeddings need "
                        "even sizes: use half the divisor"
                    )
    optimizer = copy.deepcopy(config.optimizer)
    for group in optimizer.param_groups:
        sizes = group.optimizer_kwargs.get("split_sizes")
        if sizes:
            group.optimizer_kwargs["split_sizes"] = [
                _divided(size, divisor, f"split_sizes of {group.pattern}") for size in sizes
            ]
    return dataclasses.replace(
        config, model_spec=dataclasses.replace(config.model_spec, model=model), optimizer=optimizer
    )


def _divided(width: int, divisor: int, name: str) -> int:
    if width % divisor:
        raise UserError(
            f"the width divisor {divisor} does not divide {name}, which is {width}: use a divisor of {width}"
        )
    return width // divisor
