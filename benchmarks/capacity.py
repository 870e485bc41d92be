"""How many pairs a memory holds: write n random (key, value) pairs, read the keys back. Nothing is trained.

    python benchmarks/capacity.py               # tables, docs/images/capacity.png and .json: two minutes on one core
    python benchmarks/capacity.py --quick       # coarser, a few seconds, into runs/
    python benchmarks/capacity.py --out folder

Two measures, both on the keys that were written: the relative error |M(k) - v| / |v|, mean over pairs, and recall, the
share of pairs whose value is the nearest of all n values to M(k). Keys and values are random directions. One pass
writes every pair once; many passes write the same pairs in the same order again and again.

Linear memories with anchor "token" (feature maps, float64): a pass is an affine map W -> P W + Q, so that k squarings
are 2^k passes. Other memories (structures x rules x windows, float32): every pass is run.

R rows (seeds), n pairs, D key dim, V value dim, F features, L candidates for lr.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import json
import math
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from harness import machine, table
from mnemos.memory import Gates, MemorySpec, MemoryState, make_features, read, scan

ROOT = Path(__file__).resolve().parents[1]
DIM = 8  # key and value dim of every curve
CHUNK = 4  # of the structures, whose n are multiples of it
EXACT = 1e-3  # relative error below which a pair counts as recalled exactly
DOUBLINGS = {"1 pass": 0, "64 passes": 6, "2^20 passes": 20}  # of one pass over the feature maps
PASSES_IN_WORDS = {"1 pass": "one pass", "2^20 passes": "1,048,576 passes"}
LIMIT = "least squares"  # the best any weights can do
Phi = Callable[[Tensor], Tensor] | None


# --- pairs and measures -----------------------------------------------------------------------------------------------


def directions(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return F.normalize(torch.randn(*shape, dtype=dtype), dim=-1)


def relative_error(y: Tensor, v: Tensor) -> Tensor:
    """(..., n, V) -> (...): |y - v| / |v|, mean over pairs; infinite where the memory has diverged."""
    error = ((y - v).norm(dim=-1) / v.norm(dim=-1)).mean(-1)
    return error.nan_to_num(nan=math.inf, posinf=math.inf)


def recall(y: Tensor, v: Tensor) -> Tensor:
    """(..., n, V) -> (...): share of pairs whose own value is the nearest of all n."""
    nearest = torch.cdist(y.nan_to_num(), v).argmin(-1)
    return (nearest == torch.arange(v.shape[-2])).to(v.dtype).mean(-1)


def lift(keys: Tensor, phi: Phi) -> Tensor:  # ... n D -> ... n F
    with torch.no_grad():
        return keys if phi is None else phi(keys.unsqueeze(-2)).squeeze(-2)


# --- orthonormal keys: one pass is exact ------------------------------------------------------------------------------


def orthonormal_error(dim: int, n: int, dtype: torch.dtype = torch.float64) -> float:
    """Largest relative error of n <= dim orthonormal keys after one pass with anchor token and lr 1."""
    spec = MemorySpec(key_dim=dim, value_dim=dim, structure="linear", anchor="token", momentum=False)
    k = torch.linalg.qr(torch.randn(dim, dim, dtype=torch.float64)).Q[:n].to(dtype).reshape(1, n, 1, dim)
    v = torch.randn(1, n, 1, dim, dtype=dtype)
    state = spec.initial_state([torch.zeros(1, dim, dim, dtype=dtype)], batch=1)
    _, state = scan(None, k, v, Gates(lr=torch.ones(1, n, 1, dtype=dtype)), state, spec)
    return ((read(k, state, spec) - v).norm(dim=-1) / v.norm(dim=-1)).max().item()


# --- feature maps: rank -----------------------------------------------------------------------------------------------


def linear_spec(features: str, degree: int = 2, feature_dim: int | None = None, dim: int = DIM) -> MemorySpec:
    return MemorySpec(
        key_dim=dim,
        value_dim=dim,
        structure="linear",
        features=features,
        degree=degree,
        feature_dim=feature_dim,
        anchor="token",
        momentum=False,
    )


MAPS = {
    "identity": linear_spec("identity"),
    "elementwise, degree 2": linear_spec("elementwise"),
    "sketch, degree 2, 32 features": linear_spec("sketch", feature_dim=32),
    "monomials, degree 2": linear_spec("monomials", degree=2),
    "monomials, degree 3": linear_spec("monomials", degree=3),
}


def name_of(spec: MemorySpec) -> str:
    degree = "" if spec.features == "identity" else f", degree {spec.degree}"
    return spec.features + degree + (f", {spec.feature_dim} features" if spec.feature_dim else "")


def theoretical_rank(spec: MemorySpec, unit: bool) -> int:
    """Rank of the lifted keys, if there are enough of them; for sketches the bound.

    On the unit sphere x.x = 1 makes every monomial of degree <= p - 2 a combination of those two degrees higher, so
    only degrees p and p - 1 count.
    """
    d, p = spec.key_dim, spec.degree
    if spec.features in ("identity", "elementwise"):
        return d
    polynomials = math.comb(d + p - 1, p) + math.comb(d + p - 2, p - 1) if unit else math.comb(d + p, p)
    return min(spec.lifted_dim, polynomials)


def measured_rank(spec: MemorySpec, unit: bool) -> int:
    """Numerical rank of 50 more lifted keys than there are features, in float64."""
    keys = torch.randn(spec.lifted_dim + 50, spec.key_dim, dtype=torch.float64)
    return int(torch.linalg.matrix_rank(lift(F.normalize(keys, dim=-1) if unit else keys, make_features(spec, 1))))


def ranks(specs: list[MemorySpec]) -> list[dict]:
    return [
        {
            "map": name_of(spec),
            "dim": spec.key_dim,
            "features": spec.lifted_dim,
            "unit keys": measured_rank(spec, unit=True),
            "unit keys, theory": theoretical_rank(spec, unit=True),
            "Gaussian keys": measured_rank(spec, unit=False),
            "Gaussian keys, theory": theoretical_rank(spec, unit=False),
        }
        for spec in specs
    ]


# --- feature maps: recall after 1, 64, 2^20 passes --------------------------------------------------------------------


def exact_lr(lifted: Tensor) -> Tensor:
    """The lr that writes a pair exactly, 1 / |phi(k)|^2: 1 for unit keys under identity and monomials."""
    return 1 / lifted.square().sum(-1)


def literal_passes(k: Tensor, v: Tensor, spec: MemorySpec, phi: Phi, passes: int) -> Tensor:
    """W (R, F, V) after `passes` passes of `scan` over k (R, n, D), v (R, n, V), from W = 0."""
    state = spec.initial_state([k.new_zeros(1, *spec.shapes[0])], batch=len(k))
    gates = Gates(lr=exact_lr(lift(k, phi)).unsqueeze(-1))
    with torch.no_grad():
        for _ in range(passes):
            _, state = scan(None, k.unsqueeze(2), v.unsqueeze(2), gates, state, spec, phi)
    return state.weights[0].squeeze(1)


def pass_map(k: Tensor, v: Tensor, spec: MemorySpec, phi: Phi) -> tuple[Tensor, Tensor]:
    """P (R, F, F) and Q (R, F, V) of one pass, W -> P W + Q.

    Columns of a linear memory do not meet, so one scan gives both: it starts at [0 | I] and writes [v | 0].
    """
    features, values = spec.shapes[0]
    both = dataclasses.replace(spec, value_dim=values + features)
    start = torch.cat([k.new_zeros(features, values), torch.eye(features, dtype=k.dtype)], -1).unsqueeze(0)
    gates = Gates(lr=exact_lr(lift(k, phi)).unsqueeze(-1))
    with torch.no_grad():
        padded = F.pad(v, (0, features)).unsqueeze(2)
        _, state = scan(None, k.unsqueeze(2), padded, gates, both.initial_state([start], batch=len(k)), both, phi)
    Q, P = state.weights[0].squeeze(1).split([values, features], dim=-1)
    return P, Q


def weights_after(k: Tensor, v: Tensor, spec: MemorySpec, phi: Phi, doublings: list[int]) -> list[Tensor]:
    """W (R, F, V) after 2^i passes from W = 0, for each i of `doublings` (ascending)."""
    P, Q = pass_map(k, v, spec, phi)
    result = {}
    for i in range(doublings[-1] + 1):
        result[i] = Q
        P, Q = P @ P, P @ Q + Q
    return [result[i] for i in doublings]


def least_squares(k: Tensor, v: Tensor, phi: Phi) -> Tensor:
    return torch.linalg.lstsq(lift(k, phi), v, driver="gelsd").solution


def feature_point(spec: MemorySpec, n: int, seeds: int) -> dict[str, dict[str, float]]:
    """Error and recall of n unit keys under each number of passes, and of the least-squares weights."""
    torch.manual_seed(n)
    k, v = directions(seeds, n, spec.key_dim), directions(seeds, n, spec.value_dim)
    phi = make_features(spec, 1)
    weights = dict(zip(DOUBLINGS, weights_after(k, v, spec, phi, list(DOUBLINGS.values()))))
    weights[LIMIT] = least_squares(k, v, phi)
    lifted = lift(k, phi)
    return {
        name: {"error": relative_error(lifted @ W, v).mean().item(), "recall": recall(lifted @ W, v).mean().item()}
        for name, W in weights.items()
    }


def curve_sizes(rank: int, most: int, points: int) -> list[int]:
    """About `points` sizes from 1 to `most`, evenly spaced in their logarithm, and those beside the rank."""
    even = {round(most ** (i / (points - 1))) for i in range(points)}
    return sorted(
        even | {n for n in (round(0.75 * rank), round(0.9 * rank), rank, rank + 1, round(1.2 * rank)) if n <= most}
    )


def largest_exact(point: Callable[[int], dict], most: int, passes: str) -> int:
    """The largest n <= most whose mean error stays below EXACT, by bisection."""
    low, high = 0, most + 1
    while high - low > 1:
        middle = (low + high) // 2
        if point(middle)[passes]["error"] < EXACT:
            low = middle
        else:
            high = middle
    return low


def feature_curves(quick: bool) -> dict[str, dict]:
    most, points, seeds = (64, 8, 2) if quick else (320, 18, 8)
    result = {}
    for name, spec in MAPS.items():
        if quick and spec.lifted_dim > most:
            continue
        rank = theoretical_rank(spec, unit=True)
        point = functools.cache(functools.partial(feature_point, spec, seeds=seeds))
        result[name] = {
            "rank": rank,
            "largest": {x: largest_exact(point, spec.lifted_dim, x) for x in (*DOUBLINGS, LIMIT)},
            "points": {n: point(n) for n in curve_sizes(rank, most, points)},
        }
    return result


# --- structures, rules, windows ---------------------------------------------------------------------------------------


def structure_spec(structure: str, rule: str, window: int) -> MemorySpec:
    return MemorySpec(
        key_dim=DIM,
        value_dim=DIM,
        structure=structure,
        rule=rule,
        window=window,
        chunk_size=CHUNK,
        momentum=rule == "muon",
    )


STRUCTURES = {
    f"{structure}, {rule}, c = {window}": structure_spec(structure, rule, window)
    for structure in ("linear", "mlp")
    for rule in ("gd", "muon")
    for window in (1, 16)
}


def candidates(spec: MemorySpec) -> list[float]:
    """Learning rates to try, from safe to too large: a window of 16 pushes each pair up to 16 times."""
    if spec.rule == "muon":
        return [0.01, 0.03, 0.1, 0.3, 1.0]
    return [x / (1 if spec.window == 1 else 8) for x in (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0)]


def start(spec: MemorySpec, seeds: int, batch: int) -> MemoryState:
    """W0 = 0 for linear; a deep memory needs a random start to have a gradient at all. Heads are seeds."""
    scale = 0.0 if spec.structure == "linear" else 1.0
    return spec.initial_state([scale * torch.randn(seeds, *shape) / shape[0] ** 0.5 for shape in spec.shapes], batch)


def write_passes(k: Tensor, v: Tensor, lr: Tensor, state: MemoryState, spec: MemorySpec, passes: int) -> MemoryState:
    """`passes` passes over k, v (L, n, R, D). lr (L,) falls linearly to 0: muon's steps do not shrink by themselves.

    Muon sums the gradients since its last commit: momentum 1, and 0 at the first token of each interval.
    """
    L, n, R, _ = k.shape
    together = max(1, 256 // n)  # passes per call of scan
    for first in range(0, passes, together):
        count = min(together, passes - first)
        fall = (1 - torch.arange(first, first + count) / passes).repeat_interleave(n)
        rate = (lr[:, None] * fall)[..., None].expand(L, count * n, R)
        inside = (torch.arange(count * n) % CHUNK != 0).to(k.dtype)[None, :, None].expand_as(rate)
        gates = Gates(lr=rate, momentum=inside if spec.momentum else None)
        with torch.no_grad():
            _, state = scan(None, k.repeat(1, count, 1, 1), v.repeat(1, count, 1, 1), gates, state, spec)
    return state


def structure_point(spec: MemorySpec, n: int, passes: int, seeds: int) -> dict:
    """Error and recall at the best of the candidate lrs, which lr that is, and the lrs that diverged."""
    assert n % CHUNK == 0, "a pass must end with a commit"
    torch.manual_seed(n)
    k, v = (directions(n, seeds, DIM, dtype=torch.float32) for _ in range(2))
    rates = candidates(spec)
    k, v = (x.expand(len(rates), *x.shape) for x in (k, v))  # L n R D
    state = write_passes(k, v, torch.tensor(rates), start(spec, seeds, len(rates)), spec, passes)
    y, v = read(k, state, spec).transpose(1, 2), v.transpose(1, 2)  # L R n D
    errors = relative_error(y, v).mean(-1)  # L
    best = int(errors.argmin())
    return {
        "error": errors[best].item(),
        "recall": recall(y[best], v[best]).mean().item(),
        "lr": rates[best],
        "diverged": [rate for rate, error in zip(rates, errors.tolist()) if not error < 10],
    }


def structure_curves(quick: bool) -> dict:
    sizes = [4, 8, 16, 32] if quick else [4, 8, 12, 16, 24, 32, 48, 64, 96]
    passes, seeds = (16, 2) if quick else (256, 3)
    single = 4 * seeds  # one pass is cheap and noisy
    curves = {}
    for name, spec in STRUCTURES.items():
        curves[name] = {
            "weights": sum(a * b for a, b in spec.shapes),
            "1 pass": {n: structure_point(spec, n, 1, single) for n in sizes},
            "many passes": {n: structure_point(spec, n, passes, seeds) for n in sizes},
        }
    return {"passes": passes, "sizes": sizes, "curves": curves}


# --- tables and picture -----------------------------------------------------------------------------------------------


def orthonormal_table(rows: list[dict]) -> str:
    header = ["d = n orthonormal keys, one pass, anchor token, lr 1", "largest relative error, float64", "float32"]
    return table(header, [[str(row["dim"]), f"{row['float64']:.1e}", f"{row['float32']:.1e}"] for row in rows])


def rank_table(rows: list[dict]) -> str:
    header = ["feature map", "d", "features", "rank, unit keys", "theory", "rank, Gaussian keys", "theory"]
    names = ("map", "dim", "features", "unit keys", "unit keys, theory", "Gaussian keys", "Gaussian keys, theory")
    return table(header, [[_bounded(row, name) for name in names] for row in rows])


def _bounded(row: dict, name: str) -> str:
    return ("≤ " if row["map"].startswith("sketch") and name.endswith("theory") else "") + str(row[name])


def largest_table(curves: dict[str, dict]) -> str:
    header = [f"linear, d = {DIM}, anchor token", "rank, unit keys", *DOUBLINGS, LIMIT]
    rows = [
        [name, str(curve["rank"]), *(str(curve["largest"][x]) for x in (*DOUBLINGS, LIMIT))]
        for name, curve in curves.items()
    ]
    return table(header, rows)


def structure_table(result: dict, passes: str) -> str:
    """Error / recall of the structures after "1 pass" or "many passes"."""
    shown = [n for n in (DIM, 2 * DIM, 4 * DIM, 8 * DIM) if n in result["sizes"]]
    many = passes if passes in DOUBLINGS else f"{result['passes']} passes"
    header = [f"{many}; d = {DIM}, chunk {CHUNK}", "weights", *(f"n = {n}" for n in shown)]
    header += ["largest n with recall ≥ 0.99", "lr tried", "lr that diverged"]
    rows = []
    for name, curve in result["curves"].items():
        points = curve[passes]
        held = itertools.takewhile(lambda item: item[1]["recall"] >= 0.99, points.items())
        diverged = sorted({rate for point in points.values() for rate in point["diverged"]})
        tried = candidates(STRUCTURES[name])
        rows.append(
            [name, str(curve["weights"])]
            + [f"{points[n]['error']:.2g} / {100 * points[n]['recall']:.0f} %" for n in shown]
            + [str(max((n for n, _ in held), default=f"< {result['sizes'][0]}")), f"{tried[0]:g} … {tried[-1]:g}"]
            + [", ".join(f"{rate:g}" for rate in diverged) or "none"]
        )
    return table(header, rows)


def pyplot():
    try:
        import matplotlib
    except ImportError:
        raise SystemExit("The picture needs matplotlib, which is not installed: pip install 'mnemos[plots]'") from None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


FLOOR = 1e-6  # errors below it are drawn on the lower edge
TICKS = [0.125, 0.25, 0.5, 1, 2, 4, 8, 16, 32]
MAP_COLOURS = ["tab:blue", "tab:orange", "tab:purple", "tab:green", "tab:red"]
STRUCTURE_COLOURS = {
    "linear, gd": "tab:blue",
    "linear, muon": "tab:cyan",
    "mlp, gd": "tab:red",
    "mlp, muon": "tab:orange",
}


def draw(features: dict[str, dict], structures: dict, path: Path) -> None:
    plt = pyplot()
    figure, axes = plt.subplots(2, 4, figsize=(19, 9.2), sharey="row")
    for column, passes in enumerate(("1 pass", "2^20 passes")):
        for (name, curve), colour in zip(features.items(), MAP_COLOURS):
            points = {n: point[passes] for n, point in curve["points"].items()}
            _curve(axes[:, column], points, label=name, color=colour, marker="o")
            _vertical(axes[:, column], curve["rank"] / DIM, colour, shared=name.startswith("elementwise"))
        axes[0, column].set_title(f"feature maps, {PASSES_IN_WORDS[passes]}\nlinear, anchor token, lr 1/|φ(k)|²")
    for column, passes in ((2, "1 pass"), (3, "many passes")):
        for name, curve in structures["curves"].items():
            kind, window = name.rsplit(", ", 1)
            style = {"ls": "-", "marker": "o"} if window == "c = 1" else {"ls": "--", "marker": "s"}
            _curve(axes[:, column], curve[passes], label=name, color=STRUCTURE_COLOURS[kind], **style)
        _vertical(axes[:, column], 1, "tab:blue")
        _vertical(axes[:, column], structures["curves"]["mlp, gd, c = 1"]["weights"] / DIM**2, "tab:red")
    below = f"chunk {CHUNK}, best of five lr"
    axes[0, 2].set_title(f"structures, rules, windows, one pass\n{below}")
    axes[0, 3].set_title(f"structures, rules, windows, {structures['passes']} passes\n{below}, falling to 0")
    for axis in axes.flat:
        sizes = [x for line in axis.get_lines() for x in line.get_xdata()]
        axis.set_xscale("log")
        axis.set_xticks(TICKS, [f"{x:g}" for x in TICKS])
        axis.minorticks_off()
        axis.set_xlim(min(sizes) / 1.15, max(sizes) * 1.15)
        axis.grid(alpha=0.25)
    for axis in axes[0]:
        axis.set_yscale("log")
        axis.set_ylim(0.8 * FLOOR, 40)
        axis.axhline(EXACT, color="grey", lw=0.8)
    for axis in axes[1]:
        axis.set_ylim(-0.03, 1.05)
        axis.set_xlabel(f"n / d   (d = {DIM})")
    axes[0, 0].set_ylabel("relative error  |M(k) − v| / |v|")
    axes[1, 0].set_ylabel("recall: the nearest value is the right one")
    figure.tight_layout(rect=(0, 0.095, 1, 1))
    ranks = "verticals: n = rank of the map on unit keys. Grey: error 1e-3, exact below it. Lower edge: 1e-6 or less"
    counts = "verticals: n = d, rank of linear; n = 8 d, where the values hold as many numbers as the mlp has weights"
    for column, title in ((0, ranks), (2, counts)):
        handles, labels = axes[0, column].get_legend_handles_labels()
        middle = (axes[0, column].get_position().x0 + axes[0, column + 1].get_position().x1) / 2
        place = {"loc": "lower center", "bbox_to_anchor": (middle, 0.005), "ncols": 4 if column else 3}
        figure.legend(handles, labels, title=title, frameon=False, **place)
    figure.savefig(path, dpi=90)
    plt.close(figure)


def _curve(axes, points: dict[int, dict], **style) -> None:
    x = [n / DIM for n in points]
    axes[0].plot(x, [max(FLOOR, point["error"]) for point in points.values()], ms=3.5, lw=1.5, **style)
    axes[1].plot(x, [point["recall"] for point in points.values()], ms=3.5, lw=1.5, **style)


def _vertical(axes, x: float, colour: str, shared: bool = False) -> None:
    """A dashed line; `shared`: dashes in the gaps of another line at the same place."""
    for axis in axes:
        axis.axvline(x, color=colour, lw=1.2, ls=(4 if shared else 0, (4, 4)), alpha=0.8)
    if not shared:
        box = {"facecolor": "white", "edgecolor": "none", "pad": 0.8}
        axes[0].text(x, 12, f"{round(x * DIM)}", color=colour, ha="center", va="center", fontsize=9, bbox=box)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="coarser and without degree 3")
    parser.add_argument("--out", type=Path, help="folder for capacity.png and capacity.json")
    options = parser.parse_args()
    out = options.out or ROOT / ("runs" if options.quick else "docs/images")
    pyplot()
    began = time.perf_counter()
    torch.manual_seed(0)
    print(machine(), "\n", flush=True)
    orthonormal = [
        {"dim": d, "float64": orthonormal_error(d, d), "float32": orthonormal_error(d, d, torch.float32)}
        for d in (8, 64, 256)
    ]
    print(orthonormal_table(orthonormal), "\n", flush=True)
    specs = [*MAPS.values(), linear_spec("sketch", degree=2, feature_dim=64)]
    if not options.quick:
        wide = [("identity", 2), ("elementwise", 2), ("sketch", 2), ("monomials", 2), ("monomials", 3)]
        specs += [linear_spec(features, degree, dim=16) for features, degree in wide]
    rank_rows = ranks(specs)
    print(rank_table(rank_rows), "\n", flush=True)
    features = feature_curves(options.quick)
    print(
        f"Largest n with mean relative error < {EXACT:g}, random unit keys:\n\n{largest_table(features)}\n", flush=True
    )
    structures = structure_curves(options.quick)
    print("Relative error / recall at the best of five lr:\n")
    print(structure_table(structures, "1 pass"), "\n")
    print(structure_table(structures, "many passes"), "\n")
    out.mkdir(parents=True, exist_ok=True)
    numbers = {
        "machine": machine(),
        "orthonormal": orthonormal,
        "ranks": rank_rows,
        "features": features,
        "structures": structures,
    }
    (out / "capacity.json").write_text(json.dumps(_short(numbers)) + "\n")
    draw(features, structures, out / "capacity.png")
    print(f"{time.perf_counter() - began:.0f} s; wrote capacity.png and capacity.json")


def _short(x):
    """Numbers with four digits: the file is to be read and compared, not to be computed with."""
    if isinstance(x, dict):
        return {str(key): _short(value) for key, value in x.items()}
    if isinstance(x, list):
        return [_short(value) for value in x]
    return float(f"{x:.4g}") if isinstance(x, float) else x


if __name__ == "__main__":
    main()
