"""The exception tree. Blame is in the type.

ValueError              a setting is wrong; raised before anything is launched, says what to change
└── ClusterError        a cluster file says something unknown or impossible; says in which line, and what to write
SquallError             something happened to a run
├── TaskError           the user's own code failed inside a process; carries its traceback
├── ProcessLost         a process that the run cannot go on without died; says how to resume
│   └── LostAlone       the same on this machine, and the run goes on on others; says how to join it again
├── NotFinite           a batch gave NaN or Inf twice; says which, and where the last good weights are
├── SnapshotMismatch    a snapshot belongs to another model, optimizer or data, or is damaged; says what differs
└── PeerFault           a peer sent what no Squall process sends (never blamed on the user)
Interrupted             (a KeyboardInterrupt) Ctrl-C or SIGTERM, after an orderly end with a snapshot
"""

from __future__ import annotations

from squall.usercode.blame import Failure, decode


class ClusterError(ValueError):
    """A cluster file cannot be used as it is: "cluster.toml, line 12: what: remedy"."""


class SquallError(Exception):
    """Something happened to a run that the run could not survive."""


class TaskError(SquallError):
    """The user's task, loss, metric or dataset raised inside one of the run's processes.

    `failure` says of which line, and of which replica, epoch and examples, where that is known.
    """

    def __init__(self, text: str, failure: Failure | None = None) -> None:
        super().__init__(text)
        self.failure = failure

    @classmethod
    def told(cls, text: str) -> TaskError:
        """From what a process has written with `blame.encode`, or from a plain text."""
        failure = decode(text)
        return cls(text if failure is None else f"in the user's own code:\n{failure}", failure)


class ProcessLost(SquallError):
    """A process that the run cannot go on without died."""


class LostAlone(ProcessLost):
    """The same, and the run goes on without this machine."""


class NotFinite(SquallError):
    """A batch gave a NaN or Inf twice."""


class SnapshotMismatch(SquallError):
    """A snapshot belongs to another model, optimizer or training set, or is not what was written any more."""


class PeerFault(SquallError):
    """A frame arrived that no Squall process would send."""


class Interrupted(KeyboardInterrupt):
    """The user stopped the run; nothing is left running, and its message says which snapshot a resume goes on from."""
