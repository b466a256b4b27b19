"""The sampling stages once more, in float64 numpy and as plainly as their papers state them."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

Row = NDArray[np.float64]


def softmax(logits: Row) -> Row:
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


def only(logits: Row, kept: NDArray[np.int64]) -> Row:
    result = np.full_like(logits, -np.inf)
    result[kept] = logits[kept]
    return result


def by_rank(rank: Row) -> NDArray[np.int64]:
    """Highest first, ties by lowest id."""
    return np.argsort(-rank, kind="stable")


def until(rank: Row, probabilities: Row, p: float) -> NDArray[np.int64]:
    """The first tokens by rank whose probabilities sum to at least p; at least one."""
    order, total, kept = by_rank(rank), 0.0, 0
    for token in order:
        if kept and total >= p - 1e-12:
            break
        total, kept = total + probabilities[token], kept + 1
    return order[:kept]


def top_k(logits: Row, k: int) -> Row:
    return only(logits, by_rank(logits)[:k]) if 0 < k < logits.size else logits


def top_p(logits: Row, p: float) -> Row:
    return logits if p >= 1.0 else only(logits, until(logits, softmax(logits), p))


def min_p(logits: Row, p: float) -> Row:
    shares = softmax(logits)
    return logits if p == 0.0 else only(logits, np.flatnonzero(shares >= p * shares.max() * (1 - 1e-7)))


def typical_p(logits: Row, p: float) -> Row:
    if p >= 1.0:
        return logits
    shares = softmax(logits)
    surprise = np.full_like(shares, np.inf)
    surprise[shares > 0] = -np.log(shares[shares > 0])
    entropy = float((shares[shares > 0] * surprise[shares > 0]).sum())
    return only(logits, until(-np.abs(surprise - entropy), shares, p))


def temperature(logits: Row, t: float) -> Row:
    return logits / t


def penalties(logits: Row, prompt: list[int], made: list[int], r: float, frequency: float, presence: float) -> Row:
    result = logits.copy()
    for token in set(prompt + made):
        result[token] = result[token] / r if result[token] > 0 else result[token] * r
    for token in set(made):
        result[token] -= frequency * made.count(token) + presence
    return result


def logit_bias(logits: Row, bias: Mapping[int, float]) -> Row:
    result = logits.copy()
    for token, value in bias.items():
        result[token] = -np.inf if value == -100 else result[token] + value
    forced = np.array([token for token, value in bias.items() if value == 100], dtype=np.int64)
    return only(result, forced) if forced.size else result


class Mirostat:
    """Version 2, as in the authors' repository."""

    def __init__(self, tau: float, eta: float) -> None:
        self.mu, self.tau, self.eta = 2 * tau, tau, eta

    def cut(self, logits: Row) -> Row:
        shares = softmax(logits)
        kept = [token for token in range(shares.size) if shares[token] > 0 and -np.log2(shares[token]) <= self.mu]
        return only(logits, np.array(kept or [int(logits.argmax())]))

    def learn(self, cut: Row, token: int) -> None:
        self.mu -= self.eta * (-np.log2(softmax(cut)[token]) - self.tau)
