"""No encoding at all (Kazemnejad et al., arXiv 2305.19466): the causal mask alone tells positions apart."""

from wherewhat.multihop.encodings.base import Encoding

NOPE = Encoding("nope", "nothing but the causal mask")
