"""Weights of the project's mixtures of experts under the names that Hugging Face's dots.llm1 gives them.

torchtitan's adapter of Qwen3 knows all but the shared experts and the router's bias, which transformers'
Qwen3 mixture does not have either. `Dots1ForCausalLM` has both, and computes the same: queries and keys are
normalized a head, rotary positions cover whole heads and rotate halves, the router scores in float32 by a
sigmoid, chooses by score plus bias, and weights by score.
"""

from torchtitan.models.qwen3.model import Qwen3Model
from torchtitan.models.qwen3.state_dict_adapter import Qwen3StateDictAdapter

__all__ = ["Dots1StateDictAdapter"]


class Dots1StateDictAdapter(Qwen3StateDictAdapter):
    """To and from the checkpoint format of transformers' `Dots1ForCausalLM`."""

    def __init__(self, model_config: Qwen3Model.Config, hf_assets_path: str | None) -> None:
        super().__init__(model_config, hf_assets_path)
        self.from_hf_map |= {
            "model.layers.{}.mlp.shared_experts.gate_proj.weight": "layers.{}.moe.shared_experts.w1.weight",
            "model.layers.{}.mlp.shared_experts.up_proj.weight": "layers.{}.moe.shared_experts.w3.weight",
            "model.layers.{}.mlp.shared_experts.down_proj.weight": "layers.{}.moe.shared_experts.w2.weight",
            "model.layers.{}.mlp.gate.e_score_correction_bias": "layers.{}.moe.expert_bias_E",
        }
