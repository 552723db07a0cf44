"""Whether a filter fits what it filters: normalised innovations, their bands, and a verdict with its cause."""
