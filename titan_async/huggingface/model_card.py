"""The first page of a model's repository: what was trained, and how to load it."""

from typing import Any

from titan_async import __version__
from titan_async.huggingface.saved_model import SavedModel

__all__ = ["model_card"]

_WEIGHTS = {
    "newest": "The weights are the newest ones",
    "stale": "The weights are one update older than the newest ones",
    "ema": "The weights are an exponential moving average over training",
}


def model_card(saved: SavedModel, description: dict[str, Any], recipe: str, parameters: int) -> str:
    """Returns the text of `README.md`: a stub that says what is known, with the recipe.

    Args:
        saved: what was converted.
        description: the content of `config.json`.
        recipe: the whole recipe, as TOML.
        parameters: of the model.
    """
    name, architecture = saved.resolved.recipe, description["architectures"][0]
    config = saved.config
    return f"""\
---
library_name: transformers
pipeline_tag: text-generation
tags:
- titan_async
---

# {name}

A language model of {parameters:,} parameters (`{architecture}`), trained with titan_async {__version__}
under the schedule {config.parallelism.pipeline_parallel_schedule}, by the recipe below, up to step
{saved.step:,} of {config.training.steps:,}, on sequences of {config.training.seq_len:,} tokens.
{_WEIGHTS[saved.weights]}.

Its authors have yet to say: what it is for, what it was evaluated on, its limits, and its license.

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("PATH")
tokenizer = AutoTokenizer.from_pretrained("PATH")
```

In training each document began with the token `bos_token_id` of `config.json`, if there is one; the tokenizer
begins each prompt with it.

## Recipe

```toml
{recipe.rstrip()}
```
"""
