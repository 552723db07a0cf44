"""What writes the pages that are generated: `python -m docs.generate` all but docs/models.md, which takes minutes.

Each module has `pages`, a function without arguments: file name under docs/ → text. The texts are committed, and
tests/test_reference.py compares them.
"""
