"""Every rule speaks up when it should, and only then."""

from __future__ import annotations

import pytest

from mnemos.report.diagnostics import Known, health

GATE = {"mean": 0.5, "std": 0.1, "near_0": 0.1, "near_1": 0.1}
HEALTH = {"effective_rank": 9.0, "distance": 0.5, "relearning": 0.9}
LAYER = HEALTH | {
    "gate": GATE,
    "lr": {"mean": 0.5},
    "retain": {"mean": 0.99},
    "surprise_before": 1.0,
    "surprise_after": 0.5,
}


def train(losses, **last) -> list[dict]:
    rows = [
        {"step": 10 * i, "loss": x, "smoothed_loss": x, "bad_steps": 0, "rollbacks": 0} for i, x in enumerate(losses)
    ]
    rows[-1] |= last
    return rows


def validate(loss: float = 2.0, layer: dict | None = None, gain: float = 0.2, **more) -> dict:
    memory = {"gain": gain, "perplexity": 5 * (1 - gain), "perplexity_frozen": 5.0, "beyond": 8}
    return {"step": 100, "val_loss": loss, "layers": {"0": LAYER, "1": LAYER | (layer or {})}, "memory": memory} | more


def reading(end: float | None, frozen: float = 4.0, **vitality: float) -> dict:
    return {
        "step": 3,
        "perplexity": {"learning": 3.0, "frozen": frozen},
        "layers": [{"index": 0, "maps": [{"name": "map", "start": 0.01, "end": end, "rank": 2.0}]} | HEALTH | vitality],
    }


UNMEASURED = validate(2.5) | {"memory": {"share": 0.9}}  # of a version that switched the memory off
HEALTHY = {"train": train([4.0, 3.0, 2.5]), "validate": [validate(2.6), validate(2.5)], "readings": [reading(3.0)]}


def titles(**changes) -> list[str]:
    return [finding.title for finding in health(Known(**HEALTHY | changes))]


def test_a_healthy_run_has_no_findings():
    assert titles() == []


@pytest.mark.parametrize(
    ("changes", "title"),
    [
        ({"train": train([4.0, 3.0], bad_steps=3)}, "Steps without a finite loss"),
        ({"train": train([4.0, 3.0], rollbacks=1)}, "Rollbacks"),
        ({"train": train([4.0, 2.0, 2.6])}, "Divergence"),
        ({"train": train([4.0] * 8)}, "Nothing learned"),
        ({"train": train([4.0, 3.0], data_wait=0.6)}, "Waiting for data"),
        ({"validate": []}, "No validation"),
        ({"validate": [validate(2.0), validate(2.1)]}, "Validation has risen"),
        ({"validate": [validate(gap=1.5)]}, "Learned by heart"),
        ({"validate": [validate(2.0), validate(None)]}, "Validation is not finite"),
        ({"validate": [validate(layer={"gate": GATE | {"near_1": 0.99}})]}, "Gate collapse in layer 1"),
        ({"validate": [validate(layer={"lr": {"mean": 0.001}})]}, "Layer 1 writes almost nothing"),
        ({"validate": [validate(layer={"retain": {"mean": 0.5}})]}, "Layer 1 forgets at once"),
        ({"validate": [validate(layer={"surprise_after": 1.5})]}, "Writing does not help in layer 1"),
        ({"validate": [validate(gain=0.001)]}, "Learning at test time gains almost nothing"),
        ({"validate": [validate(gain=-0.1)]}, "Learning at test time does harm"),
        (
            {"validate": [UNMEASURED], "readings": [reading(3.0, frozen=3.001)]},
            "Learning at test time gains almost nothing",
        ),
        ({"validate": [UNMEASURED], "readings": [reading(3.0, frozen=2.0)]}, "Learning at test time does harm"),
        ({"readings": [reading(3.0, effective_rank=1.3)]}, "The memory of layer 0 has collapsed"),
        ({"readings": [reading(3.0, relearning=0.4)]}, "The memory of layer 0 learns little"),
        ({"readings": [], "validate": [validate(layer={"relearning": 0.1})]}, "The memory of layer 1 learns little"),
        (
            {"validate": [validate(layer={"carried_rank": 1.1, "carried_tokens": 9000})]},
            "The carried memory of layer 1 has collapsed",
        ),
        ({"readings": [reading(500.0)]}, "A memory grows without bound"),
        ({"readings": [reading(float("nan"))]}, "A memory diverged"),
        ({"damaged": {"step-000004": "a file is missing"}}, "Checkpoint step-000004 is damaged"),
        ({"total_steps": 1000}, "Not finished"),
    ],
)
def test_each_trouble_is_named_alone(changes, title):
    assert titles(**changes) == [title]


def test_gates_that_never_move_are_named_in_long_runs_only():
    stuck = validate(layer={"gate": GATE | {"std": 0.001}}, step=5000)
    assert titles(validate=[stuck]) == ["Gate unmoved in layer 1"]
    assert titles(validate=[stuck | {"step": 100}]) == []


def test_the_side_a_gate_closes_depends_on_its_mode():
    shut = {"validate": [validate(layer={"gate": GATE | {"near_0": 0.99}})]}
    convex, additive = (health(Known(**HEALTHY | shut, gate_mode=mode))[0] for mode in ("convex", "additive"))
    assert "attention" in convex.text and convex.level == "warn"
    assert "memory" in additive.text and additive.level == "bad"


def test_the_worst_comes_first_and_reads_as_a_sentence():
    found = health(Known(train=train([4.0, 2.0, 3.0]), total_steps=900))
    assert [f.level for f in found] == ["bad", "note", "note"]
    assert found[0].sentence().startswith("Divergence: the smoothed loss is 3.000, but was 2.000 at step 10.")


def test_a_dying_memory_comes_with_advice_and_unknown_numbers_are_no_finding():
    (found,) = health(Known(**HEALTHY | {"readings": [reading(3.0, relearning=0.02)]}))
    assert "2% of the fall in a fresh memory" in found.text and "memory_retention=start" in found.advice
    assert titles(readings=[reading(3.0, relearning=None, effective_rank=None)]) == []
    assert titles(readings=[reading(3.0, relearning=float("nan"))]) == []
