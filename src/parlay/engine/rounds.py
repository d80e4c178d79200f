"""What the links of this process send to and get from the processes before and after it, round by round."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple, final

from parlay.batch import Pass
from parlay.engine.transport import Round, Side, Transport
from parlay.link.link import Direction, Link
from parlay.timeline import Recorder


class Expected(NamedTuple):
    """Tensors of a round that are for one link."""

    link: Link
    batch: Pass
    tensors: int


@final
class Rounds:
    def __init__(self, transport: Transport, links: Sequence[Link], recorder: Recorder) -> None:
        self.transport, self._recorder = transport, recorder
        self.links = [link for link in links if not (link.end.lower and link.end.upper)]
        self._under_way: dict[Direction, deque[tuple[Round, list[Expected]]]] = {way: deque() for way in Direction}

    def begin(self, way: Direction, passes: Mapping[int, Pass | None], step: int) -> None:
        """`passes`: by the link, of what travels now."""
        sent, wanted, expected = [], [], []
        with self._recorder.span("send", step):
            for link in self.links:
                p, side = passes.get(link.k), Side.AFTER if link.end.lower else Side.BEFORE
                if (way is Direction.UP) == link.end.lower:
                    sent += [(side, tensor) for tensor in link.outgoing(way, p)]
                elif p is not None:
                    messages = link.incoming(way, p)
                    wanted += [(side, message) for message in messages]
                    expected.append(Expected(link, p, len(messages)))
            self._under_way[way].append((self.transport.begin(sent, wanted), expected))

    def wait(self, way: Direction, leave: int, step: int) -> None:
        """Until all rounds that have begun are over, but for the last `leave`."""
        rounds = self._under_way[way]
        while len(rounds) > leave:
            round_, expected = rounds.popleft()
            with self._recorder.span("wait", step):
                tensors = round_.wait()
            for link, p, count in expected:
                if count:
                    link.arrive(way, p, tensors[:count])
                    tensors = tensors[count:]

    def flush(self, step: int) -> None:
        """Until nothing is on its way."""
        for way in Direction:
            self.wait(way, 0, step)
        self.transport.settle()
