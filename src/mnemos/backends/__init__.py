"""Backends: how scans, steps and the operations of a layer are computed.

`torch` computes every memory on every device; `cpu` has C++ kernels. `mnemos.dispatch` chooses; nothing imports a backend directly.
"""
