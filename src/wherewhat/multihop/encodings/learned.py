"""A learned vector for each position, added to the token's embedding."""

from wherewhat.multihop.encodings.base import Encoding

LEARNED = Encoding("learned", "a learned vector for each position", learned=True)
