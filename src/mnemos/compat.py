"""Models under the names of other implementations: see `mnemos.models.compat`."""

from .models.compat.configs import (
    AtlasConfig,
    TitansConfig,
    atlas_large,
    atlas_medium,
    atlas_small,
    titans_large,
    titans_medium,
    titans_small,
)
from .models.compat.feature_maps import LearnableTaylorKernel, PolynomialFeatureMap, PolynomialFeatures
from .models.compat.language_model import Atlas, DeepTransformer, OmegaNet, TitansLM
from .models.compat.memory import AtlasAttention, AtlasMemoryUpdate, DeepMemoryModule, NeuralMemory, Surprises
from .models.compat.transformer import (
    AtlasLMM,
    MemoryAsContextTransformer,
    MemoryAsGateTransformer,
    MemoryAsLayerTransformer,
)

__all__ = [
    "Atlas",
    "AtlasAttention",
    "AtlasConfig",
    "AtlasLMM",
    "AtlasMemoryUpdate",
    "DeepMemoryModule",
    "DeepTransformer",
    "LearnableTaylorKernel",
    "MemoryAsContextTransformer",
    "MemoryAsGateTransformer",
    "MemoryAsLayerTransformer",
    "NeuralMemory",
    "OmegaNet",
    "PolynomialFeatureMap",
    "PolynomialFeatures",
    "Surprises",
    "TitansConfig",
    "TitansLM",
    "atlas_large",
    "atlas_medium",
    "atlas_small",
    "titans_large",
    "titans_medium",
    "titans_small",
]
