"""A joiner's side: it calls the head until that answers, knows it by the token, and becomes a machine of the run."""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from squall.errors import SquallError
from squall.launchers.joining.address import Address, written
from squall.launchers.joining.call import Call
from squall.launchers.joining.hello import Answer, Refusal, hello
from squall.launchers.joining.listener import WRONG_AFTER_S
from squall.launchers.joining.tls_pipe import TlsPipe
from squall.transports.certificates import Identity, call_reception

ANSWER_WITHIN_S = 5.0  # seconds for each step of a call
PAUSE_S, PAUSE_AT_MOST_S = 0.1, 2.0  # between calls
TELL_AFTER_S = 3.0  # seconds until a user who waits is told what to look at
FROM_HEAD_BYTES = 1 << 30  # of a message: the user's code with the data that it holds


@dataclass(frozen=True)
class Membership:
    """What a machine has once it has joined."""

    machine: int  # its number
    identity: Identity  # the authority over its processes
    pipe: TlsPipe  # to the head
    address: str  # where others reach the machine


def join(call: Call, tell: Callable[[str], object]) -> Membership:
    """Join a run. `tell` is given a text for a user who has waited for some seconds. No thread is started.

    Raises `SquallError`: the head refuses, is another one than the token says, or was not reached.
    """
    began, pause, told = time.monotonic(), PAUSE_S, False
    while True:
        left = began + call.wait_s - time.monotonic()
        try:
            return _call(call, max(PAUSE_S, min(left, ANSWER_WITHIN_S)))
        except (OSError, EOFError) as error:
            why = str(getattr(error, "strerror", None) or error)
        left = began + call.wait_s - time.monotonic()
        if left <= 0:
            raise SquallError(f"{_unreached(call.head, why)}; it was tried for {call.wait_s:g} s (--wait)")
        if not told and time.monotonic() >= began + TELL_AFTER_S:
            told = True
            tell(f"{_unreached(call.head, why)}; trying for {left:.0f} s more")
        time.sleep(min(pause, left))
        pause = min(2 * pause, PAUSE_AT_MOST_S)


def _unreached(head: Address, why: str) -> str:
    return (
        f"no run answers at {written(head)} ({why}): look whether the address and the port are those that the run's"
        " first machine has printed, whether that run still listens there, and whether a firewall is between"
    )


def _call(call: Call, timeout_s: float) -> Membership:
    raw = socket.create_connection(call.head, timeout_s)
    try:
        connection = call_reception(raw, call.token.fingerprint)
    except ValueError:
        raise SquallError(
            f"what answers at {written(call.head)} is not the run that the token is of: copy the file that this run's"
            " first machine has written"
        ) from None
    except ssl.SSLError:
        raise OSError("what answers does not speak TLS 1.3") from None
    # From here on the other end is the head that has made the token.
    said = hello(call.address or connection.getsockname()[0], call.cores)
    pipe = TlsPipe(connection, FROM_HEAD_BYTES)
    try:
        pipe.send_bytes(call.token.secret.encode())
        wants = {"number": call.number, "incomplete": call.directory is not None, "fetches": call.fetches}
        pipe.send_bytes(msgspec.json.encode(msgspec.structs.replace(said, **wants)))
        if not pipe.poll(ANSWER_WITHIN_S + WRONG_AFTER_S):
            raise TimeoutError("it does not answer")
        answer = _understood(pipe.recv_bytes())
        if isinstance(answer, Refusal):
            raise SquallError(f"{written(call.head)} refuses: {answer.why}")
    except BaseException:
        pipe.close()
        raise
    return Membership(answer.machine, answer.identity, pipe, said.address)


def _understood(message: bytes) -> Answer:
    try:
        answer: Answer = msgspec.json.decode(message, type=Answer)
    except (ValueError, RecursionError):
        raise SquallError("the run's first machine has another version of Squall: install the same here") from None
    return answer
