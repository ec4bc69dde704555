"""What a drafter hands to the verifier: tokens, the law they were drawn from, confidences."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from deepinfer_dspark.arrays import to_host
from deepinfer_dspark.errors import ShapeError


@dataclass(frozen=True, slots=True)
class SparseQ:
    """Draft distributions with at most `m` tokens of non-zero probability a position.

    ids:   int [R, gamma, m]; distinct inside a position among entries with probs > 0.
    probs: float [R, gamma, m]; sums to 1 over m: the tokens were drawn from *this* law.
    """

    ids: Any
    probs: Any

    def __post_init__(self) -> None:
        if len(self.ids.shape) != 3 or tuple(self.ids.shape) != tuple(self.probs.shape):
            raise ShapeError(
                "SparseQ wants ids and probs of one shape [R, gamma, m], got "
                f"{tuple(self.ids.shape)} and {tuple(self.probs.shape)}"
            )
        _check_precision(self.probs)


@dataclass(frozen=True, slots=True)
class Proposal:
    """Drafts of one round for R requests.

    tokens:  int [R, gamma]; entries at and beyond `lengths[r]` are ignored.
    lengths: int [R]; drafts available, 0..gamma.
    q:       float32 or float64 [R, gamma, V'] (numpy or torch), the distribution each token was
             drawn from after the draft's own temperature, truncation and masks; or `SparseQ`; or
             None for a point mass (the tokens are a function of the prefix). V' may differ from
             the target's vocabulary (padding): ids beyond the target's are always rejected.
    conf:    float [R, gamma] or None; chance that draft k survives given that 1..k-1 did. It may
             depend on drafts before k, never on draft k itself.
    deterministic: the tokens are a function of the committed prefix alone (greedy or n-gram
             drafts). Implied by, and equivalent to, `q is None`.

    torch tensors are taken too; everything but q, which stays where it is, is kept as numpy.
    """

    tokens: npt.NDArray[np.integer[Any]]
    lengths: npt.NDArray[np.integer[Any]]
    q: Any | SparseQ | None = None
    conf: npt.NDArray[np.floating[Any]] | None = None
    deterministic: bool = False

    def __post_init__(self) -> None:
        for name in ("tokens", "lengths", "conf"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, to_host(getattr(self, name)))
        if self.tokens.ndim != 2 or self.lengths.shape != self.tokens.shape[:1]:
            raise ShapeError(
                "Proposal wants tokens [R, gamma] and lengths [R], got "
                f"{self.tokens.shape} and {self.lengths.shape}"
            )
        gamma = self.tokens.shape[1]
        if self.lengths.size and (self.lengths.min() < 0 or self.lengths.max() > gamma):
            raise ShapeError(
                f"Proposal wants lengths in 0..{gamma}, got {self.lengths.min()}.."
                f"{self.lengths.max()}"
            )
        q_shape = None if self.q is None else _leading(self.q)
        if self.q is not None and not isinstance(self.q, SparseQ):
            _check_precision(self.q)
        if q_shape is not None and q_shape != self.tokens.shape:
            raise ShapeError(
                f"Proposal wants q to start with [R, gamma] = {self.tokens.shape}, got {q_shape}"
            )
        if self.conf is not None and self.conf.shape != self.tokens.shape:
            raise ShapeError(
                f"Proposal wants conf of shape {self.tokens.shape}, got {self.conf.shape}"
            )
        if self.q is None:
            object.__setattr__(self, "deterministic", True)
        elif self.deterministic:
            raise ShapeError(
                "Proposal.deterministic=True means the tokens are a function of the prefix: their "
                "law is a point mass, so pass q=None"
            )

    @property
    def requests(self) -> int:
        return int(self.tokens.shape[0])

    @property
    def gamma(self) -> int:
        return int(self.tokens.shape[1])

    @classmethod
    def empty(cls, requests: int, gamma: int = 0) -> Proposal:
        """No drafts: verification of it is plain sampling, one token a request."""
        return cls(
            tokens=np.zeros((requests, gamma), dtype=np.int32),
            lengths=np.zeros(requests, dtype=np.int32),
        )


def _check_precision(q: Any) -> None:
    if str(q.dtype).removeprefix("torch.") not in ("float32", "float64"):
        raise ShapeError(
            f"q wants float32 or float64, got {q.dtype}: rounded to less it is no longer the "
            "distribution that the drafts were drawn from"
        )


def _leading(q: Any) -> tuple[int, int]:
    shape = tuple(q.ids.shape) if isinstance(q, SparseQ) else tuple(q.shape)
    if len(shape) != 3:
        raise ShapeError(f"Proposal wants q of three axes [R, gamma, V], got shape {shape}")
    return int(shape[0]), int(shape[1])
