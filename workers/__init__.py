"""All that runs on a training node, and the only package that user code imports: ``run = workers.start()``.

Invariant: importing it imports no framework and nothing of the control plane; each part is loaded when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from workers.run import Run, start

__all__ = ["Run", "data", "keras", "start"]


def __getattr__(name: str) -> Any:
    if name in ("start", "Run"):
        from workers import run

        return getattr(run, name)
    if name in ("data", "keras"):
        import importlib

        return importlib.import_module(f"workers.{name}")
    raise AttributeError(f"module 'workers' has no attribute {name!r}")
