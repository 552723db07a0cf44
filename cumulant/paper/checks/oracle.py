"""Reference implementations in NumPy and SciPy, which share no code with the library."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from scipy import special
from scipy.special import softmax, xlogy

__all__ = ["attention_mean", "covariance", "differences", "kl", "log_normalizer", "logsumexp", "root", "softmax"]


def logsumexp(z: Any, axis: int | None = None) -> Any:
    """log Σ e^z, by SciPy."""
    return special.logsumexp(np.asarray(z), axis=axis)


def log_normalizer(eta: np.ndarray, x: np.ndarray, w: np.ndarray | float = 0.0) -> float:
    """log Σ exp(⟨η,x_n⟩ + w_n)"""
    return logsumexp(x @ eta + w)


def attention_mean(eta: np.ndarray, x: np.ndarray, w: np.ndarray | float = 0.0) -> np.ndarray:
    """Σ p_n x_n"""
    return softmax(x @ eta + w) @ x


def covariance(eta: np.ndarray, x: np.ndarray, w: np.ndarray | float = 0.0) -> np.ndarray:
    """Σ p_n (x_n − m)(x_n − m)ᵀ"""
    p = softmax(x @ eta + w)
    centred = x - p @ x
    return centred.T @ (p[:, None] * centred)


def differences(f: Callable[[np.ndarray], np.ndarray | float], x: np.ndarray, h: float = 1e-5) -> np.ndarray:
    """The derivative by central differences: shape of f(x), then shape of x."""
    x = np.asarray(x, float)
    out = np.zeros((*np.shape(f(x)), *x.shape))
    for index in np.ndindex(x.shape):
        step = np.zeros_like(x)
        step[index] = h
        out[(..., *index)] = (np.asarray(f(x + step)) - np.asarray(f(x - step))) / (2 * h)
    return out


def kl(p: np.ndarray, q: np.ndarray) -> float:
    """Σ p log(p/q)"""
    return float(np.sum(xlogy(p, p) - xlogy(p, q)))


def root(c: np.ndarray) -> np.ndarray:
    """The symmetric square root."""
    values, vectors = np.linalg.eigh(c)
    return (vectors * np.sqrt(values)) @ vectors.T
