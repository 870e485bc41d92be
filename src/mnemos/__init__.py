"""Mnemos: sequence models whose memory learns at test time.

The engine and the layer live in `mnemos.memory`, which needs torch and safetensors alone.
"""

__version__ = "0.1.0"
