"""`--machines auto`: the same command on every machine of an allocation."""

from __future__ import annotations

import argparse
import os

PORT = 7700  # where the first machine listens, if --listen does not say
WAIT_S = 600.0  # machines of an allocation do not all begin at once


def machines(text: str) -> int | str:
    """A number, or auto."""
    return text if text == "auto" else int(text)


def replicas(text: str) -> int | tuple[int, int]:
    """8, or 2..8"""
    least, dots, most = text.partition("..")
    return (int(least), int(most)) if dots else int(text)


def settle(options: argparse.Namespace) -> tuple[int, str] | None:
    """Find out what --machines auto means here. On all but the first machine this takes part in the run to its end.

    Returns the exit status then, and what belongs on stdout; None on the first machine, with `options` as for it.
    Raises `ValueError` with the remedy where nothing is detected.
    """
    if isinstance(options.replicas, tuple):
        options.least_replicas, options.replicas = options.replicas
    if options.machines != "auto":
        return None
    from squall.cli.join import take_part
    from squall.launchers.allocation import allocation
    from squall.launchers.joining.address import parse_address
    from squall.launchers.joining.call import Call
    from squall.launchers.joining.token import VARIABLE, find_token

    found = allocation(os.environ)
    if found.machines > 1 and VARIABLE not in os.environ:
        raise ValueError(f"machines is auto: put what `squall token` prints into {VARIABLE}, the same on all machines")
    port = parse_address(options.listen, "--listen")[1] if options.listen is not None else PORT
    if found.rank:
        return take_part(Call((found.head, port), find_token(None), WAIT_S))
    options.machines = found.machines
    options.listen = options.listen or f"0.0.0.0:{port}"
    return None
