"""The purpose and the paper of every preset, as `mnemos presets` prints them. Imports nothing, so that the command is fast."""

from __future__ import annotations

TITANS, MIRAS, ATLAS = "Titans, 2501.00663", "Miras, 2504.13173", "Atlas, 2505.23735"
PURPOSES: dict[str, tuple[str, str]] = {
    "titans-lmm": ("a deep memory alone, without attention", TITANS),
    "titans-mac": ("long documents read in segments; the memory gives context to attention", TITANS),
    "titans-mag": ("a first choice: window attention and a memory, mixed by a gate", TITANS),
    "titans-mal": ("a memory before window attention, one after the other", TITANS),
    "omeganet": ("recall of many facts: optimises over a window of tokens", ATLAS),
    "atlas": ("OmegaNet with Muon instead of gradient descent", ATLAS),
    "atlas++": ("Atlas with a gated memory network", ATLAS),
    "atlas-mac": ("Atlas as context of attention", ATLAS),
    "atlas-mag": ("Atlas beside window attention", ATLAS),
    "atlas-mal": ("Atlas before window attention", ATLAS),
    "atlas-interval": ("faster Atlas for text; does not learn recall", ATLAS),
    "dla": ("baseline: a deep Hebbian memory", ATLAS),
    "swla": ("baseline: linear attention that optimises over a window", ATLAS),
    "deeptransformer": ("softmax attention with a deep memory; its state grows", ATLAS),
    "swdt": ("DeepTransformer with a window", ATLAS),
    "dot": ("softmax attention with the Omega rule; its state grows", ATLAS),
    "qk-mag": ("ablation: queries projected onto past keys, beside attention", "TNT, 2511.07343"),
    "linear-attention": ("baseline: the simplest recurrent memory", "Katharopoulos et al., 2006.16236"),
    "retnet": ("baseline: linear attention that decays at a fixed rate", "RetNet, 2307.08621"),
    "deltanet": ("recall at little cost: a matrix that corrects itself", "DeltaNet, 2406.06484"),
    "gated-deltanet": ("DeltaNet that also forgets", "Gated DeltaNet, 2412.06464"),
    "ttt-linear": ("baseline: a matrix trained at test time", "TTT, 2407.04620"),
    "ttt-mlp": ("baseline: an MLP trained at test time", "TTT, 2407.04620"),
    "yaad": ("robust to outliers: a Huber loss", MIRAS),
    "moneta": ("other norms: an L3 loss and an L4 retention", MIRAS),
    "memora": ("positive weights that forget by a KL divergence", MIRAS),
    "transformer": ("baseline: full attention; its cache grows", "Vaswani et al., 1706.03762"),
    "swa": ("baseline: window attention, what a memory must beat", "Longformer, 2004.05150"),
}
