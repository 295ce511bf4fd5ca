"""`squall doctor --cluster`: what several machines have for a run together, and what to do where they fall short."""

from __future__ import annotations

from squall.doctor import Finding, gib
from squall.survey.messages import Called, Looked, in_words
from squall.survey.survey import Survey
from squall.transports.certificates import CLOCKS_DIFFER

LOOK_S = 0.2  # at a link, each way
CLOCK_S = 1.0  # apart: times in records and logs do not tell what came first
FAR_S, NARROW_BYTES_S = 20e-3, 12.5e6  # 100 Mbit/s
PORTS = (
    "allow TCP between the machines of a run, from any port to any port; where this address is not the one that the"
    " others reach, squall join --address HOST"
)
SLOW = "exchange less often (--push-every, --fetch-every) or --overlap: squall measure --cluster and squall plan tell"


def checkup_of(survey: Survey, wait_s: float) -> list[Finding]:
    """Look at all machines that come within so many seconds, and at the links between them."""
    survey.gather(wait_s)
    looked = survey.ask(Looked, {number: {"kind": "look"} for number in survey.machines})
    clocks = survey.clocks()
    links = survey.links(LOOK_S)
    found = [Finding("machines", False, why, "have all of one version") for why in survey.refused]
    if survey.missing:
        found.append(Finding("machines", False, survey.missing, survey.remedy))
    for number, here in sorted(looked.items()):
        found += _machine(number, here, clocks.get(number, 0.0))
    for pair in sorted({(min(way), max(way)) for way in links}):
        found += _link(*pair, links)
    gone = "look at what squall join says there, and whether its memory was full (dmesg)"
    found += [Finding(f"{number}: {name}", False, "was lost meanwhile", gone) for number, name in survey.lost.items()]
    return [*found, _in_all(found)]


def _machine(number: int, looked: Looked, ahead_s: float) -> list[Finding]:
    """What it has in a line, and whatever is not well there."""
    here = looked.hello
    name = f"{number}: {here.machine}"
    memory = "".join(f"memory {finding.found}, " for finding in looked.findings if finding.name == "memory")
    has = (
        f"{here.cores} cores, {memory}{gib(here.shared_memory)} of shared memory free;"
        f" squall {here.squall}, torch {here.torch}, Python {here.python}"
    )
    found = [Finding(name, True, has)]
    for finding in looked.findings:
        if not finding.ok:
            found.append(Finding(f"{name}, {finding.name}", finding.ok, finding.found, finding.remedy))
    if abs(ahead_s) > CLOCK_S:
        apart = f"{abs(ahead_s):,.0f} s {'ahead of' if ahead_s > 0 else 'behind'} this machine's"
        ok = None if abs(ahead_s) < CLOCKS_DIFFER.total_seconds() else False
        means = "times in records and logs differ" if ok is None else "the run's certificates are not valid there"
        found.append(Finding(f"{name}, clock", ok, f"{apart}: {means}", "set it (timedatectl set-ntp true)"))
    return found


def _link(one: int, other: int, links: dict[tuple[int, int], Called]) -> list[Finding]:
    """Both ways between two machines."""
    ways = {way: links[way] for way in ((one, other), (other, one)) if way in links}
    if len(ways) < 2 or any(way.why for way in ways.values()):
        cut = [(way, f"machine {way[1]} is not reached from machine {way[0]}: {links[way].why}") for way in ways]
        return [
            Finding(f"{here} -> {there}", False, text, PORTS) for (here, there), text in cut if ways[here, there].why
        ]
    there, back = ways.values()
    if max(there.round_trip_s, back.round_trip_s) <= FAR_S and min(there.bytes_s, back.bytes_s) >= NARROW_BYTES_S:
        return [Finding(f"{one} - {other}", True, in_words(there, back))]
    return [Finding(f"{one} - {other}", None, f"{in_words(there, back)}: replicas will wait for the network", SLOW)]


def _in_all(found: list[Finding]) -> Finding:
    failed, warned = (sum(finding.ok is ok for finding in found) for ok in (False, None))
    if failed:
        return Finding("verdict", False, f"a run on these machines would fail: {failed} to mend", "mend what is above")
    slower = f", with {warned} warning{'s' * (warned > 1)}" if warned else ""
    return Finding("verdict", True, f"a run on these machines works{slower}")
