"""Keys of transformers' config classes with their defaults, for the tests of candle-ext/model/src/config/moe_keys.rs.

    pip install transformers==5.23.0
    python tests/reference/config_keys.py
"""

import json
from pathlib import Path

from transformers import AutoConfig

OUT = Path(__file__).resolve().parents[2] / "candle-ext" / "model" / "tests" / "fixtures" / "config_keys.json"
FAMILIES = ["mixtral", "olmoe", "qwen2_moe", "qwen3_moe", "dots1", "glm4_moe"]

# The default hidden size of GLM-4.5 is no multiple of its heads, so its checkpoints set the head size.
MORE = {"glm4_moe": {"head_dim": 128}}

configs = [AutoConfig.for_model(family, num_hidden_layers=2, **MORE.get(family, {})).to_dict() for family in FAMILIES]
OUT.write_text("[\n" + ",\n".join(json.dumps(config) for config in configs) + "\n]\n")
