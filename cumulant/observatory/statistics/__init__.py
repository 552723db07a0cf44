"""What is computed of an attention call or of hidden states, and the mergeable tallies that hold it."""
