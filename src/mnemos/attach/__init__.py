"""A memory for a pretrained model: `attach` puts memories beside the attention of a causal language model of transformers.

Importing it registers the type `mnemos_attached` with `AutoConfig` and `AutoModelForCausalLM`.
"""

from transformers import AutoConfig, AutoModelForCausalLM

from .adapter import load_adapter, save_adapter
from .cache import AttachedCache
from .config import AttachConfig, memory_names
from .control import MemoryControl
from .folders import save_merged
from .lora import add_lora, merge_lora
from .model import AttachedForCausalLM, attach
from .smollm import smollm, smollm_adapter
from .training import Teacher, distillation_loss, distillation_step, parameter_groups, teach, warmup_lambdas
from .transformers_config import AttachedModelConfig

AutoConfig.register(AttachedModelConfig.model_type, AttachedModelConfig, exist_ok=True)
AutoModelForCausalLM.register(AttachedModelConfig, AttachedForCausalLM, exist_ok=True)

__all__ = [
    "AttachConfig",
    "AttachedCache",
    "AttachedForCausalLM",
    "AttachedModelConfig",
    "MemoryControl",
    "Teacher",
    "add_lora",
    "attach",
    "distillation_loss",
    "distillation_step",
    "load_adapter",
    "memory_names",
    "merge_lora",
    "parameter_groups",
    "save_adapter",
    "save_merged",
    "smollm",
    "smollm_adapter",
    "teach",
    "warmup_lambdas",
]
