"""The model that was loaded last, kept for requests in a row that name the same one."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from wherewhat.capturing import Proof
    from wherewhat.models import LoadedModel
    from wherewhat.pipeline.request import ModelRequest


class LastModel:
    """Loads and proves a model once for as long as requests ask for no other."""

    def __init__(self) -> None:
        self._request: ModelRequest | None = None
        self._loaded: LoadedModel | None = None
        self._proof: Proof | None = None

    def loaded(self, request: ModelRequest, load: Callable[[], LoadedModel]) -> LoadedModel:
        """The model a request names: the kept one, or what ``load`` gives."""
        if self._loaded is None or request != self._request:
            self.forget()  # before the next one is loaded: there may be no room for both
            self._loaded, self._request = load(), request
        return self._loaded

    def proof(self) -> Proof:
        """The proof of the kept model, made once.

        Raises:
            CaptureError: If its attention cannot be captured faithfully.
        """
        from wherewhat.capturing import prove

        assert self._loaded is not None, "nothing is loaded yet"
        if self._proof is None:
            self._proof = prove(self._loaded.model)
        return self._proof

    def forget(self) -> None:
        """Let go of the model, and of the memory that it had on a GPU."""
        if self._loaded is None:
            return
        self._request = self._loaded = self._proof = None
        gc.collect()
        import torch

        if torch.cuda.is_available():
            torch.cuda.empty_cache()
