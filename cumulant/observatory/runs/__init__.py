"""Observing a model: over texts, over shards of a corpus, on Ray, over a training, with heads replaced, with nulls."""
