"""Started by torchrun: trains every config of a folder, in the order of their names, resuming those that have a run."""

from __future__ import annotations

import sys
from pathlib import Path

import torch.distributed as dist

from mnemos.train import TrainConfig, Trainer


def main() -> None:
    dist.init_process_group("gloo")
    for path in sorted(Path(sys.argv[1]).glob("*.yaml")):
        config = TrainConfig.load(path)
        resume = (Path(config.folder) / str(config.name) / "checkpoints").exists()
        Trainer(config, resume=resume).train()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
