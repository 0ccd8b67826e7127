"""The conversion of torchtitan's own script, with the whole model in memory, for `convert.py`.

`scripts/checkpoint_conversion/convert_to_hf.py` is not in torchtitan's package, and supports only models of
its registries; these are its steps for a model of a recipe.
"""

import sys

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import HuggingFaceStorageWriter

from titan_async.config.device import ensure_device


def main(recipe: str, checkpoint: str, out: str, dtype: str) -> None:
    ensure_device()
    from titan_async.config.recipe_file import resolve

    spec = resolve([recipe]).model_spec
    with torch.inference_mode():
        weights = spec.model.build().state_dict()
        dcp.load(weights, checkpoint_id=checkpoint)
        converted = spec.state_dict_adapter(spec.model, None).to_hf(weights)
        if dtype != "float32":
            converted = {name: value.to(getattr(torch, dtype)) for name, value in converted.items()}
        writer = HuggingFaceStorageWriter(
            path=out, save_distributed=True, enable_consolidation=True, thread_count_consolidation=5
        )
        dcp.save(converted, storage_writer=writer)


if __name__ == "__main__":
    main(*sys.argv[1:])
