"""The table of strategies, their recipes, what they refuse, and that the sealed packages stay sealed."""

import dataclasses
import doctest
import importlib
import inspect
import pkgutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

import squall
import squall.strategies
from squall.protocol.exchanges import Cadence, Dealing, Exchanges, Rules
from squall.runtime.optimizers import check_optimizers
from squall.strategies import STRATEGIES, Downpour, Recipe, SingleProcess, Strategy, Synchronous

ROOT = Path(__file__).parents[2]
MODULES = [
    importlib.import_module(f"squall.strategies.{info.name}")
    for info in pkgutil.iter_modules(squall.strategies.__path__)
]
SGD = partial(torch.optim.SGD, lr=0.1)


def concrete() -> list[type[Strategy]]:
    classes = [c for module in MODULES for _, c in inspect.getmembers(module, inspect.isclass)]
    return sorted(
        {c for c in classes if issubclass(c, Strategy) and not inspect.isabstract(c)}, key=lambda c: c.__name__
    )


# ---------------------------------------------------------------- the table


def test_the_table_names_every_strategy_there_is() -> None:
    assert sorted(STRATEGIES.values(), key=lambda c: c.__name__) == concrete()
    assert all(name == name.lower() and name.isidentifier() for name in STRATEGIES)


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_strategy_is_a_frozen_dataclass_that_compiles_with_its_defaults(name: str) -> None:
    strategy = STRATEGIES[name]()
    assert dataclasses.is_dataclass(strategy)
    with pytest.raises(dataclasses.FrozenInstanceError):
        strategy.optimizer = SGD  # type: ignore[misc]
    assert isinstance(strategy.recipe(), Recipe)
    assert getattr(squall, type(strategy).__name__) is type(strategy)


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_docstring_has_the_arguments_an_example_the_source_and_when_not_to_use_it(name: str) -> None:
    strategy = STRATEGIES[name]
    text = inspect.getdoc(strategy) or ""
    for field in dataclasses.fields(strategy):
        assert f"    {field.name}: " in text
    assert all(part in text for part in ("Args:", "Example:", ">>> ", "Source: ", "Not to be used "))


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__.rpartition(".")[2])
def test_the_examples_in_docstrings_run(module: object) -> None:
    result = doctest.testmod(module)
    assert result.failed == 0
    declares = any(c.__module__ == module.__name__ for c in concrete())
    assert result.attempted > 0 or not declares


# ---------------------------------------------------------------- recipes


def test_downpour() -> None:
    strategy = Downpour(
        replicas=5, shards=3, optimizer=SGD, push_every=4, fetch_every=2, warm_start=100, max_delay=7, overlap=True
    )
    recipe = strategy.recipe()
    exchanges = recipe.loop.exchanges
    assert exchanges == Exchanges(Cadence(4, 2, overlap=True), Rules("each", 7), Dealing(warm_start=100))
    assert exchanges.awaited
    assert not exchanges.in_rounds
    assert (recipe.replicas, recipe.shards, recipe.loop.update.optimizer) == (5, 3, SGD)
    assert Downpour().recipe().loop.exchanges == Exchanges()
    assert not Exchanges().awaited


def test_synchronous() -> None:
    recipe = Synchronous(replicas=4, shards=2, optimizer=SGD).recipe()
    assert recipe.loop.exchanges == Exchanges(rules=Rules("mean", 0))
    assert recipe.loop.exchanges.in_rounds
    assert (recipe.replicas, recipe.shards, recipe.loop.update.optimizer) == (4, 2, SGD)


def test_single_process() -> None:
    recipe = SingleProcess(optimizer=SGD).recipe()
    assert (recipe.replicas, recipe.shards, recipe.loop.update.optimizer) == (1, 1, SGD)
    assert recipe.alone
    assert not Downpour().recipe().alone


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"replicas": 0}, "replicas is 0: it must be at least 1"),
        ({"shards": 0}, "shards is 0: it must be at least 1"),
        ({"shards": -1}, "shards is -1: it must be at least 1"),
        ({"push_every": 0}, "push_every is 0: it must be at least 1"),
        ({"fetch_every": 0}, "fetch_every is 0: it must be at least 1"),
        ({"max_delay": -1}, "max_delay is -1: it must be 0 or more, or None for no bound"),
        ({"warm_start": -5}, "warm_start is -5: it must be 0 or more examples"),
        ({"optimizer": None}, r"optimizer must be a factory, for example partial\(torch.optim.SGD, lr=0.1\)"),
        ({"optimizer": 0.1}, "optimizer must be a factory"),
    ],
)
def test_a_setting_that_cannot_be_is_refused_with_the_remedy(settings: dict[str, object], message: str) -> None:
    strategies = [cls for cls in concrete() if set(settings) <= {field.name for field in dataclasses.fields(cls)}]
    assert Downpour in strategies
    for strategy in strategies:
        with pytest.raises(ValueError, match=message):
            strategy(**settings).recipe()


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        (Synchronous(backup=2), "backup is 2 of 2 replicas: a round needs at least one push"),
        (Synchronous(backup=-1), "backup is -1 of 2 replicas"),
        (Synchronous(backup=1, shards=2), "2 shards with rounds that do not wait for all"),
        (Synchronous(backup=1, late="lose"), "late is 'lose': it must be one of drop, fold"),
        (squall.BoundedDelay(exchange_every=0), "push_every is 0"),
        (squall.AsynchronousSGD(staleness="hide"), "staleness is 'hide': it must be one of ignore, scale, compensate"),
        (squall.AsynchronousSGD(staleness="compensate", adaptive=2.0), "adaptive is 2.0: a decay is 0 or more"),
        (squall.AsynchronousSGD(staleness="compensate", compensation=-1), "compensation is -1"),
        (squall.AsynchronousSGD(adaptive=0.9), "adaptive is for staleness='compensate'"),
        (squall.Averaging(every=0), "push_every is 0"),
        (squall.Averaging(optimizer=None), "optimizer must be a factory"),
        (squall.ElasticAveraging(moving_rate=0), "moving_rate is 0: it must be above 0"),
        (squall.ElasticAveraging(moving_rate=2), "moving_rate is 2: it must be above 0 and below the number of"),
        (squall.DiLoCo(form="asynchronus"), "form is 'asynchronus': use synchronous, asynchronous or decoupled"),
        (squall.DiLoCo(inner_steps=0), "inner_steps is 0"),
        (squall.DiLoCo(outer_lr=-1.0), "outer_lr is -1.0: it must be above 0"),
        (squall.DiLoCo(outer_momentum=1.5), "outer_momentum is 1.5"),
        (squall.DiLoCo(momentum_every=0, form="asynchronous"), "momentum_every is 0"),
        (squall.DiLoCo(momentum_every=2), "momentum_every is 2: at least 1, and with form='asynchronous' alone"),
        (squall.DiLoCo(quorum=0, form="decoupled"), "quorum is 0 of 2 replicas"),
        (squall.DiLoCo(quorum=2), "quorum is 2: it is of form='decoupled', and form is 'synchronous'"),
        (squall.DiLoCo(grace=-3.0, form="decoupled"), "grace is -3.0: it must be 0 or more"),
        (squall.DelayedProximal(max_delay=-1, smoothness=2.0), "max_delay is -1"),
        (squall.DelayedProximal(l1=-1.0), "l1 is -1.0"),
        (squall.DelayedProximal(blocks=0), "blocks is 0"),
        (squall.DelayedProximal(group=0.1, shards=2), "group penalties need whole runs: use shards=1 and blocks=1"),
        (squall.DelayedProximal(smoothness=0.0), "smoothness is 0.0: it must be above 0"),
    ],
    ids=str,
)
def test_settings_that_contradict_each_other_are_refused(strategy: Strategy, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        strategy.recipe()


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        (squall.DelayedProximal(l2=0.1, optimizer=partial(torch.optim.SGD, lr=0.1, weight_decay=0.1)),
         "decays weights itself: set its weight_decay to 0 and use l2"),
        (squall.DelayedProximal(group=0.1, optimizer=torch.optim.LBFGS), "cannot (step|be built)"),
        (squall.Averaging(optimizer=torch.optim.LBFGS), "LBFGS cannot step on a gradient alone: use SGD or AdamW"),
        (squall.Averaging(optimizer=partial(torch.optim.SGD, lr=-1)), "the optimizer SGD cannot be built"),
    ],
    ids=str,
)  # fmt: skip
def test_an_optimizer_that_does_not_suit_its_place_is_refused(strategy: Strategy, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_optimizers(strategy.recipe())


# ---------------------------------------------------------------- the seal


def ruff(code: str, path: str) -> str:
    run = [sys.executable, "-m", "ruff", "check", "--no-cache", "--output-format=concise", "--select=TID251"]
    found = subprocess.run(
        [*run, "--stdin-filename", path, "-"], input=code, capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert found.returncode in (0, 1), found.stderr
    return found.stdout


@pytest.mark.parametrize("package", ["protocol", "strategies"])
def test_ruff_refuses_clocks_chance_and_input_or_output_in_the_core(package: str) -> None:
    banned = ["time", "random", "socket", "os", "threading", "asyncio", "logging", "torch.distributed", "numpy.random"]
    code = "".join(f"import {name}\n" for name in banned)
    code += "from time import monotonic\nfrom os import environ\nimport torch\ntorch.manual_seed(0)\nopen('file')\n"
    refused = ruff(code, f"src/squall/{package}/snippet.py")
    for line in (*range(1, len(banned) + 3), len(banned) + 4):
        assert f":{line}:" in refused, f"{code.splitlines()[line - 1]} in {package}"


@pytest.mark.parametrize("package", ["runtime", "transports", "launchers", "sim"])
def test_ruff_lets_the_shells_do_what_they_are_for(package: str) -> None:
    assert "TID251" not in ruff("import os\nimport time\n", f"src/squall/{package}/snippet.py")


@pytest.mark.parametrize("package", ["protocol", "strategies"])
def test_the_sealed_packages_import_nothing_else_of_squall(package: str) -> None:
    """The core knows of no shell. A strategy knows the core's settings, the task's types, how one is refused."""
    allowed = {"protocol": {"protocol"}, "strategies": {"checks", "optim", "protocol", "strategies", "task"}}[package]
    for path in sorted((ROOT / "src/squall" / package).glob("*.py")):
        for line in path.read_text().splitlines():
            if line.startswith(("from squall", "import squall")):
                assert line.split()[1].split(".")[1] in allowed, f"{path.name}: {line}"
