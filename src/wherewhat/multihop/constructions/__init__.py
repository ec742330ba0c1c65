"""Index and Retrieval as explicit weights of the laboratory's model, checked, with their geometry."""

from wherewhat.multihop.constructions.checking import Check, check_exhaustively, check_randomly
from wherewhat.multihop.constructions.geometry import (
    Directions,
    PlaneGeometry,
    aligned_resultant,
    directions_by_label,
    head_geometry,
    plane_geometry,
    resultant,
    task_labels,
)
from wherewhat.multihop.constructions.index import index_transformer
from wherewhat.multihop.constructions.retrieval import letter_angle, retrieval_transformer
from wherewhat.multihop.constructions.temperature import (
    index_leak,
    index_temperature,
    retrieval_error,
    retrieval_temperature,
    softmax_temperature,
)

__all__ = [
    "Check",
    "Directions",
    "PlaneGeometry",
    "aligned_resultant",
    "check_exhaustively",
    "check_randomly",
    "directions_by_label",
    "head_geometry",
    "index_leak",
    "index_temperature",
    "index_transformer",
    "letter_angle",
    "plane_geometry",
    "resultant",
    "retrieval_error",
    "retrieval_temperature",
    "retrieval_transformer",
    "softmax_temperature",
    "task_labels",
]
