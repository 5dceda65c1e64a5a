"""What Prometheus reads."""

from __future__ import annotations

import math

from prometheus_client.parser import text_string_to_metric_families

from tests.api.conftest import Running


def scrape(server: Running) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    answer = server.http.get("/metrics")
    assert answer.status_code == 200, answer.text
    assert answer.headers["Content-Type"].startswith("text/plain")
    families = text_string_to_metric_families(answer.text)
    return {(sample.name, tuple(sorted(sample.labels.items()))): sample.value for family in families for sample in family.samples}


def test_jobs_and_the_loop_are_counted(server: Running) -> None:
    before = scrape(server)
    assert before["keepstep_jobs", (("state", "PENDING"),)] == 0
    assert before["keepstep_reconciler_pass_age_seconds", ()] == math.inf
    server.submit()
    server.submit()
    server.control.reconciler.once()
    after = scrape(server)
    assert after["keepstep_jobs", (("state", "PENDING"),)] == 2
    assert after["keepstep_queue_wait_seconds_bucket", (("le", "+Inf"),)] == 0
    assert after["keepstep_reconciler_pass_age_seconds", ()] < 20
    assert after["keepstep_reconciler_errors_total", ()] == 0
