"""The English prose that ships with the package: the same bytes on every machine.

Sixteen documents of about 37,000 characters, Melville and Austen in turn, all in the public domain. Where
they come from and how they were cut is told in ``data/SOURCES.md``; ``data/documents.json`` fixes their
order.
"""

import hashlib
import json
from importlib.resources import files

from wherewhat.checking import checked
from wherewhat.errors import TextError
from wherewhat.text.document import Document, check_count

SOURCE = "embedded"


@checked()
def embedded_documents(count: int | None = None) -> list[Document]:
    """The embedded documents in the order of their manifest.

    Args:
        count: How many, from the first on; all when None.

    Returns:
        The documents, each checked against the manifest's SHA-256.

    Raises:
        TextError: If ``count`` is out of range or a file of the installation is missing or altered.
    """
    folder = files("wherewhat.text") / "data"
    try:
        entries = json.loads((folder / "documents.json").read_bytes())["documents"]
        check_count(count, len(entries))
        documents = []
        for entry in entries[:count]:
            data = (folder / entry["file"]).read_bytes()
            if hashlib.sha256(data).hexdigest() != entry["sha256"]:
                raise TextError(f"the embedded text {entry['file']} was altered: install the package again")
            documents.append(Document(name=entry["name"], text=data.decode("utf-8"), source=SOURCE))
    except (OSError, ValueError, KeyError, TypeError) as error:
        name = type(error).__name__
        raise TextError(f"the embedded text cannot be read ({name}): install the package again") from error
    return documents
