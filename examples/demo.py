"""A memory at work, in about a minute: it learns facts while reading, keeps them in a fixed number of bytes, and in a file.

    make demo        # or: python examples/demo.py

Nothing here is trained beforehand: the memory is an MLP with random weights that learns by gradient descent what it is shown.
"""

from __future__ import annotations

import time
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from mnemos.memory import Gates, MemorySpec, MemoryState, read, scan

DIM, HEADS, PAIRS = 64, 1, 32


def recall(state: MemoryState, spec: MemorySpec, keys: torch.Tensor, values: torch.Tensor) -> float:
    """Share of facts whose nearest value among all is the right one."""
    answers = read(keys[None, :, None], state, spec)[0, :, 0]
    return (torch.cdist(answers, values).argmin(1) == torch.arange(len(keys))).float().mean().item()


@torch.no_grad()
def main() -> None:
    torch.manual_seed(0)
    console, folder = Console(), Path("runs/demo")
    folder.mkdir(parents=True, exist_ok=True)
    spec = MemorySpec(key_dim=DIM, value_dim=DIM, structure="mlp", chunk_size=16)
    W0 = [torch.randn(HEADS, *shape) * scale for shape, scale in zip(spec.shapes, (0.25, 0.01))]
    keys = torch.nn.functional.normalize(torch.randn(PAIRS, DIM), dim=-1)
    values = torch.randn(PAIRS, DIM) * DIM**-0.5

    console.rule("1. It learns while it reads")
    state = spec.initial_state(W0, batch=1)
    curve = [recall(state, spec, keys, values)]
    gates = Gates(lr=torch.full((1, PAIRS, HEADS), 0.3))
    for _ in track(range(60), description=f"reading {PAIRS} facts, again and again"):
        _, state = scan(None, keys[None, :, None], values[None, :, None], gates, state, spec)
        curve.append(recall(state, spec, keys, values))
    table = Table("times read", *(str(n) for n in (0, 1, 5, 20, 60)))
    table.add_row("facts recalled", *(f"{curve[n]:.0%}" for n in (0, 1, 5, 20, 60)))
    console.print(table)

    console.rule("2. However much it reads, it stays the same size")
    table = Table("tokens read", "bytes of state", "facts still recalled", "tokens per second")
    reading, total, start = state.clone(), 0, time.perf_counter()
    goals = (1_000, 10_000, 100_000)
    for goal in track(goals, description="reading other text, gates nearly closed"):
        while total < goal:
            n = min(2048, goal - total)
            other = torch.nn.functional.normalize(torch.randn(1, n, HEADS, DIM), dim=-1)
            quiet = Gates(lr=torch.full((1, n, HEADS), 1e-6))
            _, reading = scan(other, other, torch.randn(1, n, HEADS, DIM) * DIM**-0.5, quiet, reading, spec)
            total += n
        speed = total / (time.perf_counter() - start)
        table.add_row(
            f"{total:,}", f"{reading.nbytes:,}", f"{recall(reading, spec, keys, values):.0%}", f"{speed:,.0f}"
        )
    console.print(table)

    console.rule("3. It is a file")
    path = folder / "facts.safetensors"
    reading.save(path)
    again = MemoryState.load(path, spec=spec)
    console.print(f"saved to {path}, loaded, and asked again: {recall(again, spec, keys, values):.0%} of the facts")
    _plot(curve, folder / "learning.png", console)


def _plot(curve: list[float], path: Path, console: Console) -> None:
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        console.print("pip install '.[plots]' to get a picture of this run")
        return
    figure, axis = pyplot.subplots(figsize=(6, 3.5), layout="constrained")
    axis.plot(curve, color="tab:blue")
    axis.set(
        xlabel="times read",
        ylabel="facts recalled",
        ylim=(0, 1.05),
        title=f"{PAIRS} facts, an MLP memory of {DIM} dimensions",
    )
    axis.grid(alpha=0.3)
    figure.savefig(path, dpi=150)
    console.print(f"picture: {path}")


if __name__ == "__main__":
    main()
