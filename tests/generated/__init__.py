"""Generated inputs: properties over cases that nobody chose, each against an oracle that shares no code with it.

A case is a frozen dataclass of plain numbers and strings; tensors, models and files are built from it by seed. So a
failing case prints as the code that builds it, and `make fuzz` writes it down as a test (see `fuzz`).
"""
