"""`make chaos`: real runs, real faults, and whether each ended as promised.

python -m tests.chaos [--faults 200] [--seed N] [--first K] [--slack 2]

The seed is the day's unless it is given. A trial that breaks a promise keeps its directory, and its line says how to
try it again; when a fault hits, the machine decides too, so it may take several tries.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests.chaos.trial import Broken, Trial


def main() -> int:
    options = _options()
    home = Path(tempfile.mkdtemp(prefix="chaos-"))
    happened: Counter[str] = Counter()
    broken = 0
    began = time.monotonic()
    for number in itertools.count(options.first):
        trial = Trial(f"trial-{options.seed}-{number}", options.seed * 1000 + number, home / str(number), options.slack)
        verdict = _verdict(trial)
        happened.update(trial.faults)
        print(f"{number:4}  {verdict:8}  {'; '.join(trial.story)}", flush=True)
        if verdict != "ok":
            broken += 1
            again = f"python -m tests.chaos --seed {options.seed} --first {number} --faults 1"
            print(f"      kept in {trial.home}; again: {again}")
        else:
            shutil.rmtree(trial.home)
        if sum(happened.values()) >= options.faults:
            break
    print("\n".join(f"{count:6} x {name}" for name, count in sorted(happened.items())))
    count, seconds = number - options.first + 1, time.monotonic() - began
    print(f"{sum(happened.values())} faults in {count} trials, {broken} not as promised, {seconds:.0f} s")
    if not broken:
        shutil.rmtree(home)
    return 1 if broken else 0


def _verdict(trial: Trial) -> str:
    try:
        trial.go()
    except Broken as error:
        trial.story.append(f"BROKEN: {error}")
        (trial.home / "output.txt").write_text(trial.output)
        return "BROKEN"
    return "ok"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__.splitlines()[0])
    parser.add_argument("--faults", type=int, default=200, help="end when so many have happened (default: 200)")
    parser.add_argument("--seed", type=int, default=int(f"{datetime.date.today():%Y%m%d}"), help="default: the day's")
    parser.add_argument("--first", type=int, default=0, help="number of the first trial (default: 0)")
    parser.add_argument("--slack", type=float, default=1.0, help="more time for all, on a busy machine (default: 1)")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
