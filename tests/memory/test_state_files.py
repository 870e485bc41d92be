"""The state of a memory in its file."""

from __future__ import annotations

import dataclasses
import json
import os
import stat
import struct

import pytest
import torch
from cases import inputs
from safetensors.torch import load_file, save_file
from states import KINDS, SPEC, after, assert_identical, every_kind, go_on, sliced

from mnemos.memory import MemorySpec, MemoryState, scan, step

# Files --------------------------------------------------------------------------------------------------------------


@every_kind
@pytest.mark.parametrize("length", [0, 1, 8, 21])
def test_save_load_continue_is_identical_to_the_last_bit(case, length, tmp_path):
    state = after(case, length)
    state.save(tmp_path / "state.safetensors")
    loaded = MemoryState.load(tmp_path / "state.safetensors", case.spec)
    assert_identical(loaded, state)
    y, final = go_on(case, state)
    z, other = go_on(case, loaded)
    assert torch.equal(y, z)
    assert_identical(final, other)
    x = inputs(case, batch=2, length=5, seed=4)
    for t in range(5):
        token = sliced(x, t, t + 1)
        y, state = step(*token, state, case.spec, x.features)
        z, loaded = step(*token, loaded, case.spec, x.features)
        assert torch.equal(y, z)
    assert_identical(state, loaded)


@every_kind
def test_a_state_with_rows_at_different_positions_survives_its_file(case, tmp_path):
    state = MemoryState.stack([after(case, n, batch=1, seed=n) for n in (3, 10, 16)])
    assert state.chunk_offset is None
    state.save(tmp_path / "a")
    loaded = MemoryState.load(tmp_path / "a")
    assert_identical(loaded, state)
    y, final = go_on(case, state)
    z, other = go_on(case, loaded)
    assert torch.equal(y, z)
    assert_identical(final, other)


def test_convolution_tails_and_float32_survive_the_file(tmp_path):
    state = dataclasses.replace(after(KINDS[0], 5, dtype=torch.float32), conv=torch.randn(2, 3, 24))
    state.save(tmp_path / "a")
    loaded = MemoryState.load(tmp_path / "a", SPEC)
    assert_identical(loaded, state)
    assert loaded.weights[0].dtype == torch.float32


def test_saving_a_state_with_a_graph_saves_its_numbers(tmp_path):
    x = inputs(KINDS[0], grad=True)
    _, state = scan(x.q, x.k, x.v, x.gates, x.state(SPEC), SPEC)
    assert state.weights[0].requires_grad
    state.save(str(tmp_path / "a"))
    loaded = MemoryState.load(str(tmp_path / "a"))
    assert_identical(loaded, state.detach())
    assert not loaded.weights[0].requires_grad


def test_saving_again_replaces_the_file(tmp_path):
    path = tmp_path / "a"
    after(KINDS[0], 5).save(path)
    later = after(KINDS[0], 9)
    later.save(path)
    assert_identical(MemoryState.load(path), later)
    assert os.listdir(tmp_path) == ["a"]


def refuses(path, words: str, spec: MemorySpec | None = None) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        MemoryState.load(path, spec)
    message = str(caught.value)
    assert str(path) in message and "\n" not in message, message


@pytest.mark.parametrize(
    "changed",
    [{"window": 4}, {"chunk_size": 16, "read": "before"}, {"momentum": False}, {"expansion": 3.0}, {"key_dim": 5}],
)
def test_loading_into_another_spec_names_the_fields_that_differ(changed, tmp_path):
    after(KINDS[0], 5).save(tmp_path / "a")
    other = dataclasses.replace(SPEC, **changed)
    refuses(tmp_path / "a", "belongs to another memory", other)
    with pytest.raises(ValueError) as caught:
        MemoryState.load(tmp_path / "a", other)
    for field in dataclasses.fields(SPEC):
        named = f"{field.name}={getattr(SPEC, field.name)!r} (here {getattr(other, field.name)!r})" in str(caught.value)
        assert named == (field.name in changed)


def test_a_file_cut_short_anywhere_is_refused(tmp_path):
    path = tmp_path / "a"
    after(KINDS[0], 5).save(path)
    whole = path.read_bytes()
    for size in (0, 1, 7, 8, 9, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        refuses(path, "not a readable memory state")
    path.write_bytes(whole + b"x")
    refuses(path, "not a readable memory state")


def test_random_bytes_and_a_corrupt_header_are_refused(tmp_path):
    path = tmp_path / "a"
    generator = torch.Generator().manual_seed(0)
    for size in (1, 8, 64, 5000):
        path.write_bytes(bytes(torch.randint(0, 256, (size,), generator=generator, dtype=torch.uint8).tolist()))
        refuses(path, "not a readable memory state")
    after(KINDS[0], 5).save(path)
    whole = path.read_bytes()
    for at in (0, 5, 8, 9, 40):
        path.write_bytes(whole[:at] + b"\xff" + whole[at + 1 :])
        refuses(path, "not a readable memory state|broken header")
    path.write_bytes(struct.pack("<Q", 2**62) + whole[8:])
    refuses(path, "not a readable memory state")


def test_a_folder_is_refused_and_a_missing_file_is_a_missing_file(tmp_path):
    refuses(tmp_path, "not a readable memory state")
    with pytest.raises(FileNotFoundError):
        MemoryState.load(tmp_path / "nothing here")
    with pytest.raises(FileNotFoundError):
        after(KINDS[0], 5).save(tmp_path / "no folder" / "a")


@pytest.fixture
def parts(tmp_path):
    """A saved state taken apart, and a way to write it back changed."""
    path = tmp_path / "a"
    after(KINDS[0], 5).save(path)
    tensors = load_file(path)
    metadata = {"format": "mnemos.memory-state/1", "spec": SPEC.to_json()}

    def write(changed_tensors: dict | None = None, **changed_metadata):
        kept = {k: v for k, v in (metadata | changed_metadata).items() if v is not None}
        save_file(tensors if changed_tensors is None else changed_tensors, path, kept or None)
        return path

    assert_identical(MemoryState.load(write()), after(KINDS[0], 5))
    return tensors, write


def test_a_safetensors_file_that_is_no_state_is_refused(parts):
    _, write = parts
    refuses(write(format=None, spec=None), "not a memory state of this version")
    refuses(write(format=None), "not a memory state of this version")
    refuses(write(format="mnemos.memory-state/2"), "not a memory state of this version")
    refuses(write({"model.weight": torch.zeros(3)}, format=None, spec=None), "not a memory state of this version")
    refuses(write({}), "holds no fast weights")
    refuses(write({"weights.0": torch.zeros(2)}), "holds no fast weights")


@pytest.mark.parametrize(
    "header",
    [
        None,
        "",
        "nonsense",
        "3",
        "null",
        "[]",
        "{}",
        '{"key_dim": 4}',
        json.dumps({"key_dim": 4, "value_dim": 4, "wibble": 1}),
        json.dumps({"key_dim": 4, "value_dim": 0}),
        json.dumps({"key_dim": "4", "value_dim": 4}),
        json.dumps({"key_dim": 4, "value_dim": 4, "structure": "of another program"}),
        json.dumps({"key_dim": 4, "value_dim": 4, "expansion": float("inf")}),
        json.dumps({"key_dim": 4, "value_dim": 4, "expansion": "x"}),
        "[" * 100_000,
    ],
    ids=lambda header: str(header)[:40],
)
def test_a_file_whose_header_holds_no_spec_is_refused(parts, header):
    _, write = parts
    refuses(write(spec=header), "broken header")


def test_a_missing_extra_or_misshaped_tensor_is_refused_by_name(parts):
    tensors, write = parts
    for name in tensors:
        if name != "weights.0":
            refuses(write({k: v for k, v in tensors.items() if k != name}), rf"does not fit its own header: {name}\b")
            wrong = tensors[name].unsqueeze(0).contiguous()
            refuses(write(tensors | {name: wrong}), rf"does not fit its own header: {name}\b")
    refuses(write({k: v for k, v in tensors.items() if k != "weights.0"}), "holds no fast weights")
    refuses(write(tensors | {"extra": torch.zeros(1)}), "does not fit its own header: extra has shape")
    refuses(
        write(tensors | {"weights.2": tensors["weights.0"].clone()}), "does not fit its own header: weights.2 has shape"
    )
    refuses(write(tensors | {"weights.0": tensors["weights.0"][:1].clone()}), "does not fit its own header")
    refuses(write(tensors | {"conv": torch.zeros(3, 3, 8)}), "conv")
    refuses(write(tensors | {"conv": torch.zeros(2, 8)}), "conv")


def test_number_types_that_do_not_go_together_are_refused(parts):
    tensors, write = parts
    refuses(write(tensors | {"momentum.1": tensors["momentum.1"].float()}), "number types")
    refuses(write(tensors | {"position": tensors["position"].to(torch.int32)}), "position is .* of torch.int32")
    refuses(write(tensors | {"position": tensors["position"].double()}), "position is .* of torch.float64")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int64])
def test_a_state_of_narrow_or_whole_numbers_is_refused(parts, dtype):
    tensors, write = parts
    refuses(write({k: v if k == "position" else v.to(dtype) for k, v in tensors.items()}), "type|float")


def test_a_negative_position_is_refused(parts):
    tensors, write = parts
    refuses(write(tensors | {"position": torch.tensor([-3, -3])}), "position")


@pytest.mark.parametrize("failing", ["fsync", "replace"])
@pytest.mark.parametrize("error", [OSError("disk full"), KeyboardInterrupt()], ids=["disk full", "interrupt"])
def test_a_write_that_fails_leaves_no_file_and_an_old_one_intact(failing, error, tmp_path, monkeypatch):
    def broken(*_):
        raise error

    old = after(KINDS[0], 5)
    old.save(tmp_path / "old")
    with monkeypatch.context() as patch:
        patch.setattr(os, failing, broken)
        for name in ("old", "new"):
            with pytest.raises(type(error)):
                after(KINDS[0], 9).save(tmp_path / name)
    assert os.listdir(tmp_path) == ["old"]
    assert_identical(MemoryState.load(tmp_path / "old"), old)


def test_the_file_is_on_disk_before_it_takes_its_name(tmp_path, monkeypatch):
    order = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda file: (order.append("fsync"), fsync(file)))
    monkeypatch.setattr(os, "replace", lambda a, b: (order.append("replace"), replace(a, b)))
    after(KINDS[0], 5).save(tmp_path / "a")
    assert order[:2] == ["fsync", "replace"]


def test_a_saved_file_has_the_permissions_of_any_new_file(tmp_path):
    (tmp_path / "plain").write_bytes(b"")
    after(KINDS[0], 5).save(tmp_path / "a")
    modes = [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("plain", "a")]
    assert modes[0] == modes[1]
