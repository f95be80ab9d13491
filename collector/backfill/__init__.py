"""A window of what other systems stored already: Prometheus or Mimir, Tempo, Jaeger, over HTTP, page by page.

``pages(source, from_ms, to_ms)`` gives bodies that ``importers.import_bytes`` reads; ``Coverage`` remembers which are stored.
"""

from phasewise.collector.backfill.coverage import Coverage
from phasewise.collector.backfill.pages import Page, Source, pages
from phasewise.collector.backfill.remote import Remote

__all__ = ["Coverage", "Page", "Remote", "Source", "pages"]
