"""Experiments on the dynamics of attention, each a question with an answer that can be run again (THEORY §16)."""

from cumulant.paper.experiments import closure, condensation, expansion, gaussian, normalisers, open_question  # noqa: F401
from cumulant.paper.experiments.experiment import EXPERIMENTS, Expectation, Experiment, Result, Setting, find

__all__ = ["EXPERIMENTS", "Expectation", "Experiment", "Result", "Setting", "find"]
