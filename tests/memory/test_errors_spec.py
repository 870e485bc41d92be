"""A specification and start weights that cannot be are refused in one sentence that names the argument."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from refusals import SPEC, H, refuses

from mnemos.memory import MemorySpec

# The specification --------------------------------------------------------------------------------------------------


WHOLE = ("key_dim", "value_dim", "depth", "degree", "window", "chunk_size", "ns_steps")
REFUSED = [
    *(
        ({name: value}, rf"^{name}=.*whole number >= 1")
        for name in WHOLE
        for value in (0, -3, 1.5, 2.0, "4", None, True)
    ),
    *(
        ({name: value}, rf"^{name}=.*choose one of")
        for name in ("structure", "objective", "rule", "features", "anchor", "read", "ns_coefficients")
        for value in ("nonsense", "", None, 3, ["mlp"])
    ),
    *(
        ({"expansion": value}, "^expansion=.*> 0")
        for value in (0, -1.0, float("nan"), float("inf"), "4", None, True, [4], 4j)
    ),
    *(({"feature_dim": value}, "^feature_dim=.*whole number") for value in (0, -1, 2.5, "8", True, 2**20 + 1)),
    *(
        ({"commit_every": value, "rule": "muon"}, "^commit_every=.*divide chunk_size=8")
        for value in (0, -1, 3, 5, 16, 2.0, True)
    ),
    ({"commit_every": 4}, "^commit_every .*rule='muon'"),
    ({"commit_every": 4, "rule": "gd", "structure": "linear"}, "^commit_every .*rule='muon'"),
    ({"anchor": "token", "structure": "mlp"}, "^anchor='token' goes with structure='linear' and rule='gd'.*'mlp'"),
    ({"anchor": "token", "structure": "gated_mlp"}, "^anchor='token' goes with.*'gated_mlp'"),
    ({"anchor": "token", "structure": "linear", "rule": "muon"}, "^anchor='token' goes with.*'muon'"),
    ({"decay_first": True}, "^decay_first=True needs anchor='token'"),
    ({"decay_first": True, "structure": "linear"}, "^decay_first=True needs anchor='token'"),
    ({"features": "tensor", "degree": 3}, "^degree=3 must be 2"),
    ({"features": "sketch", "feature_dim": 3}, "^feature_dim=3 must be"),
    *(({"momentum": value}, "^momentum=.*True or False") for value in ("no", None, 0, 1)),
    ({"decay_first": "no", "structure": "linear", "anchor": "token"}, "^decay_first=.*True or False"),
]
OVERSIZED = [
    *(
        ({name: 2**20 + 1}, f"^{name}=1048577 .*<= 1048576")
        for name in ("key_dim", "value_dim", "window", "chunk_size")
    ),
    *(({name: 10**12}, f"^{name}=") for name in WHOLE),
    *(({name: 65}, f"^{name}=65 .*<= 64") for name in ("depth", "degree", "ns_steps")),
    ({"expansion": 1e300}, r"^expansion=1e\+300 .*<= 1048576"),
    ({"expansion": 10**400}, r"^expansion=1000.*<= 1048576"),
    ({"expansion": 2.0**19, "value_dim": 1000}, "^expansion=524288.0 and value_dim=1000 .*hidden"),
    ({"features": "monomials", "degree": 64, "key_dim": 2**20}, "degree=64.*key_dim=1048576.*1048576 dimensions"),
    ({"features": "monomials", "degree": 9, "key_dim": 64}, "degree=9.*key_dim=64"),
]


@pytest.mark.parametrize(("options", "words"), REFUSED)
def test_a_spec_that_cannot_be_is_refused(options, words):
    refuses(words, lambda: MemorySpec(**({"key_dim": 4, "value_dim": 4, "chunk_size": 8} | options)))


@pytest.mark.parametrize(("options", "words"), OVERSIZED)
def test_a_spec_that_no_machine_could_hold_is_refused_at_once(options, words):
    fields = {"key_dim": 4, "value_dim": 4, "chunk_size": 8} | options
    refuses(words, lambda: MemorySpec(**fields))
    refuses(words, lambda: MemorySpec.from_json(json.dumps(fields)))


def test_the_largest_spec_is_accepted():
    MemorySpec(2**20, 2**20, structure="linear", window=2**20, chunk_size=2**20)
    MemorySpec(4, 2**18, depth=64, rule="muon", ns_steps=64)


def test_a_spec_cannot_be_changed_after_it_was_made():
    with pytest.raises(dataclasses.FrozenInstanceError):
        SPEC.window = 7


def test_json_with_an_unknown_field_is_refused_by_name():
    text = json.dumps(json.loads(SPEC.to_json()) | {"wibble": 1, "wobble": 2})
    refuses("wibble, wobble", lambda: MemorySpec.from_json(text))
    refuses("^window=0", lambda: MemorySpec.from_json(json.dumps(json.loads(SPEC.to_json()) | {"window": 0})))
    assert MemorySpec.from_json(SPEC.to_json()) == SPEC


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("not json", ""),
        ("{", ""),
        ("", ""),
        (None, "JSON"),
        ("[" * 100_000, "JSON"),
        ("3", "object.* int"),
        ("null", "object.* NoneType"),
        ("[]", "object.* list"),
        ("{}", "needs key_dim, value_dim"),
        ('{"key_dim": 4}', "needs value_dim"),
    ],
    ids=lambda x: str(x)[:20],
)
def test_text_that_is_no_spec_is_refused(text, words):
    refuses(words, lambda: MemorySpec.from_json(text))


# Initial weights ----------------------------------------------------------------------------------------------------


MLP = MemorySpec(4, 4, structure="mlp", depth=2, expansion=2)
FIRST, SECOND = (H, 4, 8), (H, 8, 4)


@pytest.mark.parametrize(
    ("shapes", "words"),
    [
        ([FIRST], "^W0 has 1 matrices.* 2"),
        ([FIRST, SECOND, SECOND], "^W0 has 3 matrices.* 2"),
        ([], "^W0 has 0 matrices.* 2"),
        ([SECOND, FIRST], r"^W0\[0\] has shape \(3, 8, 4\).*\(3, 4, 8\)"),
        ([FIRST, (H, 8, 5)], r"^W0\[1\] has shape \(3, 8, 5\).*\(3, 8, 4\)"),
        ([FIRST, (H + 1, 8, 4)], r"^W0\[1\] has shape \(4, 8, 4\)"),
        ([(4, 8), (8, 4)], r"^W0\[0\] has shape \(4, 8\)"),
        ([(1, *FIRST), (1, *SECOND)], r"^W0\[0\] has shape"),
        ([(), ()], r"^W0\[0\] has shape \(\).*\(heads, 4, 8\)"),
        ([(0, 4, 8), (0, 8, 4)], r"^W0\[0\] has shape"),
    ],
)
def test_start_weights_of_a_wrong_shape_or_number_are_refused(shapes, words):
    refuses(words, lambda: MLP.initial_state([torch.zeros(shape) for shape in shapes], batch=1))


@pytest.mark.parametrize(
    ("W0", "words"),
    [
        (None, "^W0 must be a list of tensors"),
        ([[1.0], [2.0]], "^W0 must be a list of tensors"),
        ([torch.zeros(FIRST), torch.zeros(SECOND, dtype=torch.int64)], r"^W0\[1\] has type torch.int64"),
        ([torch.zeros(FIRST), torch.zeros(SECOND, dtype=torch.complex64)], r"^W0\[1\] has type torch.complex64"),
        ([torch.zeros(FIRST), torch.zeros(SECOND, device="meta")], r"^W0\[1\] is on meta.*cpu"),
    ],
)
def test_start_weights_of_a_wrong_kind_are_refused(W0, words):
    refuses(words, lambda: MLP.initial_state(W0, batch=1))


@pytest.mark.parametrize("batch", [0, -2, 1.5, "2", None, True])
def test_a_batch_that_is_no_number_of_rows_is_refused(batch):
    refuses("^batch=", lambda: MLP.initial_state([torch.zeros(FIRST), torch.zeros(SECOND)], batch=batch))
