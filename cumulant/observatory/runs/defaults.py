"""What `cumulant observe` takes where nothing is said."""

DEFAULT_MODEL = "minilm"
DEFAULT_TEXT = "pydoc_data.topics, Python's own help"
DEFAULT_MAX_TOKENS = 20_000
DEFAULT_STEP_TOKENS = 4000  # at every checkpoint
DEFAULT_CAUSES_TOKENS = 192  # on which heads that stand out are removed
