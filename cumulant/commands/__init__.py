"""The options of every command, and their help, in modules that import nothing heavy.

`cumulant --help`, `cumulant COMMAND --help` and shell completion read these alone; torch is imported when a command
runs. What a command does is beside what it runs: `observatory/command.py`, `filters/tracking/command.py`, …
"""
