"""Sums of exponentials in C++: one shared library for each instruction set, compiled when cumulant is installed.

targets.py    instruction sets, what this processor has of them, the compiler and its flags; setup.py uses it too
library.py    finds, checks and loads the library for this processor, or says why there is none
arguments.py  what a call of the kernel is given, as ctypes structures; call.py: its entry points
geometry.py   batch axes and strides of tensors as they lie
direct.py     `moments` on tensors as they lie; masses.py: with masses by distance, marked keys, ragged heads
flat.py       the same on flattened inputs, with Fisher products
normals.py    normal laws of many sequences, for filters: normalised, collapsed, conditioned on observations

Nothing here is loaded until it is asked for; without a library the kernels in torch serve.
"""
