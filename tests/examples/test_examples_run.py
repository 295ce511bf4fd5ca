"""The examples as a newcomer starts them: through the command line, in processes."""

from __future__ import annotations

import json
import os
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from squall.record.rows import ExtraRow
from squall.report import Reader, audit
from tests import deep
from tests.warm import python, squall

EXAMPLES = Path(__file__).parents[2] / "examples"


def train(example: str, directory: Path, *flags: str) -> dict[str, Any]:
    ran = squall("train", EXAMPLES / example, "--run-dir", directory, "--json", *flags, draws=True)
    assert ran.returncode == 0, ran.stderr
    summary: dict[str, Any] = json.loads(ran.stdout)
    return summary


def test_digits_reach_what_the_readme_promises(tmp_path: Path) -> None:
    summary = train("digits.py", tmp_path / "digits")
    assert summary["metrics"]["accuracy"] >= 0.97
    assert summary["examples"] == 15 * 1437
    assert (tmp_path / "digits" / "report.html").exists()


@deep.only
def test_a_student_of_the_digits_is_taught_by_their_teacher(tmp_path: Path) -> None:
    train("digits.py", tmp_path / "teacher")
    flags = ("--run-dir", tmp_path / "student", "--json", "--epochs", "5")
    ran = squall("distill", tmp_path / "teacher", EXAMPLES / "digits_student.py", *flags)
    assert ran.returncode == 0, ran.stderr
    models = json.loads(ran.stdout)["models"]
    assert models["teacher"]["parameters"] > 10 * models["student distilled"]["parameters"]
    assert models["student distilled"]["accuracy"] > 0.8


@deep.only
@pytest.mark.timeout(600)
def test_a_student_of_the_language_model_is_taught_by_its_teacher(tmp_path: Path) -> None:
    train("stdlib_lm.py", tmp_path / "teacher", "--steps", "20")
    flags = ("--temperature", "1", "--run-dir", tmp_path / "student", "--json", "--steps", "40", "--not-alone")
    ran = squall("distill", tmp_path / "teacher", EXAMPLES / "stdlib_student.py", *flags)
    assert ran.returncode == 0, ran.stderr
    models = json.loads(ran.stdout)["models"]
    assert models["teacher"]["parameters"] > 9 * models["student distilled"]["parameters"]
    assert models["student distilled"]["bits_per_byte"] < 7.0  # guessing costs 8


def test_two_columns_train(tmp_path: Path) -> None:
    assert train("alexnet_digits.py", tmp_path / "alexnet", "--steps", "5")["updates"] == 5


@deep.only
@pytest.mark.timeout(600)
def test_two_columns_read_digits(tmp_path: Path) -> None:
    summary = train("alexnet_digits.py", tmp_path / "alexnet")
    assert summary["metrics"]["accuracy"] >= 0.95


@deep.only
def test_the_language_model_learns_the_bytes_frequencies(tmp_path: Path) -> None:
    """Uniform guessing costs 8 bits; the frequencies of single bytes in such text alone are worth about 4.6."""
    summary = train("stdlib_lm.py", tmp_path / "lm", "--steps", "60")
    assert summary["metrics"]["bits_per_byte"] < 6.0
    assert summary["updates"] == 60


def test_a_trainer_with_a_loop_of_its_own_is_trained_by_replicas_and_replayed(tmp_path: Path) -> None:
    flags = ["--steps", "21", "--batch", "1", "--passes", "2"]
    ran = squall("run", "--run-dir", tmp_path / "run", "--replicas", "2", EXAMPLES / "own_loop.py", *flags)
    assert ran.returncode == 0, ran.stderr
    assert re.findall(r"step (\d+): \d\.\d\d bits", ran.stdout) == ["0", "20"], "each by the replica that had it"
    assert "finished: its limit of 21 steps is reached" in ran.stdout
    reader = Reader(tmp_path / "run" / "run.sqlite")
    assert str(audit(reader)).endswith("Epoch 0: each of 42 examples trained exactly once.")
    rated = [row for row in reader.rows(ExtraRow) if row.name == "rate_factor"]
    assert sum(row.examples for row in rated) == 42, "the rate of all, those at the group's own among them"
    assert all(0.1 <= row.value <= 1 for row in rated)
    reader.close()
    ran = squall("replay", "--check", tmp_path / "run")
    assert (ran.returncode, "the same, bit for bit: 21 updates" in ran.stdout) == (0, True), ran.stdout + ran.stderr


def without(package: str, extra: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(find_spec(package) is None, reason=f"pip install 'squall-train[{extra}]'")


@pytest.mark.parametrize(
    ("example", "accuracy"),
    [
        ("plain_loop.py", 0.94),
        pytest.param("trainer_digits.py", 0.95, marks=without("transformers", "trainer")),
        pytest.param("lightning_digits.py", 0.95, marks=without("lightning", "lightning")),
    ],
)
def test_a_loop_learns_the_digits_alone_and_as_two_replicas(tmp_path: Path, example: str, accuracy: float) -> None:
    script, there = EXAMPLES / example, tmp_path / "there"
    there.mkdir()
    run = ["--run-dir", str(tmp_path / "run"), "--replicas", "2", "--strategy", "downpour"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}  # where others compute too, threads wait for each other
    for started, command in ((python, ()), (squall, ("run", *run))):
        ran = started(*command, script, cwd=there, env=environment)
        assert ran.returncode == 0, ran.stderr
        found = re.findall(r"after the last update: {'accuracy': (0\.\d+)}", ran.stdout)
        assert len(found) == 1, ran.stdout
        assert float(found[0]) >= accuracy
    assert list(there.iterdir()) == []
    reader = Reader(tmp_path / "run" / "run.sqlite")
    trained = audit(reader)
    reader.close()
    assert trained.complete, str(trained)


@without("transformers", "trainer")
def test_a_model_of_transformers_is_pretrained_saved_and_fine_tuned(tmp_path: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}  # as a nursery has it that is not forked
    ran = python(EXAMPLES / "transformers_digits.py", tmp_path / "vit", cwd=tmp_path, env=environment)
    assert ran.returncode == 0, ran.stderr
    assert "left threads running" not in ran.stderr
    found = re.findall(rf"accuracy of {tmp_path}/vit/fine-tuned: (0\.\d+)\n", ran.stdout)
    assert len(found) == 1, ran.stdout
    assert float(found[0]) >= 0.85
    kept = [sorted(path.name for path in (tmp_path / "vit" / name).iterdir()) for name in ("pretrained", "fine-tuned")]
    assert kept == [["config.json", "model.safetensors"]] * 2


@without("keras", "keras")
@deep.only
def test_a_keras_model_is_trained_and_replayed(tmp_path: Path) -> None:
    """The replay comes to Keras by the kept code, and not by the file that says what Keras computes with."""
    assert train("keras_digits.py", tmp_path / "run", "--epochs", "16")["metrics"]["accuracy"] > 0.9
    elsewhere = {**os.environ, "KERAS_BACKEND": "jax"}
    ran = squall("replay", "--check", tmp_path / "run", env=elsewhere)
    assert (ran.returncode, "the same, bit for bit" in ran.stdout) == (0, True), ran.stdout + ran.stderr
    ran = squall("export", tmp_path / "run", tmp_path / "digits.keras", env=elsewhere)
    assert (ran.returncode, (tmp_path / "digits.keras").is_file()) == (0, True), ran.stdout + ran.stderr
