"""Forks servers: run as a program by serving.py. A line "fork FOLDER" on standard input starts one, "wait PID" waits for its end."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys

import torch

from mnemos.serve import serve
from serving import make_service, opened

if __name__ == "__main__":
    torch.set_num_threads(1)
    opened("titans-mag")
    for line in sys.stdin:
        word, _, rest = line.strip().partition(" ")
        if word == "fork":
            pid = os.fork()
            if pid == 0:
                os.close(0)
                with contextlib.suppress(AttributeError, OSError):
                    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # Linux: end with the parent
                serve(make_service(rest), "127.0.0.1", 0)
                os._exit(0)
            print(pid, flush=True)
        else:
            os.waitpid(int(rest), 0)
            print("ended", flush=True)
