"""Length methods: attention beyond the trained length.

``from wherewhat.lengths import YaRN, extended`` imports what is used. The public names are those of ``__init__.pyi``.
"""

from wherewhat.imports import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
