"""Compiled kernels are loaded only if they are what this user compiled."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from helpers import needs_kernel
from mnemos.backends.cpu import build

pytestmark = [needs_kernel, pytest.mark.skipif(os.name != "posix", reason="files have owners on POSIX systems alone")]
IS_ROOT = os.name == "posix" and os.geteuid() == 0
STRANGER = 12345
HOSTILE = """
#include <cstdio>
__attribute__((constructor)) static void run() { if (FILE* file = fopen("%s", "w")) fclose(file); }
extern "C" int mnemos_decay;
"""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """A cache with `decay` compiled in it."""
    folder = tmp_path_factory.mktemp("compiled")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        build.library.cache_clear()
        build.library("decay")
    return folder


@pytest.fixture
def folder(compiled, tmp_path, monkeypatch):
    """A copy of that cache, of which this process has loaded nothing."""
    shutil.copytree(compiled, tmp_path / "cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    caches = build.library, build.gemm, build._missing
    for cached in caches:
        cached.cache_clear()
    yield tmp_path / "cache" / "mnemos" / "kernels"
    for cached in caches:
        cached.cache_clear()


def library_file(folder: Path) -> Path:
    (found,) = folder.glob("decay-*.so")
    return found


def loads() -> bool:
    return hasattr(build.library("decay"), "_handle")


def refusal() -> str:
    with pytest.warns(RuntimeWarning), pytest.raises(build.Unavailable) as refused:
        build.library("decay")
    return str(refused.value)


def loads_elsewhere() -> bool:
    """The same in a process of its own, which a bad file could kill."""
    code = "from mnemos.backends.cpu import build; build.library('decay')"
    environment = os.environ | {"PYTHONPATH": str(Path(build.__file__).parents[3])}
    return subprocess.run([sys.executable, "-c", code], env=environment).returncode == 0


def hostile_library(tmp_path: Path) -> tuple[bytes, Path]:
    """A library that leaves a mark when it is loaded."""
    mark = tmp_path / "mark"
    (tmp_path / "hostile.cpp").write_text(HOSTILE % mark)
    command = [build.compiler()[0], "-shared", "-fPIC", str(tmp_path / "hostile.cpp"), "-o", str(tmp_path / "hostile")]
    subprocess.run(command, check=True)
    return (tmp_path / "hostile").read_bytes(), mark


def put(file: Path, content: bytes) -> None:
    file.chmod(0o700)
    file.write_bytes(content)


def test_a_half_written_library_is_compiled_anew_and_never_mapped(folder):
    file = library_file(folder)
    whole = file.read_bytes()
    put(file, whole[: len(whole) * 3 // 10])
    assert loads_elsewhere()
    assert library_file(folder).read_bytes() == whole


def test_a_library_whose_tail_was_never_written_is_compiled_anew(folder):
    """What a power cut leaves of a file: its size is right, its last blocks are zeros."""
    file = library_file(folder)
    whole = file.read_bytes()
    put(file, whole[: len(whole) // 2] + bytes(len(whole) - len(whole) // 2))
    assert loads_elsewhere()
    assert library_file(folder).read_bytes() == whole


def test_a_library_with_other_content_is_not_run(folder, tmp_path):
    content, mark = hostile_library(tmp_path)
    file = library_file(folder)
    whole = file.read_bytes()
    put(file, content)
    assert loads()
    assert not mark.exists() and library_file(folder).read_bytes() == whole


def test_a_library_exchanged_between_check_and_load_is_not_run(folder, tmp_path, monkeypatch):
    """The file is replaced at the last moment before the loader opens it."""
    _, mark = hostile_library(tmp_path)
    file, plain = library_file(folder), build.ctypes.CDLL

    def late(name, *rest):
        os.replace(tmp_path / "hostile", file)
        return plain(name, *rest)

    monkeypatch.setattr(build.ctypes, "CDLL", late)
    if not Path("/proc/self/fd").exists():
        pytest.skip("this system has no /proc: nobody else can reach the folder there")
    build.library("decay")
    assert not mark.exists()


def test_a_link_in_place_of_a_library_is_not_followed(folder, tmp_path):
    content, mark = hostile_library(tmp_path)
    file = library_file(folder)
    file.unlink()
    file.symlink_to(tmp_path / "hostile")
    assert loads()
    assert not mark.exists() and not library_file(folder).is_symlink()
    assert (tmp_path / "hostile").read_bytes() == content


def test_a_library_that_others_may_write_is_compiled_anew(folder):
    library_file(folder).chmod(0o777)
    assert loads()
    assert not library_file(folder).stat().st_mode & 0o022


@pytest.mark.skipif(not IS_ROOT, reason="only root can give files away")
def test_a_library_of_another_user_is_compiled_anew(folder):
    os.chown(library_file(folder), STRANGER, STRANGER)
    assert loads()
    assert library_file(folder).stat().st_uid == os.geteuid()


@pytest.mark.parametrize("mode", [0o777, 0o775])
@pytest.mark.parametrize("levels", [1, 2])
def test_a_parent_that_others_may_write_to_is_refused(folder, mode, levels):
    parent = folder.parents[levels - 1]
    os.chown(parent, -1, STRANGER) if IS_ROOT else None
    parent.chmod(mode if IS_ROOT else 0o777)
    assert refusal().startswith(f"{parent} can be written to by others")


def test_a_refusal_is_announced_with_its_remedy(folder):
    folder.parent.chmod(0o777)
    with pytest.warns(
        RuntimeWarning, match=r"compiled kernels are off: .*mnemos can be written to by others.*chmod go-w"
    ):
        assert build.unavailable_reason("chain")


@pytest.mark.skipif(not IS_ROOT, reason="only root can give folders away")
@pytest.mark.parametrize("levels", [1, 2])
def test_a_parent_of_another_user_is_refused_even_for_root(folder, levels):
    """Root that ran kernels from a user's cache would run the user's code."""
    parent = folder.parents[levels - 1]
    os.chown(parent, STRANGER, STRANGER)
    assert refusal().startswith(f"{parent} can be written to by others")


def test_a_sticky_parent_is_fine(folder):
    folder.parents[1].chmod(0o1777)  # as /tmp is
    assert loads()


@pytest.mark.skipif(not IS_ROOT, reason="only root can give links away")
def test_a_way_through_a_link_of_another_user_is_refused(folder, tmp_path, monkeypatch):
    link = tmp_path / "link"
    link.symlink_to(folder.parents[1])
    monkeypatch.setenv("XDG_CACHE_HOME", str(link))
    assert loads()
    build.library.cache_clear()
    os.chown(link, STRANGER, STRANGER, follow_symlinks=False)
    assert refusal().startswith(f"{link} can be written to by others")


def test_folders_are_made_for_the_user_alone_whatever_the_umask(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "new"))
    before = os.umask(0)
    try:
        assert loads()
    finally:
        os.umask(before)
    assert (tmp_path / "new" / "mnemos").stat().st_mode & 0o777 == 0o700


def test_what_a_killed_compiler_left_is_removed_once_it_is_old(folder):
    old, young = folder / ".decay-0-abc.part", folder / ".decay-0-def.part"
    for file in (old, young):
        file.touch()
    os.utime(old, (time.time() - 7200,) * 2)
    library_file(folder).unlink()
    build.library("decay")
    assert not old.exists() and young.exists()
