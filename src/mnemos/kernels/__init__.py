"""Optional backends of the engine and the layers, looked up lazily. Where one cannot be had, the torch path does the work.

`chain`, `decay`: the chain engine in C++ for CPUs, compiled at first use by the machine's own compiler. `token`: decoding, likewise.
"""
