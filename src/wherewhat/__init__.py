"""wherewhat shows how a language model separates *where* from *what* in its attention.

Importing it is light: models, files and the terminal are touched only by the names that need them.

The public names are those of ``__init__.pyi``.
"""

from wherewhat.imports import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
