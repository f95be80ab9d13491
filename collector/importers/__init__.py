"""Files from elsewhere to rows: what a file holds is told by its content, not by its name.

``import_file(path)`` gives an ``Imported``; ``Writer.add_import`` takes it into the store.
"""

from phasewise.collector.importers.files import Imported, import_bytes, import_file, kind_of

__all__ = ["Imported", "import_bytes", "import_file", "kind_of"]
