"""The head's side of a survey: who is missing, who is lost, and what fails where."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from multiprocessing.connection import Pipe, wait
from pathlib import Path

import msgspec
import pytest

from squall import Downpour
from squall.errors import SquallError
from squall.launchers.control_pipe import ControlPipe
from squall.launchers.head import Head
from squall.launchers.joining.call import Call
from squall.launchers.joining.joining import join
from squall.launchers.joining.token import find_token
from squall.launchers.roster import Wanted
from squall.survey.messages import Called, Listens
from squall.survey.survey import Survey

SOON_S = 10.0
LISTENS = msgspec.json.encode(Listens(7, 1.0))
CALLED = msgspec.json.encode(Called("", 1e-3, 1e9))


class Local:
    """As much of a `LocalRun` as a survey asks for: turns of the head; the nursery here answers what it is to."""

    def __init__(self, head: Head, answers: list[bytes]) -> None:
        self._head = head
        self._answers = answers
        self.survey: Survey | None = None
        self.pipe, self._asked = Pipe()

    def attend(self, timeout_s: float, watch: object) -> None:
        wait(self._head.sources, 0.01)
        list(self._head.turn())
        assert self.survey is not None
        if self._asked.poll():
            self._asked.recv_bytes()
            assert self.survey.hear(0, msgspec.json.decode(self._answers.pop(0)))


@pytest.fixture
def head() -> Iterator[Head]:
    found = Head(("127.0.0.1", 0), Wanted(3), Downpour(replicas=2).recipe())
    yield found
    found.close()


def surveyed(head: Head, directory: Path, *answers: bytes) -> Survey:
    """With the answers of the head's own machine."""
    local = Local(head, list(answers))
    survey = local.survey = Survey(local, head, head.here(ControlPipe(local.pipe)))  # type: ignore[arg-type]
    head.let_in(survey, b"the code", directory)
    return survey


def machine(head: Head, directory: Path, *answers: bytes) -> threading.Thread:
    """One that joins, and answers what it is to; then it is gone."""

    def take_part() -> None:
        member = join(Call(head._listener.address, find_token(str(directory / "token")), SOON_S), print)
        assert member.pipe.recv_bytes() == b"the code"
        for answer in answers:
            member.pipe.recv_bytes()
            member.pipe.send_bytes(answer)
        member.pipe.recv_bytes()
        member.pipe.close()

    thread = threading.Thread(target=take_part, daemon=True)
    thread.start()
    return thread


def test_who_is_missing_is_counted_and_who_is_here_is_named(head: Head, tmp_path: Path) -> None:
    survey = surveyed(head, tmp_path)
    other = machine(head, tmp_path)
    while 1 not in survey.machines:
        survey._turn()
    survey.gather(0.0)
    assert survey.missing.startswith("1 of 3 did not come; here are 0: ")
    assert survey.remedy.endswith(f"nc -zv 127.0.0.1 {head.reached[1]} tells whether there is one")
    survey.machines[1].pipe.say(kind="kill")
    other.join()


def test_all_are_asked_and_links_go_both_ways(head: Head, tmp_path: Path) -> None:
    survey = surveyed(head, tmp_path, LISTENS, CALLED, CALLED)
    others = [machine(head, tmp_path, LISTENS, CALLED, CALLED) for _ in range(2)]
    survey.gather(SOON_S)
    assert not survey.missing
    assert survey.clocks().keys() == {0, 1, 2}
    links = survey.links(0.1)
    assert len(links) == 6
    assert all(way.bytes_s == 1e9 for way in links.values())
    for number in (1, 2):
        survey.machines[number].pipe.say(kind="kill")
    for other in others:
        other.join()


@pytest.mark.parametrize("answer", [b"{}", b'{"kind":"listens","port":-1,"clock":0}', b'{"kind":"begin"}', b"nonsense"])
def test_nonsense_of_a_machine_costs_its_connection_and_no_more(answer: bytes, head: Head, tmp_path: Path) -> None:
    survey = surveyed(head, tmp_path, LISTENS)
    other = threading.Thread(target=_say_and_wait, args=(head, tmp_path, answer))
    other.start()
    while 1 not in survey.machines:
        survey._turn()
    assert survey.clocks().keys() == {0}
    assert list(survey.lost) == [1]
    other.join()


def _say_and_wait(head: Head, directory: Path, answer: bytes) -> None:
    member = join(Call(head._listener.address, find_token(str(directory / "token")), SOON_S), print)
    member.pipe.recv_bytes()
    member.pipe.recv_bytes()
    member.pipe.send_bytes(answer)
    assert member.pipe.poll(SOON_S)  # it was hung up on
    member.pipe.close()


def test_what_fails_on_a_machine_is_raised_with_its_name(head: Head, tmp_path: Path) -> None:
    survey = surveyed(head, tmp_path, LISTENS)
    other = machine(head, tmp_path, b'{"kind":"failed","error":"no such disk","task":false}')
    while 1 not in survey.machines:
        survey._turn()
    with pytest.raises(SquallError, match=r"on machine 1 \(.*\): no such disk"):
        survey.clocks()
    survey.machines[1].pipe.say(kind="kill")
    other.join()
