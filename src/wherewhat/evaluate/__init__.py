"""Questions with alternatives as people write them down, and the way to and from lm-evaluation-harness."""

from wherewhat.evaluate.items import Item, read_items

__all__ = ["Item", "read_items"]
