"""Mnemos: sequence models whose memory learns at test time.

`mnemos.memory` holds the engine and the layer, and needs only torch and safetensors. `mnemos.models` also needs transformers, and
registers the models with `AutoModelForCausalLM` when both packages are imported.
"""

from ._registration import register_models
from .version import __version__ as __version__

register_models()
