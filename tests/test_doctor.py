"""The doctor on this machine, and on directories and limits made to be ill."""

from __future__ import annotations

import io
import os
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from squall import doctor
from squall.doctor import Finding
from squall.transports.doorbell import PATH_BYTES


def test_a_machine_that_runs_these_tests_can_run_squall() -> None:
    findings = doctor.checkup()
    assert [finding for finding in findings if finding.ok is False] == []
    assert len({finding.name for finding in findings}) == len(doctor.CHECKS)


@pytest.mark.parametrize("check", doctor.CHECKS)
def test_whatever_is_not_well_has_a_remedy(check) -> None:
    finding = check()
    assert finding.found
    assert finding.ok or finding.remedy


def test_render_says_everything() -> None:
    console = Console(file=io.StringIO(), width=200)
    findings = [Finding("one", True, "fine"), Finding("two", None, "slow", "buy"), Finding("three", False, "no", "go")]
    doctor.render(findings, console)
    lines = [" ".join(line.split()) for line in console.file.getvalue().splitlines()]
    assert lines == ["ok one fine", "warning two slow", "-> buy", "failed three no", "-> go"]


def test_square_brackets_are_text() -> None:
    console = Console(file=io.StringIO(), width=200)
    doctor.render([Finding("ray", True, "missing", "pip install 'squall-train[ray]'")], console)
    assert "'squall-train[ray]'" in console.file.getvalue()


# ---------------------------------------------------------------- software


def test_old_python_and_other_systems_fail() -> None:
    assert doctor.python((3, 10, 4), "Linux").ok is False
    assert doctor.python((3, 12, 0), "Linux").ok is True
    assert "Linux" in doctor.python((3, 12, 0), "Darwin").remedy


def test_a_library_that_is_missing_is_named() -> None:
    finding = doctor.libraries({"msgspec": "msgspec", "no_such_module": "no-such-package"})
    assert finding.ok is False
    assert "no-such-package: No module named" in finding.found
    assert finding.remedy.endswith("no-such-package")


def test_a_library_that_breaks_while_it_loads_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_for_squall.py").write_text("raise OSError('libbroken.so: cannot open')")
    monkeypatch.syspath_prepend(tmp_path)
    finding = doctor.libraries({"broken_for_squall": "broken"})
    assert finding.ok is False
    assert "libbroken.so" in finding.found


def test_torch_that_cannot_be_imported_is_a_finding(tmp_path: Path) -> None:
    """In an interpreter of its own, with a broken torch before the real one."""
    (tmp_path / "torch.py").write_text("raise ImportError('libtorch.so')")
    file = doctor.__file__
    code = (
        "import importlib.util, sys\n"
        f"spec = importlib.util.spec_from_file_location('doctor', {file!r})\n"
        "sys.modules['doctor'] = doctor = importlib.util.module_from_spec(spec)\n"
        "spec.loader.exec_module(doctor)\n"
        "print(*(check().ok for check in (doctor.pytorch, doctor.fused_optimizers, doctor.gpu)))\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert done.stdout.split() == ["False", "None", "None"]


def test_extras_say_how_to_add_them() -> None:
    assert doctor.extra("no_such_module", "pip install it").remedy == "to add it: pip install it"
    assert doctor.extra("rich", "").remedy == ""


# ---------------------------------------------------------------- processors and memory


def test_a_quota_below_the_cores_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / "cpu.max").write_text("50000 100000\n")  # half a core
    finding = doctor.cores(tmp_path)
    assert finding.ok is None
    assert "0.5" in finding.found
    assert "1 or below" in finding.remedy


def test_quotas_of_both_versions_of_cgroups(tmp_path: Path) -> None:
    assert doctor._cpu_quota(tmp_path) is None
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu/cpu.cfs_period_us").write_text("100000")
    (tmp_path / "cpu/cpu.cfs_quota_us").write_text("-1")
    assert doctor._cpu_quota(tmp_path) is None
    (tmp_path / "cpu/cpu.cfs_quota_us").write_text("150000")
    assert doctor._cpu_quota(tmp_path) == 1.5
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert doctor._cpu_quota(tmp_path) is None


@pytest.fixture
def one_core() -> Iterator[None]:
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    yield
    os.sched_setaffinity(0, before)


@pytest.mark.usefixtures("one_core")
def test_one_core_is_a_warning(tmp_path: Path) -> None:
    assert doctor.cores(tmp_path).ok is None


def test_memory_of_a_small_container(tmp_path: Path) -> None:
    assert doctor.memory(cgroup=tmp_path).found.count("GiB") == 2
    (tmp_path / "memory.max").write_text(str(2**29))
    finding = doctor.memory(cgroup=tmp_path)
    assert finding.ok is None
    assert "0.5 GiB" in finding.found


def test_memory_that_is_not_told_is_a_warning(tmp_path: Path) -> None:
    assert doctor.memory(meminfo=tmp_path / "meminfo").ok is None


def test_shared_memory_counts_parameters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "ENOUGH_SHARED_MEMORY", 0)
    finding = doctor.shared_memory(tmp_path)
    assert finding.ok is True
    assert "million parameters" in finding.found
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(doctor, "ENOUGH_SHARED_MEMORY", 2**60)
    assert "--shm-size" in doctor.shared_memory(tmp_path).remedy


def test_the_room_for_parameters_is_what_the_arena_takes() -> None:
    from squall.runtime.arena import Shape

    parameters = 1_000_000
    plain = Shape(parameters, replicas=2).total_bytes / parameters
    overlapped = Shape(parameters, replicas=2, weights=2, gradients=2).total_bytes / parameters
    assert plain == pytest.approx(doctor.SHARED_BYTES, rel=0.01)
    assert overlapped == pytest.approx(doctor.SHARED_BYTES_OVERLAPPED, rel=0.01)


def test_shared_memory_that_is_not_there_has_a_fallback(tmp_path: Path) -> None:
    finding = doctor.shared_memory(tmp_path / "shm")
    assert finding.ok is None
    assert "No such file" in finding.found
    assert "slower" in finding.found


# ---------------------------------------------------------------- links between processes


def test_local_sockets_leave_nothing_behind(tmp_path: Path) -> None:
    assert doctor.local_sockets(tmp_path).ok is True
    assert list(tmp_path.iterdir()) == []


def test_too_long_a_socket_path_fails(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * PATH_BYTES)
    deep.mkdir()
    finding = doctor.local_sockets(deep)
    assert finding.ok is False
    assert "TMPDIR" in finding.remedy


def test_the_limit_of_socket_paths_is_the_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with socket.socket(socket.AF_UNIX) as fits:
        fits.bind("a" * PATH_BYTES)
    with socket.socket(socket.AF_UNIX) as too_long, pytest.raises(OSError, match="too long"):
        too_long.bind("a" * (PATH_BYTES + 1))


def test_no_place_for_sockets_fails(tmp_path: Path) -> None:
    assert doctor.local_sockets(tmp_path / "missing").ok is False


def test_tcp_that_cannot_be_bound_is_a_warning() -> None:
    assert doctor.tcp("192.0.2.1").ok is None  # an address for documentation, that no machine has (RFC 5737)


@pytest.fixture
def few_files() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("few_files")
def test_few_open_files_are_a_warning() -> None:
    finding = doctor.open_files()
    assert finding.ok is None
    assert "256" in finding.found
    assert finding.remedy.startswith("ulimit -n")
