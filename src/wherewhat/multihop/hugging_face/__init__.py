"""Laboratory models as Hugging Face's, one file per family, and as folders that any tool can open."""

from wherewhat.multihop.hugging_face.folder import byte_tokenizer, save_hugging_face
from wherewhat.multihop.hugging_face.gpt2 import to_gpt2
from wherewhat.multihop.hugging_face.gptj import from_hugging_face, hugging_face_config, to_hugging_face
from wherewhat.multihop.hugging_face.llama import to_llama
from wherewhat.multihop.hugging_face.mpt import to_mpt
from wherewhat.multihop.hugging_face.neox import to_neox

__all__ = [
    "byte_tokenizer",
    "from_hugging_face",
    "hugging_face_config",
    "save_hugging_face",
    "to_gpt2",
    "to_hugging_face",
    "to_llama",
    "to_mpt",
    "to_neox",
]
