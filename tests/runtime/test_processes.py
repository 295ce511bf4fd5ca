import signal

from squall.runtime.processes import ending


def test_every_way_to_end_has_words() -> None:
    assert ending(3) == "exit status 3"
    assert ending(-signal.SIGKILL) == "killed by SIGKILL"
    assert ending(-35) == "killed by signal 35"  # a real-time signal, which has no name
