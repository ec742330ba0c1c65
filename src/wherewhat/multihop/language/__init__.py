"""Laboratory models that learn to write text: bytes are tokens, and every byte is the answer to those before it."""

from wherewhat.multihop.language.config import VOCABULARY, LanguageConfig
from wherewhat.multihop.language.order import batch_starts, recording_steps
from wherewhat.multihop.language.trainer import train_language

__all__ = ["VOCABULARY", "LanguageConfig", "batch_starts", "recording_steps", "train_language"]
