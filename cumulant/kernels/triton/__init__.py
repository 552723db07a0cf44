"""Sums of exponentials in Triton, for CUDA devices: the same statistics and gradients, compiled where they run.

library.py      whether Triton serves a device; nothing here imports Triton before it does
direct.py       `moments` on tensors as they lie, by the plans of the native kernel; flat.py: on flattened inputs
launch.py       sizes of tiles, grids, calls; arguments.py: what a kernel is given
tiles.py        what all passes share: addresses, visibility, products, the sweep over keys
forward.py      every statistic of a tile of queries; few_rows.py: merges them where programs share the keys
backward.py     gradients, by a pass over queries and one over keys
interpreter.py  all of it on the CPU in NumPy, for tests

Speed on a GPU has not been measured.
"""
