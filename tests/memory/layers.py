"""What the tests of `NeuralMemory` share: the layers, and random inputs."""

from __future__ import annotations

import torch

from helpers import randomise
from mnemos.memory.layer import NeuralMemory

f64 = torch.float64
DIM, HEADS, T = 12, 3, 21


CASES = {
    "titans": {},
    "residual": dict(residual=True),
    "start not read": dict(residual=True, w0_branch=False),
    "no gates": dict(momentum=False, retain=False, depth=3),
    "fixed retention": dict(momentum=False, retain="fixed", structure="linear"),
    "omega": dict(structure="gated_mlp", window=3, gate="token*decay*per-lag"),
    "token anchor": dict(structure="linear", anchor="token", decay_first=True, learn_w0=False, momentum=False),
    "token anchor window": dict(structure="linear", anchor="token", window=2, gate="per-lag", read="before"),
    "dot": dict(structure="linear", objective="dot", qk_norm="rms", gate="token"),
    "plain": dict(structure="linear", conv_width=None, qk_norm="none", output_gate=False, value_bound=None),
    "monomials": dict(structure="linear", features="monomials", degree=3, key_dim=3, value_dim=5, conv_width=2),
    "elementwise": dict(features="elementwise", degree=3, window=2, gate="decay"),
    "concatenated powers": dict(structure="linear", features="elementwise_concat", degree=3),
    "sketch": dict(structure="mlp", features="sketch", degree=2, feature_dim=9),
    "atlas": dict(rule="muon", commit_every=2, window=3, gate="token*decay", chunk_size=4),
    "nesterov": dict(rule="muon", commit_every=2, window=3, gate="token", chunk_size=4, nesterov=True),
    "lr inside": dict(rule="muon", commit_every=2, chunk_size=4, lr_position="inside", step_size=0.1),
    "towards the start": dict(retention="start"),
    "towards the start, online": dict(retention="start", structure="linear", anchor="token", decay_first=True),
    "towards the start, muon": dict(retention="start", rule="muon", commit_every=2, chunk_size=4, window=3),
    "towards the start, fixed": dict(retention="start", retain="fixed", structure="gated_mlp", momentum=False),
    "muon without momentum": dict(rule="muon", momentum=False, structure="linear", window=2, gate="per-lag"),
}


def build(case: str = "titans", **more) -> NeuralMemory:
    torch.manual_seed(0)
    return randomise(
        NeuralMemory(DIM, **(dict(heads=HEADS, chunk_size=5, gate_hidden=6, max_lr=0.2) | CASES[case] | more)).double()
    )


def some(*shape: int, seed: int = 0, dtype=f64) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)
