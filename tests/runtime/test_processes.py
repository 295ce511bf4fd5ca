import mmap
import signal

from squall.runtime.processes import ending, private_bytes

SIZE = 1 << 26


def test_every_way_to_end_has_words() -> None:
    assert ending(3) == "exit status 3"
    assert ending(-signal.SIGKILL) == "killed by SIGKILL"
    assert ending(-35) == "killed by signal 35"  # a real-time signal, which has no name


def test_memory_of_ones_own_is_what_is_not_shared() -> None:
    before = private_bytes()
    shared = mmap.mmap(-1, SIZE)
    shared.write(b"x" * SIZE)
    assert private_bytes() - before < SIZE / 2
    own = bytearray(b"x" * SIZE)
    assert SIZE <= private_bytes() - before + SIZE / 8 < 3 * SIZE
    assert own[-1] == shared[-1]
