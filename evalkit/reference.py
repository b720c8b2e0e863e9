"""Dense reference states: what fidelity compares a sparse run with.

The dense model's final hidden states at the scored positions of a window are kept in the cache directory (they are
hundreds of times smaller than its distributions) under a key of everything that can change them.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from .assets import cache_dir
from .attention import Session
from .methods.dense import Dense

_ROWS = 256
"""Rows of logits held at once: with a vocabulary of 152K in float32, 150 MB a distribution."""


class DenseReference:
    """Hidden states of the dense twin, from disk or computed on the spot.

    Args:
        model: the loaded model.
        twin_key: hash of model, task, data, versions and device.
    """

    def __init__(self, model: PreTrainedModel, twin_key: str) -> None:
        self.model = model
        self.folder = cache_dir() / "reference" / twin_key

    def keep(self, prompt_sha256: str, states: Tensor) -> None:
        """Keep the hidden states that a dense cell has just computed."""
        self._save(self._path(prompt_sha256), states)

    def states(self, ids: Tensor, keep_from: int, prompt_sha256: str) -> Tensor:
        """Dense hidden states [N - keep_from, D] of a window."""
        path = self._path(prompt_sha256)
        if path.is_file():
            kept = _intact(path)
            if kept is not None and kept.shape[0] == len(ids) - keep_from:
                return kept.to(self.model.device)
            # Damaged: it is derived data, made again below.
        with Session(self.model, Dense()) as dense:
            states = dense.prefill(ids, keep_from=keep_from)
            dense.account()
        self._save(path, states)
        return states

    def _path(self, prompt_sha256: str) -> Path:
        return self.folder / f"{prompt_sha256[:16]}.safetensors"

    @staticmethod
    def _save(path: Path, states: Tensor) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = path.with_suffix(f".{os.getpid()}")
        states = states.contiguous().cpu()
        save_file({"states": states}, str(scratch), metadata={"sha256": _digest(states)})
        os.replace(scratch, path)


def _intact(path: Path) -> Tensor | None:
    """The states of a file whose bytes are those that were written, else None."""
    try:
        with safe_open(str(path), framework="pt") as file:
            states: Tensor = file.get_tensor("states")
            expected = (file.metadata() or {}).get("sha256")
    except (OSError, SafetensorError):
        return None
    return states if _digest(states) == expected else None


def _digest(states: Tensor) -> str:
    return hashlib.sha256(states.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


@torch.inference_mode()
def score_window(
    session: Session, states: Tensor, targets: Tensor, reference: Tensor | None
) -> tuple[float, float | None, float | None]:
    """Loss of a window, and its fidelity to the dense model, with the LM head in pieces.

    Args:
        session: gives the LM head.
        states: hidden states [n, D] that predict ``targets``.
        targets: int64 [n].
        reference: the dense model's hidden states [n, D], or None.

    Returns:
        Sum of negative log-likelihoods in nats; mean KL(dense || sparse) in nats and share of positions whose most
        likely token agrees, or None for both.
    """
    nll = kl = torch.zeros((), dtype=torch.float64)
    agree = 0
    for start in range(0, len(targets), _ROWS):
        rows = slice(start, start + _ROWS)
        log_q = session.logits(states[rows]).log_softmax(-1)
        nll = nll - log_q.gather(1, targets[rows, None]).double().sum().cpu()
        if reference is not None:
            log_p = session.logits(reference[rows]).log_softmax(-1)
            kl = kl + (log_p.exp() * (log_p - log_q)).double().sum().cpu()
            agree += int((log_p.argmax(-1) == log_q.argmax(-1)).sum())
    if reference is None:
        return float(nll), None, None
    return float(nll), float(kl) / len(targets), agree / len(targets)
