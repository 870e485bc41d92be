"""How many pairs a memory holds: write n random (key, value) pairs, read the keys back. Nothing is trained.

    python benchmarks/capacity.py               # tables, docs/images/capacity.svg and .json: two minutes on one core
    python benchmarks/capacity.py --quick       # coarser, a few seconds, into runs/
    python benchmarks/capacity.py --out folder
    python benchmarks/capacity.py --redraw      # the picture of the kept numbers

Two measures, both on the keys that were written: the relative error |M(k) - v| / |v|, mean over pairs, and recall, the
share of pairs whose value is the nearest of all n values to M(k). Keys and values are random directions. One pass
writes every pair once; many passes write the same pairs in the same order again and again.

Linear memories with anchor "token" (feature maps, float64): a pass is an affine map W -> P W + Q, so that k squarings
are 2^k passes. Other memories (structures x rules x windows, float32): every pass is run.

R rows (seeds), n pairs, D key dim, V value dim, F features, L candidates for lr.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import time
from pathlib import Path

import torch

from harness import machine, table
from mnemos.colours import PALETTE
from mnemos.drawing import SOFT, label_lines, new_figure, save, styled
from mnemos.eval.capacity import (
    DOUBLINGS,
    EXACT,
    LEAST_SQUARES,
    candidates,
    directions,
    feature_point,
    largest_exact,
    linear_spec,
    literal_passes,
    orthonormal_error,
    ranks,
    relative_error,
    structure_point,
    theoretical_rank,
    weights_after,
)
from mnemos.memory import MemorySpec

__all__ = ["directions", "literal_passes", "relative_error", "weights_after"]  # for the tests

ROOT = Path(__file__).resolve().parents[1]
DIM = 8  # key and value dim of every curve
CHUNK = 4  # of the structures, whose n are multiples of it


MAPS = {
    "identity": linear_spec("identity"),
    "elementwise, degree 2": linear_spec("elementwise"),
    "sketch, degree 2, 32 features": linear_spec("sketch", feature_dim=32),
    "monomials, degree 2": linear_spec("monomials", degree=2),
    "monomials, degree 3": linear_spec("monomials", degree=3),
}


def curve_sizes(rank: int, most: int, points: int) -> list[int]:
    """About `points` sizes from 1 to `most`, evenly spaced in their logarithm, and those beside the rank."""
    even = {round(most ** (i / (points - 1))) for i in range(points)}
    return sorted(
        even | {n for n in (round(0.75 * rank), round(0.9 * rank), rank, rank + 1, round(1.2 * rank)) if n <= most}
    )


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
            "largest": {x: largest_exact(point, spec.lifted_dim, x) for x in (*DOUBLINGS, LEAST_SQUARES)},
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
    header = [f"linear, d = {DIM}, anchor token", "rank, unit keys", *DOUBLINGS, LEAST_SQUARES]
    rows = [
        [name, str(curve["rank"]), *(str(curve["largest"][x]) for x in (*DOUBLINGS, LEAST_SQUARES))]
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


FLOOR = 1e-6  # errors below it are drawn on the lower edge
TICKS = [0.125, 0.25, 0.5, 1, 2, 4, 8, 16, 32]
KINDS = ["linear, gd", "linear, muon", "mlp, gd", "mlp, muon"]
FINDINGS = {  # of a row of the picture; below it the setting
    "1 pass": ("One pass stores one pair exactly, with any feature map", "linear, anchor token, lr 1/|φ(k)|²"),
    "2^20 passes": ("After 2^20 passes every feature map holds as many pairs as its rank", "the same"),
    "one": ("In one pass no structure stores its pairs exactly", f"chunk {CHUNK}, best of five lr"),
    "many": (
        "In 256 passes a network recalls four times as many pairs as a matrix",
        f"chunk {CHUNK}, best of five lr, falling to 0",
    ),
}


def draw(features: dict[str, dict], structures: dict, path: Path) -> None:
    """Four settings below each other, relative error on the left and recall on the right."""
    with styled():
        figure = new_figure(9.6, 14.0)
        rows = list(zip(figure.subplots(4, 2), FINDINGS.items(), strict=True))
        for axes, (passes, _) in rows[:2]:
            ends = []
            for i, (name, curve) in enumerate(features.items()):
                points = {n: point[passes] for n, point in curve["points"].items()}
                ends.append(_curve(axes, points, name, PALETTE[i][0], marker="o"))
                _vertical(axes, curve["rank"] / DIM, PALETTE[i][0], shared=name.startswith("elementwise"))
            _finish(axes, ends)
        for axes, (passes, _) in rows[2:]:
            ends = []
            for name, curve in structures["curves"].items():
                kind, window = name.rsplit(", ", 1)
                style = {"ls": "-", "marker": "o"} if window == "c = 1" else {"ls": "--", "marker": "s"}
                points = curve["1 pass" if passes == "one" else "many passes"]
                ends.append(_curve(axes, points, name, PALETTE[KINDS.index(kind)][0], **style))
            _vertical(axes, 1, PALETTE[0][0])
            _vertical(axes, structures["curves"]["mlp, gd, c = 1"]["weights"] / DIM**2, PALETTE[2][0])
            _finish(axes, ends)
        for axes, (_, (finding, setting)) in rows:
            axes[0].set_title(finding, pad=20)
            above = {"xytext": (0, 5), "textcoords": "offset points", "va": "bottom"}
            axes[0].annotate(setting, (0, 1), xycoords="axes fraction", color=SOFT[0], fontsize=9, **above)
        save(figure, path)


def _curve(axes, points: dict[int, dict], name: str, colour: str, **style) -> tuple[str, float, str]:
    """Draws error and recall; returns the end of the line of recall for its name."""
    x = [n / DIM for n in points]
    recall = [point["recall"] for point in points.values()]
    axes[0].plot(x, [max(FLOOR, p["error"]) for p in points.values()], ms=3.5, lw=1.5, color=colour, **style)
    axes[1].plot(x, recall, ms=3.5, lw=1.5, color=colour, **style)
    return name, recall[-1], colour


def _finish(axes, ends: list[tuple[str, float, str]]) -> None:
    for axis in axes:
        sizes = [x for line in axis.get_lines() for x in line.get_xdata()]
        axis.set_xscale("log")
        axis.set_xticks(TICKS, [f"{x:g}" for x in TICKS])
        axis.minorticks_off()
        axis.set_xlim(min(sizes) / 1.15, max(sizes) * 1.15)
        axis.grid(alpha=0.6, lw=0.6)
        axis.set_xlabel(f"n / d   (d = {DIM})")
    axes[0].set(yscale="log", ylim=(0.8 * FLOOR, 40), ylabel="relative error  |M(k) − v| / |v|")
    axes[0].axhline(EXACT, color=SOFT[0], lw=0.8, ls=":")
    axes[1].set(ylim=(-0.03, 1.05), ylabel="recall: the nearest value is the right one")
    label_lines(axes[1], ends)


def _vertical(axes, x: float, colour: str, shared: bool = False) -> None:
    """A dashed line; `shared`: dashes in the gaps of another line at the same place."""
    for axis in axes:
        axis.axvline(x, color=colour, lw=1.2, ls=(4 if shared else 0, (4, 4)), alpha=0.8)
    if not shared:
        axes[0].annotate(f"{round(x * DIM)}", (x, 12), (3, 0), textcoords="offset points", color=colour, fontsize=8)


def redraw(folder: Path) -> None:
    """The picture of the numbers in capacity.json."""
    kept = json.loads((folder / "capacity.json").read_text())
    for curve in kept["features"].values():
        curve["points"] = {int(n): point for n, point in curve["points"].items()}
    for curve in kept["structures"]["curves"].values():
        for passes in ("1 pass", "many passes"):
            curve[passes] = {int(n): point for n, point in curve[passes].items()}
    draw(kept["features"], kept["structures"], folder / "capacity.svg")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="coarser and without degree 3")
    parser.add_argument("--out", type=Path, help="folder for capacity.svg and capacity.json")
    parser.add_argument(
        "--redraw", action="store_true", help="draw the kept numbers of capacity.json, and measure nothing"
    )
    options = parser.parse_args()
    out = options.out or ROOT / ("runs" if options.quick else "docs/images")
    if options.redraw:
        return redraw(out)
    new_figure(1, 1)  # raises an error now, not after the measurement, if matplotlib is missing
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
    draw(features, structures, out / "capacity.svg")
    print(f"{time.perf_counter() - began:.0f} s; wrote capacity.svg and capacity.json")


def _short(x):
    """Numbers with four digits: the file is to be read and compared, not to be computed with."""
    if isinstance(x, dict):
        return {str(key): _short(value) for key, value in x.items()}
    if isinstance(x, list):
        return [_short(value) for value in x]
    return float(f"{x:.4g}") if isinstance(x, float) else x


if __name__ == "__main__":
    main()
