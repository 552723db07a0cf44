"""The executable paper: its statements and the checks they rest on, its experiments, its reference trainings.

statements    the statements of the paper and its drafts, one record each
checks        numerical comparisons of the library with oracles that share no code with it
verify        `cumulant verify`: runs checks, reports statements
output        directories, tables, figures and records that experiments and trainings write
experiments   `cumulant experiment`: questions on the dynamics of attention
trainings     `cumulant train`: blocks of this library trained on small tasks
"""
