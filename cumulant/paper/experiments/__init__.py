"""Experiments on the dynamics of attention: each runs, judges its expectations and draws its figures."""

from cumulant.paper.experiments import closure, condensation, expansion, gaussian, normalisers, open_question  # noqa: F401
from cumulant.paper.experiments.experiment import EXPERIMENTS, Expectation, Experiment, Result, Setting, find

__all__ = ["EXPERIMENTS", "Expectation", "Experiment", "Result", "Setting", "find"]
