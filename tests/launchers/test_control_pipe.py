"""What is said over a pipe whose other end is gone."""

from __future__ import annotations

from multiprocessing import Pipe
from multiprocessing.connection import wait

from squall.launchers.control_pipe import ControlPipe


def test_who_speaks_to_one_that_is_gone_hears_its_last_words_and_then_that_it_is_gone() -> None:
    ours, theirs = Pipe()
    pipe = ControlPipe(ours)
    ControlPipe(theirs).say(kind="last")
    theirs.close()
    pipe.say(kind="nobody hears this")
    assert pipe.open
    assert wait([pipe.connection], 0) == [pipe.connection]
    assert pipe.hear() == {"kind": "last"}
    assert wait([pipe.connection], 0) == [pipe.connection]
    assert pipe.hear() is None
    assert not pipe.open
