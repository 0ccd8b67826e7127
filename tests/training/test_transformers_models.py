"""transformers loads the recipes' models, and computes the same logits."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.support.saved_runs import logits
from tests.support.transformers_models import LENGTH, MODELS, VOCAB, build


@MODELS
def test_keys_make_the_round_trip(spec: Any, described: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = build(spec, monkeypatch).state_dict()
    adapter = spec.state_dict_adapter(spec.model, None)
    back = adapter.from_hf(adapter.to_hf(weights))
    assert back.keys() == weights.keys()
    assert all(torch.equal(back[name], value) for name, value in weights.items())


@MODELS
def test_transformers_computes_the_same_logits(
    spec: Any, described: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transformers = pytest.importorskip("transformers")
    model = build(spec, monkeypatch)
    weights = spec.state_dict_adapter(spec.model, None).to_hf(model.state_dict())
    save_file(
        {name: value.contiguous() for name, value in weights.items()},
        tmp_path / "model.safetensors",
        metadata={"format": "pt"},
    )
    (tmp_path / "config.json").write_text(json.dumps(described))
    loaded, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, output_loading_info=True
    )
    assert not any(report.values()), report

    tokens = torch.randint(VOCAB, (2, LENGTH))
    ours = logits(model, tokens)
    with torch.no_grad():
        theirs = loaded.eval()(tokens).logits
    assert ours.std() > 0.5
    difference = float((ours - theirs).abs().max())
    assert difference < 1e-4
