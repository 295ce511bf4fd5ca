"""Numbers between two machines: one way, as a whole exchange, and on a link of 1 Gbit/s.

Both ends share this machine's cores, and a link between namespaces costs them work too: what is compared with passes
the same link in the same run.
"""

from __future__ import annotations

import statistics
from functools import partial

import torch

from benchmarks.link_exchange import exchange_seconds, overlapping_bytes_s
from benchmarks.link_payload import carried_seconds, tcp_bytes_s, tls_seconds
from benchmarks.namespaces import Link, linked
from benchmarks.peers import floor
from benchmarks.results import Section, median_ratio, rounds

ELEMENTS = 10_000_000  # 40 MB
COUNT = 10  # of each in a round
OVERLAPPING, TCP = "each way at once, overlapping", "plain TCP, each way at once"
RATE, RATE_BYTES_S = "1gbit", 125e6


def measure(repeats: int = 5) -> Section:
    section = Section(
        "Between two machines",
        "Two network namespaces of one machine, with a veth pair between them. TLS alone: one blocking connection"
        " between two processes that do nothing else. An exchange: push 10,000,000 gradients, SGD, fetch the"
        " weights; its bound is made of TLS alone both ways and the update in one process. On a link of 1 Gbit/s"
        " (tbf, both ways): bytes of numbers, beside headers of TCP and below. Overlapping,"
        " two machines have a replica, whose gradient is ready at once, and a shard each.",
    )
    with linked() as link:
        _unlimited(section, link, 3 * repeats)  # milliseconds, which a neighbour of a moment doubles
    with linked(RATE) as link:
        _limited(section, link, repeats)
    return section


def _unlimited(section: Section, link: Link, repeats: int) -> None:
    print("links", flush=True)
    torch.set_num_threads(1)
    found = rounds(
        {
            "TLS alone": partial(tls_seconds, link, 4 * ELEMENTS, COUNT),
            "carried": partial(carried_seconds, link, 4 * ELEMENTS, COUNT),
            "TLS both ways": partial(tls_seconds, link, 4 * ELEMENTS, COUNT, back=True),
            "floor": partial(floor.exchange_seconds, ELEMENTS, "sgd", COUNT),
            "exchange": partial(exchange_seconds, link, ELEMENTS, COUNT),
        },
        repeats,
    )
    ours, alone = found["carried"], found["TLS alone"]
    section.at_least("40 MB one way", _ms(ours), f"TLS alone {_ms(alone)}", median_ratio(alone, ours), 0.85)
    bound = [both + update for both, update in zip(found["TLS both ways"], found["floor"])]
    parts = f"TLS both ways {_ms(found['TLS both ways'])} + update {_ms(found['floor'])}"
    section.at_most("exchange", _ms(found["exchange"]), parts, median_ratio(found["exchange"], bound), 1.25)


def _limited(section: Section, link: Link, repeats: int) -> None:
    print("links, 1 Gbit/s", flush=True)
    found = rounds(
        {
            "one way": lambda: 4 * ELEMENTS / carried_seconds(link, 4 * ELEMENTS, 5),
            OVERLAPPING: partial(overlapping_bytes_s, link, ELEMENTS, COUNT),
            TCP: partial(tcp_bytes_s, link, 4 * ELEMENTS * 5),
        },
        repeats,
    )
    for name in ("one way", OVERLAPPING):
        ratio = statistics.median(found[name]) / RATE_BYTES_S
        section.at_least(f"1 Gbit/s, {name}", _mb_s(found[name]), "125 MB/s", ratio, 0.92)
    against = f"{TCP} {_mb_s(found[TCP])}"
    section.compared(
        f"1 Gbit/s, {OVERLAPPING}", _mb_s(found[OVERLAPPING]), against, median_ratio(found[OVERLAPPING], found[TCP])
    )


def _mb_s(values: list[float]) -> str:
    return f"{statistics.median(values) / 1e6:.1f} MB/s"


def _ms(values: list[float]) -> str:
    return f"{statistics.median(values) * 1e3:.3g} ms"


if __name__ == "__main__":
    print(measure().markdown())
