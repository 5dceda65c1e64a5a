"""Numbers for Prometheus."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

from fastapi import APIRouter, Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from api.context import Here
from api.errors import documented
from orchestrator.core.figures import Figures, Spread
from orchestrator.reconciler import Work

router = APIRouter(tags=["health"])
TEXT: dict[int | str, dict[str, Any]] = {200: {"description": "Prometheus' text format", "content": {"text/plain": {}}}}


@router.get("/metrics", summary="Numbers for Prometheus", response_class=Response, responses={**TEXT, **documented()})
def metrics(here: Here) -> Response:
    """Needs the token. What concerns jobs is counted in the database: it survives restarts and is the same on every server."""
    registry = CollectorRegistry()
    registry.register(_Collected([*_of_jobs(here.figures()), *_of_server(here.work(), here.last_pass_at(), here.now())]))
    return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)


class _Collected(Collector):
    """Metrics that are read once, for one answer."""

    def __init__(self, metrics: Iterable[Metric]) -> None:
        self._metrics = list(metrics)

    def collect(self) -> Iterator[Metric]:
        return iter(self._metrics)


def _of_jobs(figures: Figures) -> Iterator[Metric]:
    jobs = GaugeMetricFamily("keepstep_jobs", "Jobs by state.", labels=["state"])
    for state, count in figures.jobs.items():
        jobs.add_metric([state], count)
    yield jobs
    yield GaugeMetricFamily("keepstep_jobs_unreachable", "Jobs whose group does not answer now.", value=figures.unreachable)
    yield _histogram("keepstep_queue_wait_seconds", "From submit to the first placement.", {(): figures.queue_wait}, [])
    yield _histogram("keepstep_start_seconds", "From submit to the first step.", {(): figures.start}, [])
    recovery: dict[tuple[str, ...], Spread] = {(cause,): spread for cause, spread in figures.recovery.items()}
    yield _histogram(
        "keepstep_recovery_seconds",
        "From a failure to the next new step, or to the launch of scripts that report no steps; drills are left out.",
        recovery,
        ["cause"],
    )
    lost = CounterMetricFamily("keepstep_lost_steps", "Steps done again after failures.", labels=["cause"])
    for cause, steps in figures.lost_steps.items():
        lost.add_metric([cause], steps)
    yield lost
    failures = CounterMetricFamily("keepstep_failures", "Failures of groups; drills are left out.", labels=["cause", "class"])
    for labels, count in figures.failures.items():
        failures.add_metric(list(labels), count)
    yield failures
    yield GaugeMetricFamily("keepstep_checkpoints", "Checkpoints in storage.", value=figures.checkpoints)


def _of_server(work: Work, last_pass_at: float | None, now: float) -> Iterator[Metric]:
    passes = "Passes of the reconciler that this server has finished, and their seconds."
    yield CounterMetricFamily("keepstep_reconciler_passes", passes, value=work.passes)
    yield CounterMetricFamily("keepstep_reconciler_pass_seconds", passes, value=work.seconds)
    yield CounterMetricFamily("keepstep_reconciler_refused", "Passes that the database did not let end.", value=work.refused)
    yield CounterMetricFamily("keepstep_reconciler_errors", "Steps and actions that failed in a way nobody foresaw.", value=work.errors)
    leads = "1: this server leads, its reconciler looks after all jobs; 0: another one does."
    yield GaugeMetricFamily("keepstep_reconciler_leads", leads, value=work.leads)
    yield CounterMetricFamily("keepstep_leases_lost", "Leases of this server that another one took.", value=work.leases_lost)
    age = math.inf if last_pass_at is None else max(0.0, now - last_pass_at)
    yield GaugeMetricFamily(
        "keepstep_reconciler_pass_age_seconds", "Since the newest finished pass of the server that leads; +Inf: none yet.", value=age
    )


def _histogram(name: str, text: str, spreads: dict[tuple[str, ...], Spread], labels: list[str]) -> Metric:
    family = HistogramMetricFamily(name, text, labels=labels)
    for values, spread in spreads.items():
        buckets = [*((str(bound), within) for bound, within in zip(spread.bounds, spread.within, strict=True)), ("+Inf", spread.count)]
        family.add_metric(list(values), buckets, spread.total)
    return family
