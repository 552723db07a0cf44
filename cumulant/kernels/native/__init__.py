"""Sums of exponentials in C++: one shared library for each instruction set, compiled when cumulant is installed.

targets.py    instruction sets, what this processor has of them, the compiler and its flags; setup.py uses it too
library.py    finds, checks and loads the library for this processor, or says why there is none
arguments.py  what a call of the kernel is given, as ctypes structures; call.py: its entry points

Nothing here is loaded until it is asked for; without a library the kernels in torch serve.
"""
