"""Optional backends of `memory.scan`, looked up lazily by the engine. Where one cannot be had, the torch path does the work.

`cpp`: the chain engine in C++ for CPUs, compiled at first use by the machine's own compiler.
"""
