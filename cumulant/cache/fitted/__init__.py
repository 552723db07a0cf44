"""Compressors that fit entries to a law of the queries that will come: parts that can be combined.

query_law.py   which queries will come: those of the prefix, turned on to later positions; those of a repetition
readings.py    what such queries read of a head: log-normalizers, outputs, attention
"""
