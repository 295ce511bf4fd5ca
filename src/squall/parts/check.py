"""Whether a task can be split into parts, and where a pipeline is cut: asked before anything is launched."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from torch import nn

from squall.parts.check_branches import check_branches
from squall.parts.microbatches import Call, given, in_pieces, taken
from squall.parts.slices import check_slices
from squall.parts.stages import balanced, chain_of, cut_chain, seconds_of
from squall.runtime.seeds import seed_everything
from squall.splits import Branches, Pipeline, Tensor
from squall.task import Batch, Task, first_batch, loss_and_extras, untouched

SAME = 1e-4  # relative: two ways to one loss differ by rounding


def check_split(task: Task, parts: int) -> tuple[tuple[int, ...], str]:
    """Where the stages of a pipeline begin in its chain (nothing for other splits), and what to tell the user.

    The first is to be kept with the run: it is measured, and may come out otherwise the next time. The model is left as
    it is. Raises `ValueError` for what cannot be split, with the remedy.
    """
    if parts < 1:
        raise ValueError(f"parts is {parts}: it must be at least 1, the processes of a replica")
    if parts == 1:
        return (), ""
    match task.split:
        case Pipeline() as split:
            with untouched(task.model):
                return _check_pipeline(task, split, parts)
        case Tensor() as split:
            with untouched(task.model):
                return (), check_slices(task, split, parts)
        case Branches() as split:
            with untouched(task.model):
                return (), check_branches(task, split, parts)
        case None:
            raise ValueError(
                f"parts is {parts}, and the task does not say how its model is split: give Task(split=...) a"
                " squall.Pipeline, squall.Tensor or squall.Branches, or leave parts out"
            )
    raise ValueError(f"Task.split is {task.split!r}: it must be a squall.Pipeline, squall.Tensor or squall.Branches")


def _check_pipeline(task: Task, split: Pipeline, parts: int) -> tuple[tuple[int, ...], str]:
    _check_microbatches(task, split, parts)
    chain, stages = chain_of(split, task.model), parts * split.stages_each
    if len(chain) < stages:
        raise ValueError(
            f"squall.Pipeline has {len(chain)} modules for {stages} stages ({parts} parts, {split.schedule!r}): use"
            " fewer parts, or name smaller modules in stages="
        )
    pieces = in_pieces(first_batch(task, task.train), task.batch_size // split.microbatches)
    batch = pieces[0][1]
    seed_everything(0)
    call = given(task.loss, task.model, batch)
    seconds = seconds_of(chain, call)
    starts = balanced(seconds, stages)
    _check_same(task, chain, batch, call)
    return starts, _told(chain, starts, seconds)


def _check_microbatches(task: Task, split: Pipeline, parts: int) -> None:
    count, size = split.microbatches, task.batch_size
    if size < count:
        raise ValueError(
            f"Task.batch_size is {size}, fewer examples than Pipeline.microbatches, {count}: make one larger or the"
            " other smaller"
        )
    if size % count:
        fitting = [n for n in range(1, size + 1) if size % n == 0]
        near = sorted(sorted(fitting, key=lambda n: abs(n - count))[:2])
        raise ValueError(
            f"Task.batch_size, {size}, is not a multiple of Pipeline.microbatches, {count}: use"
            f" {' or '.join(map(str, near))} microbatches, or another batch size"
        )
    if split.schedule != "gpipe" and count < parts:
        raise ValueError(
            f"Pipeline.microbatches is {count}, and schedule {split.schedule!r} keeps {parts} parts at work with as"
            ' many at least: use more, or schedule "gpipe"'
        )
    if split.stages_each > 1 and count % max(1, count // parts):
        raise ValueError(
            f"Pipeline.microbatches is {count}: schedule {split.schedule!r} wants a multiple of {parts}, the parts"
        )


def _check_same(task: Task, chain: Sequence[nn.Module], batch: Batch, call: Call) -> None:
    """The chain must compute what the model does: compared without dropout, which draws in another order."""
    task.model.eval()
    seed_everything(0)
    whole = loss_and_extras(task.loss(task.model, batch))[0].item()
    seed_everything(0)
    output = cut_chain(chain, [0])[0](*call[0], **call[1])
    seed_everything(0)
    loss = loss_and_extras(taken(task.loss, task.model, batch, output))[0]
    if not math.isclose(whole, loss.item(), rel_tol=SAME, abs_tol=1e-6):
        raise ValueError(
            f"the modules of squall.Pipeline one after the other give a loss of {loss.item():.6g}, the model one of"
            f" {whole:.6g}: stages= must name all that the model's forward does, in its order"
        )


def _told(chain: Sequence[nn.Module], starts: Sequence[int], seconds: Sequence[float]) -> str:
    lines = []
    for number, (start, stop) in enumerate(pairwise([*starts, len(chain)])):
        names = [type(module).__name__ for module in chain[start:stop]]
        words = " ".join(names) if len(names) <= 3 else f"{names[0]} ... {names[-1]} ({len(names)} modules)"
        lines.append(f"stage {number}: {words}, {sum(seconds[start:stop]) / sum(seconds):.0%} of the time")
    return "\n".join(lines)
