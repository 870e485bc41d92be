"""Bad input is refused in one sentence that names the argument, and changes nothing."""

from __future__ import annotations

import dataclasses
import re

import pytest
import torch
from refusals import SPEC, WINDOW, B, D, E, H, T, refuses

from mnemos.memory import Gates, MemorySpec, Structure, make_features, read, register_structure, scan, step
from mnemos.memory.features import Identity

LIFTED = MemorySpec(D, E, structure="linear", chunk_size=4, window=WINDOW, features="monomials")


@pytest.fixture
def given() -> dict:
    """Good arguments of `scan`, with a state that has already read three tokens."""
    torch.manual_seed(0)
    state = SPEC.initial_state([torch.randn(H, D, E)], batch=B)
    k, v = torch.randn(B, 3, H, D), torch.randn(B, 3, H, E)
    _, state = scan(k, k, v, Gates(lr=torch.full((B, 3, H), 0.1)), state, SPEC)
    return {
        "q": torch.randn(B, T, H, D),
        "k": torch.randn(B, T, H, D),
        "v": torch.randn(B, T, H, E),
        "gates": Gates(
            lr=torch.rand(B, T, H),
            momentum=torch.rand(B, T, H),
            retain=torch.rand(B, T, H),
            gate=torch.rand(B, T, H),
            decay=torch.rand(H),
            lag=torch.rand(B, T, H, WINDOW),
        ),
        "state": state,
        "spec": SPEC,
    }


def call_with(given: dict, **changed):
    return lambda: scan(**(given | changed))


def one_token(given: dict) -> dict:
    part = {name: given[name][:, :1] for name in ("q", "k", "v")}
    return given | part | {"gates": given["gates"].map(lambda x: x[:, :1])}


def test_the_good_arguments_are_accepted(given):
    scan(**given)
    step(**one_token(given))


# Tokens -------------------------------------------------------------------------------------------------------------


WRONG_TOKENS = {
    "q of another key dim": ("q", torch.zeros(B, T, H, D + 1), r"^q .*\(2, 6, 3, 5\).*4"),
    "k of another key dim": ("k", torch.zeros(B, T, H, D - 1), r"^k .*\(2, 6, 3, 3\).*4"),
    "v of another value dim": ("v", torch.zeros(B, T, H, D), r"^v .*\(2, 6, 3, 4\).*5"),
    "q without heads": ("q", torch.zeros(B, T, D), r"^q .*\(2, 6, 4\)"),
    "k without heads": ("k", torch.zeros(B, T, D), r"^k .*\(2, 6, 4\)"),
    "v with an axis too many": ("v", torch.zeros(B, T, H, E, 1), r"^v "),
    "q of another length": ("q", torch.zeros(B, T + 1, H, D), r"^q .*\(2, 7, 3\).*\(2, 6, 3\)"),
    "v of another length": ("v", torch.zeros(B, T - 1, H, E), r"^v .*\(2, 5, 3\).*\(2, 6, 3\)"),
    "v of another batch": ("v", torch.zeros(B + 1, T, H, E), r"^v .*\(3, 6, 3\)"),
    "q of other heads": ("q", torch.zeros(B, T, H + 1, D), r"^q .*\(2, 6, 4\)"),
    "whole numbers for q": ("q", torch.zeros(B, T, H, D, dtype=torch.int64), r"^q .*int64.*floating"),
    "whole numbers for k": ("k", torch.zeros(B, T, H, D, dtype=torch.int32), r"^k .*int32.*floating"),
    "truth values for v": ("v", torch.zeros(B, T, H, E, dtype=torch.bool), r"^v .*bool.*floating"),
    "complex numbers for v": ("v", torch.zeros(B, T, H, E, dtype=torch.complex64), r"^v .*complex.*floating"),
    "no k": ("k", None, r"^k "),
    "no v": ("v", None, r"^v "),
    "a list for k": ("k", [[1.0]], r"^k .*list"),
    "q on another device": ("q", torch.zeros(B, T, H, D, device="meta"), r"^q .*meta.*cpu"),
    "v on another device": ("v", torch.zeros(B, T, H, E, device="meta"), r"^v .*meta.*cpu"),
}


@pytest.mark.parametrize("case", WRONG_TOKENS)
def test_tokens_of_a_wrong_shape_type_or_device_are_refused(given, case):
    name, value, words = WRONG_TOKENS[case]
    refuses(words, call_with(given, **{name: value}), given["state"])


def test_an_empty_sequence_is_refused(given):
    empty = {name: given[name][:, :0] for name in ("q", "k", "v")} | {"gates": given["gates"].map(lambda x: x[:, :0])}
    refuses("empty", call_with(given, **empty), given["state"])


def test_all_tokens_of_another_batch_or_other_heads_than_the_state_are_refused(given):
    for axis, words in ((0, r"state has 2 batch rows.* 3"), (2, r"state has 3 heads.* 4")):
        longer = {name: torch.cat([given[name], given[name].narrow(axis, 0, 1)], axis) for name in ("q", "k", "v")}
        shape = longer["k"].shape[:3]
        refuses(words, call_with(given, **longer, gates=Gates(lr=torch.rand(shape))), given["state"])


# Gates --------------------------------------------------------------------------------------------------------------


TIMED = ("lr", "momentum", "retain", "gate")
WRONG_SHAPES = [
    *((name, shape) for name in TIMED for shape in [(B, T), (B, T, H, 1), (B, T + 1, H), (B, T, H + 1), (1, T, H), ()]),
    ("decay", (H + 1,)),
    ("decay", (B, H)),
    ("decay", ()),
    ("lag", (B, T, H)),
    ("lag", (B, T, H, WINDOW - 1)),
    ("lag", (B, T, H, WINDOW + 1)),
    ("lag", (B, T + 1, H, WINDOW)),
]


@pytest.mark.parametrize(("name", "shape"), WRONG_SHAPES)
def test_gates_of_a_wrong_shape_are_refused(given, name, shape):
    gates = dataclasses.replace(given["gates"], **{name: torch.full(shape, 0.5)})
    refuses(rf"gates\.{name} has shape {re.escape(str(tuple(shape)))}", call_with(given, gates=gates), given["state"])


@pytest.mark.parametrize("value", [float("nan"), -1e-6, 1 + 1e-6, float("inf"), float("-inf")])
@pytest.mark.parametrize("name", [*TIMED, "decay", "lag"])
def test_a_single_gate_outside_its_range_is_refused(given, name, value):
    if name == "lr" and value == 1 + 1e-6:
        pytest.skip("a learning rate may exceed 1")
    wrong = getattr(given["gates"], name).double().clone()
    wrong.view(-1)[-1] = value
    gates = dataclasses.replace(given["gates"], **{name: wrong})
    allowed = r"finite and >= 0" if name == "lr" else r"in \[0, 1\]"
    refuses(rf"gates\.{name} must be {allowed}", call_with(given, gates=gates), given["state"])
    if name not in ("decay", "lag"):
        part = one_token(given)
        lone = dataclasses.replace(part["gates"], **{name: wrong[:, -1:]})
        refuses(rf"gates\.{name} must be {allowed}", lambda: step(**(part | {"gates": lone})), given["state"])


def test_gates_may_lie_at_the_ends_of_their_range_and_lr_above_one(given):
    for end in (0.0, 1.0):
        ends = given["gates"].map(lambda x, end=end: torch.full_like(x, end))
        scan(**(given | {"gates": dataclasses.replace(ends, decay=torch.full((H,), end))}))
    scan(**(given | {"gates": Gates(lr=torch.full((B, T, H), 30.0))}))


@pytest.mark.parametrize("name", [*TIMED, "decay", "lag"])
def test_gates_on_another_device_are_refused(given, name):
    gates = dataclasses.replace(given["gates"], **{name: getattr(given["gates"], name).to("meta")})
    refuses(rf"gates\.{name} is on meta", call_with(given, gates=gates), given["state"])


@pytest.mark.parametrize("gates", [None, 0.1, torch.rand(B, T, H), Gates(lr=None), Gates(lr=0.1)])
def test_something_else_than_gates_is_refused(given, gates):
    refuses("gates", call_with(given, gates=gates), given["state"])


def test_momentum_gates_without_momentum_are_refused(given):
    spec = dataclasses.replace(SPEC, momentum=False)
    state = spec.initial_state([torch.randn(H, D, E)], batch=B)
    refuses("gates.momentum .*momentum=False", call_with(given, spec=spec, state=state), state)


# Mask and packed documents ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "mask",
    [
        torch.ones(B, T + 1, dtype=torch.bool),
        torch.ones(B + 1, T, dtype=torch.bool),
        torch.ones(T, dtype=torch.bool),
        torch.ones(B, T, H, dtype=torch.bool),
        torch.ones(B, T),
        torch.ones(B, T, dtype=torch.int64),
    ],
    ids=["length", "batch", "no batch", "heads", "float", "int"],
)
def test_a_mask_of_a_wrong_shape_or_type_is_refused(given, mask):
    refuses(r"^mask .*bool.*\(2, 6\)", call_with(given, mask=mask), given["state"])


@pytest.mark.parametrize(
    "bounds",
    [
        torch.tensor([1, 3, 6]),
        torch.tensor([0, 4, 3, 6]),
        torch.tensor([0, 3, 5]),
        torch.tensor([0, 3, 7]),
        torch.tensor([0, -1, 6]),
        torch.tensor([0.0, 3.0, 6.0]),
        torch.tensor([[0, 3, 6]]),
        torch.tensor([0]),
        torch.tensor([], dtype=torch.int64),
        torch.tensor(6),
        [0, 3, 6],
        (0, 6),
    ],
    ids=str,
)
def test_malformed_document_bounds_are_refused(given, bounds):
    row = {name: given[name][:1] for name in ("q", "k", "v")} | {"gates": given["gates"].map(lambda x: x[:1])}
    refuses("^cu_seqlens must", call_with(given, **row, cu_seqlens=bounds), given["state"])


def test_document_bounds_need_a_single_row_and_a_state_row_per_document(given):
    bounds = torch.tensor([0, 3, 6])
    refuses("cu_seqlens needs one packed sequence.* 2", call_with(given, cu_seqlens=bounds), given["state"])
    row = {name: given[name][:1] for name in ("q", "k", "v")} | {"gates": given["gates"].map(lambda x: x[:1])}
    scan(**(given | row | {"cu_seqlens": bounds}))
    three = torch.tensor([0, 1, 3, 6])
    refuses("state has 2 batch rows.* 3", call_with(given, **row, cu_seqlens=three), given["state"])


# State and spec -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "other",
    [
        dataclasses.replace(SPEC, chunk_size=8),
        dataclasses.replace(SPEC, window=WINDOW + 1),
        dataclasses.replace(SPEC, objective="dot"),
        dataclasses.replace(SPEC, read="before"),
        dataclasses.replace(SPEC, momentum=False),
        dataclasses.replace(SPEC, structure="mlp"),
    ],
)
def test_a_state_of_another_spec_is_refused(given, other):
    state = other.initial_state([torch.randn(H, *shape) for shape in other.shapes], batch=B)
    refuses("^state belongs to another spec", call_with(given, state=state), state)
    refuses("^state belongs to another spec", lambda: read(given["q"], state, SPEC), state)
    refuses("^state belongs to another spec", lambda: step(**(one_token(given) | {"state": state})), state)


def test_a_state_of_another_batch_other_heads_or_another_device_is_refused(given):
    q, state = given["q"], given["state"]
    alone = state.select([0])
    other_heads = SPEC.initial_state([torch.randn(H + 1, D, E)], batch=B)
    for wrong, words in (
        (alone, r"^state has 1 batch rows.* 2"),
        (other_heads, r"^state has 4 heads.* 3"),
        (state.to("meta"), r"^state is on meta.*cpu"),
        (None, r"^state is a NoneType"),
        ({}, r"^state is a dict"),
    ):
        kept = wrong if hasattr(wrong, "spec") else None
        refuses(words, call_with(given, state=wrong), kept)
        refuses(words, lambda wrong=wrong: read(q, wrong, SPEC), kept)
        refuses(words, lambda wrong=wrong: step(**(one_token(given) | {"state": wrong})), kept)


def test_a_step_takes_exactly_one_token(given):
    for length in (0, 2, T):
        part = {name: given[name][:, :length] for name in ("q", "k", "v")}
        part |= {"gates": given["gates"].map(lambda x, n=length: x[:, :n])}
        refuses("^k .*one token", lambda part=part: step(**(given | part)), given["state"])
    part = one_token(given)
    refuses("^q ", lambda: step(**(part | {"q": given["q"]})), given["state"])
    refuses("^v ", lambda: step(**(part | {"v": given["v"]})), given["state"])
    refuses(r"gates\.lr", lambda: step(**(part | {"gates": given["gates"]})), given["state"])
    refuses("^mask", lambda: step(**(part | {"mask": torch.ones(B, T, dtype=torch.bool)})), given["state"])


@pytest.mark.parametrize("q", [torch.zeros(B, T, H, D + 1), torch.zeros(B, T, D), torch.zeros(D)])
def test_a_read_with_a_wrong_query_is_refused(given, q):
    refuses("^q ", lambda: read(q, given["state"], SPEC), given["state"])
    refuses("^state has", lambda: read(given["q"][:1], given["state"], SPEC), given["state"])
    refuses("^state has", lambda: read(given["q"][:, :, :1], given["state"], SPEC), given["state"])


def test_missing_features_and_features_of_other_dimensions_are_refused(given):
    state = LIFTED.initial_state([torch.randn(H, LIFTED.lifted_dim, E)], batch=B)
    lifted = given | {"spec": LIFTED, "state": state}
    refuses("features='monomials'.*make_features", call_with(lifted), state)
    refuses("features='monomials'.*make_features", lambda: step(**one_token(lifted)), state)
    scan(**(lifted | {"features": make_features(LIFTED, H)}))
    for wrong in (dataclasses.replace(LIFTED, degree=3), dataclasses.replace(LIFTED, key_dim=D + 1)):
        refuses("features map .*spec needs 4 to 15", call_with(lifted, features=make_features(wrong, H)), state)
    refuses("features map .*spec needs 4 to 4", call_with(given, features=make_features(LIFTED, H)), given["state"])


# Other mistakes -----------------------------------------------------------------------------------------------------


def whole_gates(name: str):
    def call(given: dict):
        whole = getattr(given["gates"], name).round().to(torch.int64)
        return call_with(given, gates=dataclasses.replace(given["gates"], **{name: whole}))

    return call


def lifted_without_features(given: dict):
    state = LIFTED.initial_state([torch.randn(H, LIFTED.lifted_dim, E)], batch=B)
    return lambda: read(given["q"], state, LIFTED)


def elementwise(heads: int):
    spec = dataclasses.replace(SPEC, features="elementwise")

    def call(given: dict):
        state = spec.initial_state([torch.randn(H, D, E)], batch=B)
        return call_with(given, spec=spec, state=state, features=make_features(spec, heads))

    return call


def own_structure(given: dict):
    """A structure with a parameter of its own, of whose gradient the engine would lose a part."""
    scale = torch.ones((), requires_grad=True)

    @register_structure
    class Scaled(Structure):
        name = "test_scaled"

        def shapes(self):
            return [(self.dim_in, self.dim_out)]

        def forward(self, x, fast):
            return fast(0, x * scale)

    spec = dataclasses.replace(SPEC, structure="test_scaled")
    state = spec.initial_state([torch.randn(H, D, E)], batch=B)
    with torch.no_grad():
        scan(**(given | {"spec": spec, "state": state}))
    return call_with(given, spec=spec, state=state)


class Doubled:
    """A feature map that says its dimensions, and no more."""

    dim_in = dim_out = D

    def __call__(self, x):
        return 2 * x


MISTAKES = {
    "a number for a gate": (
        "^gates.momentum .*float",
        lambda x: call_with(x, gates=dataclasses.replace(x["gates"], momentum=0.9)),
    ),
    "whole numbers for lr": ("^gates.lr .*int64", whole_gates("lr")),
    "whole numbers for retain": ("^gates.retain .*int64", whole_gates("retain")),
    "whole numbers for lags": ("^gates.lag .*int64", whole_gates("lag")),
    "truth values for a gate": (
        "^gates.gate .*bool",
        lambda x: call_with(x, gates=dataclasses.replace(x["gates"], gate=x["gates"].gate > 0.5)),
    ),
    "complex gates": (
        "^gates.gate .*complex64",
        lambda x: call_with(x, gates=dataclasses.replace(x["gates"], gate=x["gates"].gate.to(torch.complex64))),
    ),
    "a list for a mask": (r"^mask is a list.*bool.*\(2, 6\)", lambda x: call_with(x, mask=[[True] * T] * B)),
    "a step without a query": ("^q is None", lambda x: lambda: step(**(one_token(x) | {"q": None}))),
    "a step without a key": ("^k .*NoneType.*one token", lambda x: lambda: step(**(one_token(x) | {"k": None}))),
    "a read of whole numbers": ("^q .*int64", lambda x: lambda: read(x["q"].long(), x["state"], SPEC)),
    "a read without a query": ("^q .*NoneType", lambda x: lambda: read(None, x["state"], SPEC)),
    "a read without features": ("features='monomials'.*make_features", lifted_without_features),
    "features of other heads": ("^features .*4 heads.* 3", elementwise(H + 1)),
    "features of one head for several": ("^features .*1 heads.* 3", elementwise(1)),
    "a function for features": ("^features .*dim_in and dim_out", lambda x: call_with(x, features=lambda z: z)),
    "features for a spec without": (
        "^features are 'elementwise'.*'identity'",
        lambda x: call_with(x, features=make_features(dataclasses.replace(SPEC, features="elementwise"), H)),
    ),
    "nameless features for a spec without": (
        "^features are 'Doubled'.*'identity'",
        lambda x: call_with(x, features=Doubled()),
    ),
    "a structure with a parameter": ("^structure 'test_scaled' holds parameters", own_structure),
    "start weights of whole numbers": (
        "W0",
        lambda x: lambda: SPEC.initial_state([torch.ones(H, D, E, dtype=torch.int64)], batch=B),
    ),
    "rows by truth values": (
        "^rows must be whole numbers.*bool",
        lambda x: lambda: x["state"].select(torch.tensor([True, False])),
    ),
    "rows by a list of truth values": (
        "^rows must be whole numbers",
        lambda x: lambda: x["state"].select([True, False]),
    ),
    "rows by fractions": ("^rows must be whole numbers", lambda x: lambda: x["state"].select([0.7])),
    "rows by name": ("^rows must be", lambda x: lambda: x["state"].select(["first"])),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_other_mistakes_are_refused_too(given, case):
    words, make = MISTAKES[case]
    refuses(words, make(given), given["state"])


def test_an_identity_map_may_be_given_where_none_is_needed(given):
    y, _ = scan(**given)
    z, _ = scan(**(given | {"features": Identity(D, H)}))
    assert torch.equal(y, z)
