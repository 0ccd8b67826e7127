"""What a model computes, in the words of Hugging Face's `config.json`: read, and compared with a recipe's."""

import json
from pathlib import Path
from typing import Any

from titan_async.errors import UserError
from titan_async.training.hf_architecture import LLAMA3_SCALING
from titan_async.whole_files import read_json

__all__ = ["KEPT_TYPE", "check_same", "read_description"]

KEPT_TYPE = (".mlp.gate.weight", ".mlp.gate.e_score_correction_bias")
"""Endings of tensors that no change of type touches: transformers keeps routers in float32."""

_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
    },
    "dots1": {
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "n_shared_experts": None,
        "first_k_dense_replace": 0,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
    },
}
"""What transformers takes for a field that a `config.json` leaves out."""

_DEFAULT_THETA = 10_000.0
_NOT_COMPARED = ("architectures", "max_position_embeddings", "max_window_layers")


def read_description(folder: Path) -> dict[str, Any]:
    """The fields of a folder's `config.json`, with transformers' defaults for those that it leaves out.

    Raises:
        UserError: there is no such file, or it cannot be read.
    """
    file = folder / "config.json"
    try:
        config = read_json(file)
    except FileNotFoundError:
        raise UserError(f"{folder} has no config.json: name a folder with a Hugging Face model") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{file} cannot be read ({error}); fetch it again") from error
    if not isinstance(config, dict):
        raise UserError(f"{file} is not a JSON object: fetch it again")
    try:
        return _with_defaults(config)
    except (AttributeError, TypeError) as error:
        raise UserError(f"{file} does not describe a model ({error}); fetch it again") from error


def _with_defaults(config: dict[str, Any]) -> dict[str, Any]:
    full = {**_DEFAULTS.get(str(config.get("model_type")), {}), **config}
    heads, width = config.get("num_attention_heads"), config.get("hidden_size")
    if full.get("num_key_value_heads") is None:
        full["num_key_value_heads"] = heads
    if full.get("head_dim") is None and isinstance(heads, int) and isinstance(width, int) and heads > 0:
        full["head_dim"] = width // heads
    # transformers 5 has `rope_parameters` where 4 has `rope_theta` and `rope_scaling`.
    rope = full.get("rope_scaling") or full.get("rope_parameters") or {}
    full["rope_theta"] = rope.get("rope_theta", full.get("rope_theta", _DEFAULT_THETA))
    kind = rope.get("rope_type", rope.get("type", "default"))
    full["rope_scaling"] = (
        None if kind == "default" else {"rope_type": kind} | {key: rope.get(key) for key in LLAMA3_SCALING}
    )
    layers = config.get("num_hidden_layers")
    slides = "sliding_attention" in (full.get("layer_types") or [])
    if not slides and ("layer_types" in config or full.get("max_window_layers", 62) >= (layers or 0)):
        full["sliding_window"] = None
    return full


def check_same(theirs: dict[str, Any], ours: dict[str, Any], *, folder: Path, recipe: str) -> None:
    """Refuses a Hugging Face model that computes something else than a recipe's.

    Args:
        theirs: from `read_description`.
        ours: from `describe`.
        folder: of the model, for the message.
        recipe: for the message.

    Raises:
        UserError: they differ; the sentence names the first field.
    """
    names = [name for name in ours if name not in _NOT_COMPARED]
    for name in sorted(names, key=lambda name: name != "model_type"):
        if theirs.get(name) != ours[name]:
            raise UserError(
                f"{folder / 'config.json'} has {name} = {json.dumps(theirs.get(name))}, where the model of "
                f"{recipe} has {json.dumps(ours[name])}: name a recipe of the same model"
            )
