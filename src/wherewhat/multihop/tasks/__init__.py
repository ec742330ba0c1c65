"""Tasks with known answers and known paths to them: number and letter, and three of one hop."""

from wherewhat.multihop.tasks.base import Task
from wherewhat.multihop.tasks.letter import LetterTask
from wherewhat.multihop.tasks.number import NumberTask
from wherewhat.multihop.tasks.one_layer import IndexTask, PartialInductionTask, RetrievalTask
from wherewhat.multihop.tasks.registry import TASKS, find
from wherewhat.multihop.tasks.sequences import Sequences

__all__ = [
    "TASKS",
    "IndexTask",
    "LetterTask",
    "NumberTask",
    "PartialInductionTask",
    "RetrievalTask",
    "Sequences",
    "Task",
    "find",
]
