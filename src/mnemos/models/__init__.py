"""The model family: one config, one model, registered blocks and gates, and presets.

Needs transformers. Importing it registers the models with `AutoConfig`, `AutoModel` and `AutoModelForCausalLM`.
"""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from . import presets
from .cache import MnemosCache
from .config import MnemosConfig
from .gate import Gate, register_gate
from .mixer import Mixer, register_block
from .model import MnemosForCausalLM, MnemosModel

AutoConfig.register(MnemosConfig.model_type, MnemosConfig, exist_ok=True)
AutoModel.register(MnemosConfig, MnemosModel, exist_ok=True)
AutoModelForCausalLM.register(MnemosConfig, MnemosForCausalLM, exist_ok=True)

__all__ = [
    "Gate",
    "Mixer",
    "MnemosCache",
    "MnemosConfig",
    "MnemosForCausalLM",
    "MnemosModel",
    "presets",
    "register_block",
    "register_gate",
]
