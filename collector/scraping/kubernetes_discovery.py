"""Targets out of a Kubernetes cluster: list once, then follow the changes; list again where the thread of changes is lost.

While the API does not answer, what was known stays: engines run on without it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from phasewise.collector.scraping.file_discovery import Found
from phasewise.collector.scraping.jobs import SERVICE_ACCOUNT, Endpoint, Job
from phasewise.collector.scraping.kubernetes_api import Cluster, Collection, Expired, Object, Unanswered, cluster_of
from phasewise.collector.scraping.kubernetes_objects import endpoints_of, key_of, version_of

LOG = logging.getLogger("phasewise.collector.scrape")
WATCH_S = 240.0  # the server ends a watch then; the next one goes on where it ended
PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0


def look_once(
    job: Job, environment: Mapping[str, str] = os.environ, account: Path = SERVICE_ACCOUNT
) -> tuple[list[Endpoint], str]:
    """The targets there are now, and what is wrong."""
    assert job.kubernetes is not None
    objects: list[Object] = []
    try:
        cluster = cluster_of(job.kubernetes, environment, account)
        for namespace in cluster.namespaces:
            with contextlib.closing(Collection(cluster, namespace, job.kubernetes, WATCH_S)) as collection:
                objects += collection.listed()[0]
    except Expired:
        return [], "the list went out of date while it was read"
    except Unanswered as error:
        return [], str(error)
    return endpoints_of(objects, job)


class KubernetesDiscovery:
    """Tells `on_found` whenever pods or slices come, change or go. One watch a namespace."""

    kind = "kubernetes"

    def __init__(
        self,
        job: Job,
        environment: Mapping[str, str] = os.environ,
        account: Path = SERVICE_ACCOUNT,
        *,
        watch_s: float = WATCH_S,
        pause_s: float = PAUSE_S,
    ) -> None:
        assert job.kubernetes is not None
        self._job = job
        self._wanted = job.kubernetes
        self._environment, self._account = environment, account
        self._watch_s, self._pause_s = watch_s, pause_s
        self._lock = threading.Lock()
        self._objects: dict[str, dict[str, Object]] = {}  # by namespace, then by uid
        self._problems: dict[str, str] = {}
        self._told: tuple[Sequence[Endpoint], str] | None = None

    def run(self, stopping: threading.Event, on_found: Found) -> None:
        pause_s = self._pause_s
        while not stopping.is_set():
            try:
                cluster = cluster_of(self._wanted, self._environment, self._account)
                break
            except Unanswered as error:
                self._tell("", str(error), on_found)
                stopping.wait(pause_s)
                pause_s = min(LONGEST_PAUSE_S, pause_s * 2)
        else:
            return
        self._problems.pop("", None)
        followers = [
            threading.Thread(
                target=self._follow,
                args=(cluster, namespace, stopping, on_found),
                name=f"discover {self._job.name} {namespace}",
                daemon=True,
            )
            for namespace in cluster.namespaces
        ]
        for follower in followers:
            follower.start()
        for follower in followers:
            follower.join()

    def _follow(self, cluster: Cluster, namespace: str, stopping: threading.Event, on_found: Found) -> None:
        """List and watch one namespace until told to stop; slower each time that it fails."""
        pause_s = self._pause_s
        while not stopping.is_set():
            try:
                with contextlib.closing(Collection(cluster, namespace, self._wanted, self._watch_s)) as collection:
                    found, version = collection.listed()
                    self._put(namespace, {key_of(one): one for one in found}, on_found)
                    pause_s = self._pause_s
                    while not stopping.is_set():
                        version = self._watch(collection, namespace, version, stopping, on_found)
            except Expired:
                stopping.wait(self._pause_s)
            except Unanswered as error:
                self._tell(namespace, str(error), on_found)
                stopping.wait(pause_s)
                pause_s = min(LONGEST_PAUSE_S, pause_s * 2)
            except (
                Exception
            ) as error:  # a fault of ours, or an object of a shape nobody foresaw: the others are still found
                LOG.exception("discovery of %s fails", self._job.name)
                self._problems[namespace] = f"{type(error).__name__}: {error}"[:200]  # told with the next change
                stopping.wait(LONGEST_PAUSE_S)

    def _watch(
        self, collection: Collection, namespace: str, version: str, stopping: threading.Event, on_found: Found
    ) -> str:
        """The changes of one watch; the version that the next one goes on from."""
        quick = True
        for changes in collection.watch(version):
            quick = False
            with self._lock:
                known = dict(self._objects.get(namespace, {}))
            for kind, one in changes:
                version = version_of(one) or version
                if kind == "DELETED":
                    known.pop(key_of(one), None)
                elif kind in ("ADDED", "MODIFIED"):
                    known[key_of(one)] = one
            self._put(namespace, known, on_found)
            if stopping.is_set():
                break
        if quick:  # ended without a word: do not ask in a circle
            stopping.wait(self._pause_s)
        return version

    def _put(self, namespace: str, objects: dict[str, Object], on_found: Found) -> None:
        with self._lock:
            self._objects[namespace] = objects
        self._tell(namespace, "", on_found)

    def _tell(self, namespace: str, problem: str, on_found: Found) -> None:
        with self._lock:
            self._problems[namespace] = problem
            objects = [one for known in self._objects.values() for one in known.values()]
            endpoints, unusable = endpoints_of(objects, self._job)
            problems = [told for told in self._problems.values() if told]
            now = (endpoints, problems[0] if problems else unusable)
            if now == self._told:
                return
            self._told = now
            on_found(*now)
