"""What an engine has to say since it was last asked."""

from __future__ import annotations

from pd_service.engine.messages import Hold, PullOrder, StepOutput, Withdrawn
from pd_service.request import Load, TokenEvent


class Outbox:
    def __init__(self, load: Load) -> None:
        self.events: list[TokenEvent] = []
        self.pulls: list[PullOrder] = []
        self.holds: list[Hold | Withdrawn] = []
        self._told_load = load

    def take(self, load: Load) -> StepOutput | None:
        """Everything since the last call; None when nothing happened and the load is the same."""
        if not (self.events or self.pulls or self.holds) and load == self._told_load:
            return None
        output = StepOutput(events=self.events, pulls=self.pulls, holds=self.holds, load=load)
        self.events, self.pulls, self.holds, self._told_load = [], [], [], load
        return output
