"""What the kernels cost, as ratios to what else does the same work; `cumulant bench` runs it.

measure    time and memory of functions in this process
case       what a row of a table is: inputs, methods, targets
inputs, implementations    what is run, and on what
cases      every row; attention_cases: those of the kernels; bounds: what they are to reach on this processor
device_cases, device_accuracy   rows and errors of the kernels on a GPU, for examples/on_gpu.py
worker     one case in a fresh process
run        all of them, one process after another
results, report      the figures as JSON and as Markdown
command    the command line
cache_cost a decoding step with a compressed cache; a command of its own
"""
