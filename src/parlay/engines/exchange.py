"""What crosses the interfaces in a parallel phase, and when: posted ahead, waited for late.

step t of stage k:  asks for the states of step t+1 ─► computes ─► sends its outputs ─► renews interface k for the
                    from stage k+1, and sends its       step t      of step t to        step t-LAG, whose outputs
                    own to stage k-1                                stage k+1           have long arrived

In rounds (links.py) the outputs of step t go with the states of step t+2, when step t+1 begins.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple, final

import torch
from torch import Tensor

from parlay.coupling import Pair
from parlay.engines.links import Arrival, Neighbour, Rounds
from parlay.engines.shares import Share
from parlay.interface import Cut, Interface
from parlay.timeline import Recorder

LAG = 2  # steps that the renewal of an interface, and an agreement, may come late


class Ahead(NamedTuple):
    """What a step needs, asked for before it begins."""

    own: Pair | None
    """Of the interface before the stage, as it is stored."""
    behind: list[Arrival]
    """State and multiplier of the interface behind it."""


class Pending(NamedTuple):
    """An interface to be renewed once the outputs of the stage before are there."""

    share: Share
    pair: Pair
    output: Arrival
    adjoint: Tensor
    beta: Tensor
    step: int


@final
class Exchange:
    """One stage's part in it. It has the interface before the stage, and knows the cut behind it."""

    def __init__(
        self,
        interface: Interface | None,
        cut: Cut | None,
        before: Neighbour | None,
        behind: Neighbour | None,
        dtype: torch.dtype,
        multipliers: bool,
        recorder: Recorder,
        rounds: Rounds | None = None,
    ) -> None:
        if rounds is not None:
            before, behind = (each.within(rounds) if each is not None else None for each in (before, behind))
            rounds.meet([each for each in (before, behind) if each is not None])
        self.interface, self.cut, self._before, self._behind = interface, cut, before, behind
        self._rounds = rounds
        self._dtype, self._multipliers, self._recorder = dtype, multipliers, recorder
        self._ahead: Ahead | None = None
        self._output: Arrival | None = None
        self._pending: deque[Pending] = deque()

    def begin(self, share: Share, following: Share | None, step: int) -> Ahead:
        """What this step needs; and the next one's is set on its way, as is this one's output from the stage before."""
        ahead = self._ahead or self._ask(share, step)
        self._ahead = self._ask(following, step) if following is not None else None
        self._go()
        if self.interface is not None and self._before is not None:
            shape = (share.count(share.turn_before), *self.interface.cut.small)
            self._output = self._before.up.receive(shape, self._dtype)
        return ahead

    def _ask(self, share: Share, step: int) -> Ahead:
        own, arrivals = None, []
        if self.cut is not None and self._behind is not None:
            shape = (share.count(share.turn), *self.cut.small)
            arrivals = [self._behind.down.receive(shape, self._dtype) for _ in range(2 if self._multipliers else 1)]
        if self.interface is not None and self._before is not None:
            with self._recorder.span("send", step):
                own = self.interface.kept(share.rows)
                for part in own.of(share.turn_before):
                    if part is not None:
                        self._before.down.send(part)
        return Ahead(own, arrivals)

    def target(self, ahead: Ahead, step: int) -> Pair:
        """State and multiplier of the interface behind, when they are there."""
        state, *multiplier = (self._awaited(arrival, step).float() for arrival in ahead.behind)
        return Pair(state, multiplier[0] if multiplier else None)

    def send(self, small: Tensor, step: int) -> Tensor:
        """The outputs, to the stage behind. Gives them as they will arrive there."""
        assert self._behind is not None
        with self._recorder.span("send", step):
            sent = small.detach().to(self._dtype)
            self._behind.up.send(sent)
        return sent.float()

    def finish(self, share: Share, pair: Pair, adjoint: Tensor, beta: Tensor, step: int) -> list[Tensor]:
        """Renew the interface with this step's adjoints, some steps later. Gives the violations found meanwhile."""
        assert self._output is not None
        self._pending.append(Pending(share, pair, self._output, adjoint, beta, step))
        return self._renewed(LAG)

    def flush(self) -> list[Tensor]:
        """All that is on its way arrives, and the interface is up to date."""
        self._go()
        violations = self._renewed(0)
        for arrival in self._ahead.behind if self._ahead else []:
            arrival.wait()
        self._ahead = None
        for neighbour in (self._before, self._behind):
            if neighbour is not None:
                neighbour.settle()
        return violations

    def _go(self) -> None:
        if self._rounds is not None:
            self._rounds.begin()

    def _renewed(self, keep: int) -> list[Tensor]:
        violations = []
        while len(self._pending) > keep:
            share, pair, output, adjoint, beta, step = self._pending.popleft()
            assert self.interface is not None
            x = self._awaited(output, step).float()
            with self._recorder.span("update", step):
                violations.append(
                    self.interface.renew(share.rows, pair, x, share.turn_before, adjoint, share.turn, beta)
                )
        return violations

    def _awaited(self, arrival: Arrival, step: int) -> Tensor:
        with self._recorder.span("wait", step):
            return arrival.wait()
