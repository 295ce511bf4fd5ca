"""`squall run`: a script of the user's own, once per replica."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from squall.cli.detach import add_detach, begins
from squall.cli.flags import SAVES_ITSELF, add_common, add_kept, add_launcher, add_patience, add_seconds, add_snapshots
from squall.cli.machines import settle
from squall.cli.output import summarized

if TYPE_CHECKING:
    from squall.launchers.local import LocalRun


def add(commands: Any, arguments: Sequence[str]) -> None:
    script = commands.add_parser(
        "run", help="start your own script, once per replica (it calls squall.join)",
        usage="%(prog)s [--strategy NAME] [flags] SCRIPT [the script's own flags]",
        allow_abbrev=False,  # a flag of the script could be short for two of ours
    )  # fmt: skip
    script.set_defaults(run=_script)
    if arguments[:1] == ["run"]:
        from squall.cli.strategies import add_strategy_flags

        add_strategy_flags(script, before_script(arguments))
    ends = script.add_argument_group("when it ends, beside the script's own end")
    ends.add_argument("--until", metavar="METRIC=VALUE", help="when a metric that the script logs is reached")
    add_patience(ends, " in --until's metric, else in the loss, as the script logs them")
    add_seconds(ends)
    how = script.add_argument_group("where and how")
    add_common(how, "processes of a replica, each of which runs the script (see Session.group)")
    add_launcher(how, "local", "ray", text="local (processes here), or ray (default: local)")
    add_detach(how)
    kept = add_kept(script)
    kept.add_argument("--keep-best", metavar="METRIC", help=f"refused: {SAVES_ITSELF}")
    add_snapshots(kept)
    how.add_argument(
        "--progress", dest="quiet", action="store_false", help="show progress between what the script prints"
    )
    script.set_defaults(evaluate_every_s=None, slow=None, json=False)
    script.add_argument("script", metavar="SCRIPT", help="a Python file")
    script.add_argument("arguments", nargs=argparse.REMAINDER, help="the script's own arguments")


def before_script(arguments: Sequence[str]) -> Sequence[str]:
    """The arguments up to the script's name: those behind it are the script's own, whatever they are called."""
    if arguments[:1] == ["run"]:
        for i, argument in enumerate(arguments[1:], start=1):
            if argument.endswith(".py") or Path(argument).is_file():
                return arguments[:i]
    return arguments


def _script(options: argparse.Namespace, local: LocalRun | None, commanded_at: float) -> tuple[int, str]:
    from squall.cli.strategies import aims_of, build_strategy, settings_of
    from squall.runtime.run_plan import Aims
    from squall.script import script_plan
    from squall.train import Launch
    from squall.usercode.kept import ScriptCode
    from squall.usercode.sources import read

    if (elsewhere := settle(options)) is not None:
        return elsewhere
    aims = Aims(**aims_of(options))
    if aims.keep_best is not None:
        raise ValueError(f"--keep-best {aims.keep_best} is for `squall train`: {SAVES_ITSELF}")
    chosen = any(getattr(options, name) is not None for name in ("optimizer", "lr", "momentum", "weight_decay"))
    strategy, settings = build_strategy(options, ()), settings_of(options)
    text = read(options.script)
    if text is None:
        raise ValueError(f"{options.script} is no file: give the Python script that calls squall.join")
    code = ScriptCode(
        script=Path(options.script).resolve(), text=text, arguments=options.arguments, strategy=strategy,
        settings=settings, plan=script_plan(strategy, settings, aims, seed=options.seed, device=options.device),
        optimizer_chosen=chosen,
    )  # fmt: skip
    return summarized(Launch(code, local, commanded_at, begins=begins(options)).go(options.run_dir), as_json=False)
