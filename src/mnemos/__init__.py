"""Mnemos: sequence models whose memory learns at test time.

The engine and the layer live in `mnemos.memory`, which needs torch and safetensors alone; `mnemos.models` needs transformers too,
and is registered with its `AutoModelForCausalLM` wherever both are imported.
"""

from ._registration import register_models

__version__ = "0.1.0"

register_models()
