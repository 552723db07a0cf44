"""`Backtest`: entries fitted to a law of the queries that will come, with budgets by evidence. Parts can be exchanged.

query_law.py   queries that the model had, as if they were asked after the prefix, with what they read beside it
growing_law.py the same where a text grows: which queries are kept, and those that stand for the ones to come
law.py         which of them stand for those to come: recent ones, some of all, those of a repetition
readings.py    what they read of a head: log-normalizers, outputs, attention
atoms.py       atoms for many tokens: tangents of G, or tokens themselves
mass.py        their log-mass
nonnegative.py log-mass by non-negative least squares
pursuit.py     atoms by orthogonal matching pursuit
reference.py   entries as Attention Matching fits them
values.py      values, by least squares to what the law read
recipe.py      the parts together: entries of key heads
backtest.py    errors that entries would have had at earlier cuts
budgets.py     entries of every head by these errors
compressor.py  `Backtest`
named.py       methods by name
"""

from cumulant.cache.fitted.backtest import BacktestSettings
from cumulant.cache.fitted.compressor import Backtest, HeadPlan
from cumulant.cache.fitted.law import QueryLaw
from cumulant.cache.fitted.recipe import EntryRecipe

__all__ = ["Backtest", "BacktestSettings", "EntryRecipe", "HeadPlan", "QueryLaw"]
