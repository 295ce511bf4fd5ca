import gc
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch

import squall
from squall.run import Run
from squall.task import TaskFunction
from tests import deep, warm
from tests.tasks import INLINE

# No deadlines: a busy machine is no mistake of the code.
hypothesis.settings.register_profile("quick", deadline=None, max_examples=40)
hypothesis.settings.register_profile("deep", deadline=None, max_examples=200)

# A shell ignores Ctrl-C in what it runs in the background, and the processes that tests interrupt would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)


MEMORY = Path("/dev/shm")  # a disk would be waited for more than anything else: a snapshot counts once it is there


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--deep", action="store_true", help="try sweeps whole, with the day's seeds (make deep)")
    parser.addoption("--no-repeats", action="store_true", help="leave out what --deep tries no deeper than make test")


def pytest_configure(config: pytest.Config) -> None:
    deep.wanted = config.getoption("deep")
    hypothesis.settings.load_profile("deep" if deep.wanted else "quick")
    if not deep.wanted and MEMORY.is_dir() and shutil.disk_usage(MEMORY).free > 4 << 30:
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """What is imported and collected is no garbage. To look for some takes a fifth of the time until the first test."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_report_header() -> str:
    return f"deep: whole sweeps, and seeds from {deep.FIRST} on" if deep.wanted else "sweeps in part; --deep: whole"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not deep.wanted:
        left_out = [item for item in items if item.get_closest_marker("deep")]
    elif config.getoption("no_repeats"):
        left_out = [item for item in items if _as_ever(item)]
    else:
        return
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in set(left_out)]


def _as_ever(item: pytest.Item) -> bool:
    """Its module does not know `tests.deep`, and it has no more examples with `--deep`."""
    assert isinstance(item, pytest.Function)
    knows = any(known is deep for known in vars(item.module).values())
    return not knows and not hypothesis.is_hypothesis_test(item.obj)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """Where a run may be kept; it does not exist yet."""
    return tmp_path / "run"


@pytest.fixture(autouse=True)
def signals_as_before() -> Iterator[None]:
    """A nursery leaves signals to the launching process. When a test plays one, its worker goes on to other tests."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(autouse=True)
def warm_nurseries(request: pytest.FixtureRequest) -> Iterator[None]:
    """Tests are of what `fit` does in processes, and not of how it comes to them, but for those marked `cold`."""
    if request.node.get_closest_marker("cold"):
        yield
        return
    with warm.nurseries():
        yield


@pytest.fixture
def without_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing report.html takes ten times as long as a small run."""
    monkeypatch.setattr(Run, "report", lambda run: run.directory / "report.html")


@pytest.fixture
def inline(tmp_path: Path, without_report: None) -> Iterator[Callable[..., Run]]:
    """`fit` with everything in this process, each run in a directory of its own."""
    threads = torch.get_num_threads()
    count = 0

    def fit(task: TaskFunction, strategy: squall.Strategy, **options: Any) -> Run:
        nonlocal count
        count += 1
        options = {"run_dir": tmp_path / f"run-{count}", "settings": INLINE} | options
        return squall.fit(task, strategy, **options)

    yield fit
    torch.set_num_threads(threads)
