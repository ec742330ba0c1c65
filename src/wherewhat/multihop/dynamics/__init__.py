"""What happens while a model learns: scores of heads and accuracy by step, purity, order, lengths."""

from wherewhat.multihop.dynamics.accuracy import Accuracy, measure_accuracy
from wherewhat.multihop.dynamics.aligning import Alignment, align
from wherewhat.multihop.dynamics.held_out import HeldOut, hold_out
from wherewhat.multihop.dynamics.learning import Learning, find_learning
from wherewhat.multihop.dynamics.lengths import LENGTHS, LengthAccuracy, accuracy_by_length
from wherewhat.multihop.dynamics.purity import Purity, find_purity
from wherewhat.multihop.dynamics.recorder import Recorder
from wherewhat.multihop.dynamics.records import Dynamics
from wherewhat.multihop.dynamics.scoring import HeadScores, score_model
from wherewhat.multihop.dynamics.shares import wilson

__all__ = [
    "LENGTHS",
    "Accuracy",
    "Alignment",
    "Dynamics",
    "HeadScores",
    "HeldOut",
    "Learning",
    "LengthAccuracy",
    "Purity",
    "Recorder",
    "accuracy_by_length",
    "align",
    "find_learning",
    "find_purity",
    "hold_out",
    "measure_accuracy",
    "score_model",
    "wilson",
]
