"""Which learning rates, momentum and retention let a `NeuralMemory` learn, and stay finite? A grid on a small recall task.

The task: `pairs` (key, value) pairs, then every key again in another order; the model has to name its value. One or more
residual `NeuralMemory` layers, nothing else that mixes tokens. After training, the memory is driven with long inputs that
are hard on it (one token 4,096 times; two in turn; random tokens) and must stay finite.

    OMP_NUM_THREADS=1 python benchmarks/defaults.py                       # the default grid, about 5 minutes
    OMP_NUM_THREADS=1 python benchmarks/defaults.py --rule muon --max-lr 0.1 1 --momentum-init 0.9
    OMP_NUM_THREADS=1 python benchmarks/defaults.py --set window=4 --set gate=token --scale 0.25 1 4
"""

from __future__ import annotations

import argparse
import ast
import itertools
import platform
import time

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mnemos.memory.layer import NeuralMemory
from mnemos.nn.norm import RMSNorm


class RecallModel(nn.Module):
    def __init__(self, vocabulary: int, layers: int, **memory):
        super().__init__()
        dim = memory["dim"]
        self.embedding = nn.Embedding(vocabulary, dim)
        self.norms = nn.ModuleList(RMSNorm(dim) for _ in range(layers))
        self.memories = nn.ModuleList(NeuralMemory(**memory) for _ in range(layers))
        self.head = nn.Sequential(RMSNorm(dim), nn.Linear(dim, vocabulary, bias=False))

    def forward(self, tokens: Tensor) -> tuple[Tensor, list]:
        x, states = self.embedding(tokens), []
        for norm, memory in zip(self.norms, self.memories):
            y, state = memory(norm(x))
            x = x + y
            states.append(state)
        return self.head(x), states


def recall_batch(batch: int, pairs: int, symbols: int, gap: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Tokens (B, 4 * pairs + gap) and where queries are: keys are 0..symbols-1, then values, then 8 symbols for the gap."""
    keys = torch.rand(batch, symbols, generator=generator).argsort(1)[:, :pairs]
    values = torch.randint(symbols, 2 * symbols, (batch, pairs), generator=generator)
    order = torch.rand(batch, pairs, generator=generator).argsort(1)
    stored = torch.stack([keys, values], -1).flatten(1)
    asked = torch.stack([keys.gather(1, order), values.gather(1, order)], -1).flatten(1)
    noise = torch.randint(2 * symbols, 2 * symbols + 8, (batch, gap), generator=generator)
    tokens = torch.cat([stored, noise, asked], 1)
    is_query = torch.zeros_like(tokens, dtype=torch.bool)
    is_query[:, 2 * pairs + gap :: 2] = True
    return tokens, is_query


def recall_loss(model: RecallModel, tokens: Tensor, is_query: Tensor) -> tuple[Tensor, Tensor]:
    logits, _ = model(tokens)
    predicted, answer = logits[is_query], tokens.roll(-1, 1)[is_query]
    return F.cross_entropy(predicted, answer), (predicted.argmax(-1) == answer).float().mean()


@torch.no_grad()
def stress(model: RecallModel, vocabulary: int, length: int) -> tuple[bool, float]:
    """Long inputs with nothing new in them, and with everything new: all finite? And the largest weight norm met."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.stack(
        [
            torch.zeros(length, dtype=torch.int64),
            torch.arange(length) % 2,
            torch.randint(vocabulary, (length,), generator=generator),
        ]
    )
    logits, states = model(inputs)
    norms = [w.flatten(2).norm(dim=-1).max() for state in states for w in state.weights]
    return bool(logits.isfinite().all()), float(torch.stack(norms).max())


def train(args, **memory) -> dict:
    torch.manual_seed(args.seed)
    generator = torch.Generator().manual_seed(args.seed)
    vocabulary = 2 * args.symbols + 8
    model = RecallModel(vocabulary, args.layers, dim=args.dim, heads=args.heads, chunk_size=args.chunk_size, **memory)
    optimiser = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimiser, lambda i: min((i + 1) / 20, 1.0) * (1 - 0.9 * i / args.steps)
    )
    bad, spikes, start = 0, 0, time.perf_counter()
    for _ in range(args.steps):
        loss, _ = recall_loss(model, *recall_batch(args.batch, args.pairs, args.symbols, args.gap, generator))
        optimiser.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if not (loss.isfinite() and norm.isfinite()):
            bad += 1
            continue
        spikes += int(norm > 100)
        optimiser.step()
        schedule.step()
    elapsed = time.perf_counter() - start
    with torch.no_grad():
        test = recall_batch(256, args.pairs, args.symbols, args.gap, torch.Generator().manual_seed(10_000))
        loss, accuracy = recall_loss(model, *test)
    finite, norm = stress(model, vocabulary, args.stress)
    memory = model.memories[0]
    assert isinstance(memory, NeuralMemory)
    gates = memory.gating(model.norms[0](model.embedding(test[0][:8])))
    ceiling = memory.config.effective_max_lr
    return {
        "max_lr": ceiling,
        "accuracy": accuracy.item(),
        "loss": loss.item(),
        "bad": bad,
        "spikes": spikes,
        "stress": "finite" if finite else "NaN/inf",
        "norm": norm,
        "lr": gates.lr.mean().item() / ceiling,
        "m": 0.0 if gates.momentum is None else gates.momentum.mean().item(),
        "keep": 1.0 if gates.retain is None else gates.retain.mean().item(),
        "s/step": elapsed / args.steps,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--max-lr", type=float, nargs="*", default=[], help="absolute ceilings to try")
    parser.add_argument(
        "--scale", type=float, nargs="*", default=[0.25, 1.0, 4.0], help="multiples of the default ceiling"
    )
    parser.add_argument("--momentum-init", type=float, nargs="*", default=[None], help="0 switches momentum off")
    parser.add_argument("--retain-init", type=float, nargs="*", default=[None])
    parser.add_argument("--structure", nargs="*", default=["linear", "mlp"])
    parser.add_argument("--rule", nargs="*", default=["gd"])
    parser.add_argument(
        "--set", action="append", default=[], metavar="FIELD=VALUE", help="any other field of NeuralMemoryConfig"
    )
    parser.add_argument("--dim", type=int, default=32)
    parser.add_argument("--heads", type=int, default=1)
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--chunk-size", type=int, default=32)
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--symbols", type=int, default=16)
    parser.add_argument("--gap", type=int, default=32, help="tokens of noise between pairs and queries")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--learning-rate", type=float, default=5e-3)
    parser.add_argument("--stress", type=int, default=4096, help="length of the stress inputs")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    fixed = {}
    for item in args.set:
        name, _, value = item.partition("=")
        try:
            fixed[name] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            fixed[name] = value
    threads = torch.get_num_threads()
    print(
        f"torch {torch.__version__}, Python {platform.python_version()}, {threads} thread(s), {platform.processor() or platform.machine()}"
    )
    print(
        f"chunk {args.chunk_size}, pairs {args.pairs}, gap {args.gap}, {args.layers} layer(s), {args.steps} steps, chance {1 / args.symbols:.3f}, {fixed or 'defaults'}"
    )
    print(
        "structure rule  m_init  keep_init |  max_lr  acc    loss  bad spikes stress   norm   | lr/max   m    keep   s/step"
    )
    ceilings = [("max_lr", x) for x in args.max_lr] or [("scale", x) for x in args.scale]
    for structure, rule, m, keep, (kind, value) in itertools.product(
        args.structure, args.rule, args.momentum_init, args.retain_init, ceilings
    ):
        memory = {"structure": structure, "rule": rule, **fixed}
        if m is not None:
            memory |= {"momentum_init": m} if m > 0 else {"momentum": False}
        if keep is not None:
            memory |= {"retain_init": keep}
        if kind == "scale":
            value *= NeuralMemory(
                args.dim, heads=args.heads, chunk_size=args.chunk_size, **memory
            ).config.effective_max_lr
        r = train(args, max_lr=value, **memory)
        print(
            f"{structure:9} {rule:5} {m!s:7} {keep!s:9} | {r['max_lr']:7.4f} {r['accuracy']:5.3f} {r['loss']:6.3f} {r['bad']:4d} {r['spikes']:5d} "
            f"{r['stress']:8} {r['norm']:8.2g} | {r['lr']:5.3f} {r['m']:5.3f} {r['keep']:6.4f}  {r['s/step']:.3f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
