"""Which strategy, with how many processes, trains a task soonest on a cluster: `squall plan`.

First every candidate's speed is simulated without gradients. With a target, the best of each strategy are then
simulated with real gradients, because speed alone does not say what an example teaches.
"""

from __future__ import annotations

import dataclasses
import math
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path

from squall.checks import require
from squall.plan import check_together, make_plan
from squall.report.words import clock, rate_text
from squall.run import new_directory
from squall.runtime.optimizers import check_optimizers
from squall.runtime.run_plan import Aims
from squall.runtime.seeds import chance_kept, seed_everything
from squall.settings import Settings
from squall.sim.cluster.forecast import Forecast
from squall.sim.cluster.model import Cluster
from squall.sim.cluster.own_step import own_step_s
from squall.sim.cluster.simulate import simulate
from squall.sim.planning.alone import stand_in
from squall.sim.planning.candidates import Candidate, baseline, cores, counts, default_strategies, sweep
from squall.sim.planning.entries import RankingEntry, finalists
from squall.sim.planning.ranking import Ranking, ranked
from squall.sim.planning.speed import speed_of
from squall.sim.planning.survival import survival_of
from squall.strategies import Strategy
from squall.task import Task, TaskFunction, check_task

EPOCHS = 50  # a trial's limit without `seconds`, until a first one has reached the target
SLOWER = 3.0  # a trial ends when it has taken so many times as long as the best one to the target


@chance_kept()
def plan_cluster(
    task: TaskFunction,
    cluster: Cluster,
    *,
    budget: int | None = None,
    strategies: Mapping[str, Strategy] | None = None,
    from_file: Sequence[Strategy] = (),
    until: str | None = None,
    seconds: float | None = None,
    trials: int = 8,
    seed: int = 0,
    keep: str | Path | None = None,
    progress: bool = False,
) -> Ranking:
    """Rank strategies and their numbers of processes on a modelled cluster.

    Args:
        task: as of `fit`.
        cluster: as of `simulate`; replicas have one part each.
        budget: processes that may run at once, replicas and shards; None for the cluster's cores.
        strategies: name in the ranking -> strategy, whose replicas and shards are swept; None for `default_strategies`.
        from_file: for those, the file's own strategies.
        until: a metric's target, such as "accuracy=0.97", to rank by the virtual time to it.
        seconds: virtual time that a trial may take at most.
        trials: settings that are simulated with real gradients, with `until`.
        seed: of all chance.
        keep: a new directory for the runs of the trials; None: they are removed.
        progress: tell each result on stderr.

    Returns:
        The ranking; after an interrupt, of what had been simulated.

    Raises:
        ValueError: a setting, the task or the cluster is wrong.
    """
    wanted = _Trials(until, seconds, trials, keep)
    cluster = dataclasses.replace(cluster, split=None)
    budget = cores(cluster) if budget is None else budget
    sizes = counts(cluster, budget)  # before the task is built: it refuses a cluster without room
    seed_everything(seed)
    built = check_task(task())
    unfit: dict[str, str] = {}
    alone = [baseline([*from_file, *(strategies or {}).values()])]
    if strategies is None:
        strategies = default_strategies(from_file, batches=-(-built.examples // built.batch_size))
        tried = [*alone, *(Candidate(name, strategy) for name, strategy in strategies.items())]
        unfit = _unfit(tried, built, wanted, seed)
        strategies = {name: each for name, each in strategies.items() if Candidate(name, each).family not in unfit}
        alone = [candidate for candidate in alone if candidate.family not in unfit]
    candidates = [*alone, *sweep(strategies, sizes, budget)]
    families = {Candidate(name, strategy).family for name, strategy in strategies.items()}
    left_out = sorted(families - {candidate.family for candidate in candidates})
    target = _check(candidates, built, wanted, seed)
    if keep is not None:
        wanted = dataclasses.replace(wanted, keep=new_directory(keep))
    simulations = _Simulations(task, built, _timed(cluster, built, candidates[-1], seed), seed, progress)
    interrupted = simulations.run(candidates, wanted)
    return ranked(simulations.entries.values(), target, budget, interrupted, left_out, unfit)


@dataclasses.dataclass(frozen=True)
class _Trials:
    """What is asked of simulations with real gradients; see `plan_cluster`."""

    until: str | None
    seconds: float | None
    most: int
    keep: str | Path | None

    def __post_init__(self) -> None:
        require("trials", self.most, self.most >= 1, "at least 1")
        if self.seconds is not None and self.until is None:
            raise ValueError("seconds limits the trials of until: give until too, or leave seconds out")
        if self.keep is not None and self.until is None:
            raise ValueError("keep is for the runs of the trials of until: give until too, or leave keep out")


def _unfit(candidates: Sequence[Candidate], task: Task, trials: _Trials, seed: int) -> dict[str, str]:
    """Family -> why it cannot train this task. None, if there is no family that can: then all have the same mistake."""
    found, families = {}, {candidate.family for candidate in candidates}
    for candidate in candidates:
        try:
            _check([candidate], task, trials, seed)
        except ValueError as error:
            found[candidate.family] = str(error)
    return found if len(found) < len(families) else {}


def _check(candidates: Sequence[Candidate], task: Task, trials: _Trials, seed: int) -> tuple[str, float] | None:
    """All mistakes before the first simulation; the target."""
    target = None
    for candidate in {candidate.name: candidate for candidate in candidates}.values():
        settings = Settings(launcher="inline", seconds=trials.seconds)
        plan = make_plan(candidate.strategy, settings, Aims(until=trials.until), seed=seed)
        check_optimizers(candidate.recipe)
        check_together(plan, candidate.strategy, task)
        target = plan.until
    return target


def _timed(cluster: Cluster, task: Task, candidate: Candidate, seed: int) -> Cluster:
    """The cluster with step times: measured here once where it has none, so that all candidates have the same."""
    if cluster.measured:
        return cluster
    settings = Settings(launcher="inline", threads=1)
    plan = make_plan(candidate.strategy, settings, seed=seed)
    layout = check_together(plan, candidate.strategy, task)
    own_s = own_step_s(plan, task, layout)
    machines = (dataclasses.replace(kind, step_s=cluster.step_s(kind, own_s)) for kind in cluster.machines)
    return dataclasses.replace(cluster, machines=tuple(machines))


class _Simulations:
    """Of all candidates. `entries` holds what is known so far, by candidate; an interrupt leaves it whole."""

    def __init__(self, task: TaskFunction, built: Task, cluster: Cluster, seed: int, progress: bool) -> None:
        self.entries: dict[str, RankingEntry] = {}
        self._task = task
        self._built = built
        self._cluster = cluster
        self._elements = sum(p.numel() for group in built.param_groups() for p in group["params"])
        self._seed = seed
        self._progress = progress

    def run(self, candidates: Sequence[Candidate], trials: _Trials) -> bool:
        """Whether it was interrupted. Raises `KeyboardInterrupt` when nothing is known yet."""
        try:
            for candidate in candidates:
                self._add(candidate)
            if trials.until is not None:
                self._try(trials.until, trials)
        except KeyboardInterrupt:
            if not self.entries:
                raise
            return True
        return False

    def _add(self, candidate: Candidate) -> None:
        """Simulate its speed."""
        strategy, cluster = stand_in(candidate.strategy, self._cluster, self._elements)
        speed = speed_of(Candidate(candidate.name, strategy), self._built, cluster, self._seed)
        if candidate.recipe.alone:
            speed = dataclasses.replace(speed, idle=0.0, shard_busy=0.0, bytes_per_second=0.0, network=0.0)
        survival = survival_of(strategy.recipe(), cluster, speed.round_s)
        entry = self.entries[str(candidate)] = RankingEntry(candidate=candidate, speed=speed, survival=survival)
        self._tell(f"{candidate}: {rate_text(entry.useful)} examples/s")

    def _try(self, until: str, trials: _Trials) -> None:
        """Simulate the best with real gradients, the fastest first, so that the others need not go on for long."""
        chosen = sorted(finalists(self.entries.values(), trials.most), key=lambda entry: -entry.useful)
        every_s = self._built.examples / max(chosen[0].useful, 1e-9)
        best_s = math.inf
        with tempfile.TemporaryDirectory() if trials.keep is None else nullcontext(trials.keep) as directory:
            for entry in chosen:
                limit_s = trials.seconds or EPOCHS * self._built.examples / max(entry.useful, 1e-9)
                settings = Settings(seconds=min(limit_s, SLOWER * best_s), evaluate_every_s=every_s)
                # `seconds` ends a trial, its restarts included; batches are a bound beyond that.
                steps = math.ceil(SLOWER * limit_s * entry.speed.examples_per_second / self._built.batch_size)
                trial = self._trial(entry, until, steps, settings, Path(directory))
                if trials.keep is None:
                    trial = dataclasses.replace(trial, run_directory=None)
                self.entries[str(entry.candidate)] = dataclasses.replace(entry, trial=trial)
                best_s = min(best_s, math.inf if trial.reached_s is None else trial.reached_s)
                self._tell(f"{entry.candidate}: {_outcome(trial, until)}")

    def _trial(self, entry: RankingEntry, until: str, steps: int, settings: Settings, folder: Path) -> Forecast:
        """Raises `KeyboardInterrupt` when the trial was interrupted: nothing is known of it."""
        strategy, cluster = stand_in(entry.candidate.strategy, self._cluster, self._elements)
        path = folder / re.sub(r"\W+", "-", str(entry.candidate))
        trial = simulate(
            self._task, strategy, cluster, until=until, steps=steps, seed=self._seed, run_dir=path, settings=settings
        )
        if trial.status == "interrupted":
            raise KeyboardInterrupt
        return dataclasses.replace(trial, strategy=entry.candidate.family)

    def _tell(self, text: str) -> None:
        if self._progress:
            sys.stderr.write(f"squall: {text}\n")


def _outcome(trial: Forecast, until: str) -> str:
    if trial.reached_s is not None:
        return f"{until} after {clock(trial.reached_s)}"
    if trial.status != "finished":
        return f"{trial.status}: {trial.reason}"
    return f"{until} not reached within {clock(trial.training_s)}"
