"""`/metrics`: what Phasewise counts about itself and its verdicts, for the Prometheus that watches everything else."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector, CollectorRegistry

from phasewise.dashboard.answers import Answers
from phasewise.dashboard.cards import clean
from phasewise.rules.errors import MachineError


class _Figures(Collector):
    def __init__(self, answers: Answers) -> None:
        self.answers = answers

    def collect(self) -> Iterator[Metric]:
        info = GaugeMetricFamily(
            "phasewise_info", "Version of the program and of its rules.", labels=["version", "rules"]
        )
        health = self.answers.health()
        info.add_metric([str(health["version"]), str(health["rules"])], 1)
        yield info
        yield GaugeMetricFamily("phasewise_up", "1 while the store can be read.", value=float(health["status"] == "ok"))
        posture = self.answers.posture
        for name, text, held in (
            ("phasewise_insecure_no_auth", "1 while other machines reach this server without a key.", posture.insecure),
            ("phasewise_keys_required", "1 while keys are asked for.", posture.door_required),
            ("phasewise_content_kept", "1 while prompts and answers are stored.", posture.content),
        ):
            yield GaugeMetricFamily(name, text, value=float(held))
        for key, name, text in (
            ("requests", "phasewise_stored_requests", "Rows of requests in the store."),
            ("samples", "phasewise_stored_engine_samples", "Scrapes of engines in the store."),
            ("age_s", "phasewise_data_age_seconds", "Age of the newest data."),
        ):
            if isinstance(value := health.get(key), int | float):
                yield GaugeMetricFamily(name, text, value=float(value))
        verdicts = CounterMetricFamily(
            "phasewise_verdicts", "Verdicts computed since the start.", labels=["status", "primary", "cause"]
        )
        for (status, primary, cause), n in sorted(self.answers.verdicts_told.items()):
            verdicts.add_metric([status, primary, cause], n)
        yield verdicts
        yield from self._slow()
        yield from self._scrapes(health.get("writer"))
        yield from self._writer(health.get("writer"))

    def _slow(self) -> Iterator[Metric]:
        """The last quarter of an hour by cause, for a board or an alert beside the others."""
        now = self.answers.clock()
        seconds = GaugeMetricFamily(
            "phasewise_recent_requests",
            "Requests that ended in the last 15 minutes, by the cause that most of their time is booked to.",
            labels=["cause"],
        )
        try:
            frame = self.answers.reader.query(
                'SELECT coalesce("cause", \'inconclusive\') AS cause, count(*) AS n FROM "requests" '
                'WHERE "finished_unix_ns" >= ? GROUP BY ALL ORDER BY ALL',
                (now - 900 * 10**9,),
            )
        except MachineError:
            return
        for row in frame.iter_rows(named=True):
            seconds.add_metric([row["cause"]], row["n"])
        yield seconds

    @staticmethod
    def _scrapes(writer: object) -> Iterator[Metric]:
        up = GaugeMetricFamily("phasewise_scrape_up", "1 while scraping this target works.", labels=["target"])
        age = GaugeMetricFamily(
            "phasewise_scrape_last_success_age_seconds",
            "Time since the last scrape of this target that worked.",
            labels=["target"],
        )
        told = writer.get("scrapes") if isinstance(writer, Mapping) else None
        for one in told if isinstance(told, list) else ():
            up.add_metric([str(one["url"])], float(bool(one["up"])))
            if one["last_success_age_s"] is not None:
                age.add_metric([str(one["url"])], one["last_success_age_s"])
        yield up
        yield age

    @staticmethod
    def _writer(writer: object) -> Iterator[Metric]:
        if not isinstance(writer, Mapping):
            return
        family = GaugeMetricFamily(
            "phasewise_writer", "Counters and watermarks of the writer, by name.", labels=["name"]
        )
        for path, value in _numbers(writer):
            family.add_metric([clean(path)], value)
        yield family


def _numbers(tree: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, float]]:
    for name, value in sorted(tree.items()):
        if isinstance(value, Mapping):
            yield from _numbers(value, f"{prefix}{name}.")
        elif isinstance(value, int | float):
            yield f"{prefix}{name}", float(value)


def exposition(answers: Answers) -> bytes:
    """The figures in the text format."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Figures(answers))
    return generate_latest(registry)
