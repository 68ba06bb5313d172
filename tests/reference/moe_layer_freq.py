"""Layers with experts of Megatron-LM's `moe_layer_freq`, for the tests of candle-ext/model/src/config/layer_freq.rs.

    pip install torch==2.15.0 && pip install --no-deps megatron-core==0.16.1
    python tests/reference/moe_layer_freq.py
"""

import json
from pathlib import Path

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_layer_specs
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_config import TransformerConfig

OUT = Path(__file__).resolve().parents[2] / "candle-ext" / "model" / "tests" / "fixtures" / "moe_layer_freq.json"


def layers(freq, n_layers):
    config = TransformerConfig(num_layers=n_layers, hidden_size=8, num_attention_heads=1, num_moe_experts=4,
                               moe_layer_freq=freq, add_bias_linear=False)
    specs = get_gpt_decoder_layer_specs(config, use_transformer_engine=False)
    return [spec.submodules.mlp.module is MoELayer for spec in specs]


cases = [(1, 3), (2, 5), (3, 7), (4, 3), ([1, 0, 0, 1], 4), ([0, 1, 1], 3), ([1, 1, 0], 3)]
OUT.write_text(json.dumps([dict(moe_layer_freq=freq, layers=layers(freq, n)) for freq, n in cases], indent=1) + "\n")
