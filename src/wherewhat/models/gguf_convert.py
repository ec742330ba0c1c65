"""De-quantise a GGUF file into a folder in Hugging Face layout."""

import errno
import functools
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from wherewhat.errors import LoadError, one_line
from wherewhat.models.gguf_facts import GgufFacts, damaged, read_facts
from wherewhat.models.optional import require
from wherewhat.models.quiet import quiet
from wherewhat.models.suitability import check_config, check_loaded


def convert(path: Path, folder: Path) -> GgufFacts:
    """Write float32 safetensors, config and tokenizer of a GGUF file into an empty folder.

    Float32 because de-quantised blocks (scale * integer + minimum) are exact in it and in no shorter
    format: of SmolLM2's Q4_1 and Q8_0 entries a quarter to four fifths do not survive float16.

    Args:
        path: The GGUF file.
        folder: Existing, empty folder.

    Returns:
        What the file says about BOS and rotary scaling.

    Raises:
        LoadError: The file is damaged, or transformers cannot read all of it.
        OSError: The folder cannot be written.
    """
    with _one_reader():
        return _convert(path, folder)


def _convert(path: Path, folder: Path) -> GgufFacts:
    facts = read_facts(path)
    needed = 4 * (facts.elements + facts.output_elements)
    if shutil.disk_usage(folder).free < needed:
        raise OSError(errno.ENOSPC, f"{needed / 1e9:.1f} GB needed and not free")
    where = {
        "pretrained_model_name_or_path": str(path.parent),
        "gguf_file": path.name,
        "local_files_only": True,
    }
    try:
        with quiet(stderr=True):
            model, tokenizer = _read(path, facts, where)
            _check_complete(path, facts, model)
            # transformers refuses to save a model that it counts as quantised; by now it is a plain one.
            model.hf_quantizer = None
            if hasattr(model.config, "quantization_config"):
                del model.config.quantization_config
            # The path of a file on this machine has no place in a cache keyed by content.
            model.config._name_or_path = ""
            model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
    except NotImplementedError as error:
        raise LoadError(f"GGUF file {str(path)!r} cannot be read: {one_line(error)}") from None
    except (ValueError, IndexError, KeyError, TypeError, RuntimeError, OverflowError) as error:
        if "not supported" in str(error) or "Unknown gguf" in str(error):
            raise LoadError(f"GGUF file {str(path)!r} cannot be read: {one_line(error)}") from None
        raise damaged(path, error) from None
    except SafetensorError as error:
        raise OSError(errno.EIO, one_line(error)) from None
    except OSError as error:
        # transformers also raises OSError, without a number, for content it cannot make sense of.
        if error.errno is not None:
            raise
        raise damaged(path, error) from None
    return facts


@contextmanager
def _one_reader() -> Iterator[None]:
    """While open, parse a file once: transformers does so for config, weights and tokenizer, 20 s each for Gemma."""
    gguf: Any = require("gguf", why="reading GGUF files")
    reader = gguf.GGUFReader
    read = functools.cache(reader)
    gguf.GGUFReader = lambda path: read(os.path.realpath(path))
    try:
        yield
    finally:
        gguf.GGUFReader = reader


def _read(path: Path, facts: GgufFacts, where: dict[str, Any]) -> tuple[Any, Any]:
    import transformers

    config = transformers.AutoConfig.from_pretrained(**where)
    check_config(config, str(path))
    _check_rope(path, facts, config)
    options: dict[str, Any] = {}
    # Where compute kernels are installed, newer versions would keep the blocks packed.
    if hasattr(transformers, "GgufConfig"):
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        **where, **options, config=config, dtype=torch.float32, output_loading_info=True
    )
    check_loaded(report, str(path))
    return model, transformers.AutoTokenizer.from_pretrained(**where)


def _check_rope(path: Path, facts: GgufFacts, config: Any) -> None:
    """Refuse a file whose rotary scaling transformers drops: every frequency would be silently wrong."""
    if facts.rope_scaling is None:
        return
    parameters = getattr(config, "rope_parameters", None) or {}
    if parameters.get("rope_type", "default") != facts.rope_scaling:
        raise LoadError(
            f"GGUF file {str(path)!r} asks for scaled rotary frequencies ({facts.rope_scaling}), which "
            f"transformers does not read from GGUF: use the model's safetensors version"
        )


def _check_complete(path: Path, facts: GgufFacts, model: Any) -> None:
    """Refuse a conversion that left tensors of the file behind: transformers drops unknown names silently."""
    held = sum(parameter.numel() for parameter in model.parameters())
    stored = facts.elements + facts.output_elements
    if facts.elements > held or stored < held:
        raise LoadError(
            f"GGUF file {str(path)!r} holds {stored} weights, but transformers "
            f"built a {facts.architecture} model of {held}: use the model's safetensors version"
        )
