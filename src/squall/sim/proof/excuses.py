"""How a life may end otherwise than finished, for a reason that lies in its faults."""

from __future__ import annotations

from collections import Counter

from squall.protocol.closing import NOBODY_LEFT
from squall.protocol.collective.coordinator import LOST, SHARE_LOST
from squall.protocol.deputy import FIRST_LOST
from squall.protocol.effects import End
from squall.protocol.replacing import LOST_IN_A_ROW
from squall.sim.proof.chaos import Chaos
from squall.sim.proof.faults import Role
from squall.strategies.work import BatchMethod


def excuses(
    chaos: Chaos, end: End, had: Counter[str], deaths: Counter[Role], copied: int, silenced: bool, rotten: bool
) -> dict[str, bool]:
    """By the end's status. `had` are faults by kind, and deaths by role.

    `copied`: shards with a backup, of which the coordinator has heard. `rotten`: some batch gives NaN, or did.
    """
    given_up = all(deaths[Role("replica", slot)] >= LOST_IN_A_ROW for slot in range(chaos.replicas))
    given_up |= any(deaths[Role("shard", index)] >= LOST_IN_A_ROW for index in range(chaos.recipe.shards))
    late = had["Cut"] + had["Weather"] + (had["Pause"] + had["shard"]) * had["Jam"] > 0  # numbers come of the living
    copying = chaos.deputy and (had["backup"] + had["shard"] > 0 or copied < chaos.recipe.shards)
    late |= copying and had["Pause"] > 0  # as the coordinator stood still
    lost = end.reason.startswith(("machine ", FIRST_LOST)) and (silenced or late)
    lost |= chaos.deputy and silenced and end.reason.endswith("nothing was saved")  # a deputy that nobody follows saves
    taken = had["UserStop"] * had["MachineLeaves"]  # a replica leaves with them as the run is stopped
    died = 0
    bereft = NOBODY_LEFT in end.reason and had["replica"] + had["part"] + had["Lie"] + silenced > 0
    if end.reason in (LOST, SHARE_LOST):
        died = max(0, had["replica"] + had["part"] - (end.reason == SHARE_LOST))  # one death takes no share with it
        died += silenced + late + taken
    return {
        "finished": True,
        "interrupted": had["UserStop"] > 0 or had["MachineLeaves"] > 0 or bereft or lost,
        "moved": had["MachineLeaves"] > 0 or lost or had["Lie"] > 0 or (died > 0 and end.reason in (LOST, SHARE_LOST)),
        "nonfinite": rotten or had["Spoil"] > (not isinstance(chaos.recipe.work, BatchMethod)),
        "failed": died > 0 or had["FullDisk"] > 0 or given_up or lost or had["Lie"] > 0,
    }
