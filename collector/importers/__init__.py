"""Files from elsewhere to rows: what a file holds is told by its content, not by its name.

``import_file(path)`` gives an ``Imported``; ``Writer.add_import`` takes it into the store. Files of any size go piece by piece:
``pieces(path)``, ``import_piece`` for each.
"""

from phasewise.collector.importers.files import Imported, import_bytes, import_file, import_piece, kind_of

__all__ = ["Imported", "import_bytes", "import_file", "import_piece", "kind_of"]
