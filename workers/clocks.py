"""PURE: times that an agent tells by its own clock, brought to the coordinator's. Hosts' clocks may differ by minutes.

Invariant: small differences are left alone, so that on one host, or with synchronised clocks, times stay exactly as they were told.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from workers.messages import AgentStatus, RankReport

ALIKE_S = 0.25  # closer than this counts as the same clock
JUMP_S = 2.0  # an offset that grows by more is a clock that was set, not a message that was late

_TIMES = tuple(f.name for f in fields(RankReport) if f.name.endswith("_at"))


@dataclass
class Offset:
    """How far a node's clock is behind ours, seconds: the smallest difference seen is the one with the least delay of the message."""

    smallest: float | None = None

    def heard(self, status: AgentStatus, now: float) -> None:
        if status.at is None:
            return
        found = now - status.at
        if self.smallest is None or found < self.smallest or found - self.smallest > JUMP_S:
            self.smallest = found

    @property
    def seconds(self) -> float:
        return 0.0 if self.smallest is None or abs(self.smallest) < ALIKE_S else self.smallest


def on_our_clock(status: AgentStatus, offset: float) -> AgentStatus:
    """The status with the times of its ranks moved by ``offset`` seconds."""
    if not offset:
        return status
    return replace(status, ranks=tuple(_moved(r, offset) for r in status.ranks))


def _moved(rank: RankReport, offset: float) -> RankReport:
    told = {name: getattr(rank, name) for name in _TIMES}
    return replace(rank, **{name: at + offset for name, at in told.items() if at is not None})
