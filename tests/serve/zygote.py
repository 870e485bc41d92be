"""Forks servers of one store: run as a program by serving.py. A line "fork" on standard input starts one, "wait" waits for it."""

from __future__ import annotations

import os
import sys

import torch

from mnemos.serve import serve
from serving import make_service, opened

if __name__ == "__main__":
    torch.set_num_threads(1)
    opened("titans-mag")
    children = []
    for line in sys.stdin:
        if line.strip() == "fork":
            pid = os.fork()
            if pid == 0:
                os.close(0)
                serve(make_service(sys.argv[1]), "127.0.0.1", 0)
                os._exit(0)
            children.append(pid)
            print(pid, flush=True)
        else:
            os.waitpid(children.pop(), 0)
            print("ended", flush=True)
