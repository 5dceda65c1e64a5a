"""The clock of the control plane, so that everything else can be told what time it is."""

from __future__ import annotations

from workers.steady import SteadyClock


class SystemClock(SteadyClock):
    """Times in the database and deadlines come from here: setting the wall clock moves neither before the next start."""
