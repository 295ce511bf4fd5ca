"""What the machines want done where nothing is trained."""

from __future__ import annotations

from squall.protocol.answering.messages import AnswersPiece
from squall.protocol.effects import Effect
from squall.protocol.nodes import Node


class Answer(Effect, frozen=True, gc=False):
    """Run the model on examples [start, stop) of the data's order."""

    start: int
    stop: int


class KeepAnswers(Effect, frozen=True, gc=False):
    """Bring what the model said of examples [start, stop), which were answered last, onto the disk."""

    start: int
    stop: int


class WriteAnswers(Effect, frozen=True, gc=False):
    """Take what a piece's payload has brought; with the last one, bring the file onto the disk."""

    node: Node  # that has sent it
    piece: AnswersPiece
