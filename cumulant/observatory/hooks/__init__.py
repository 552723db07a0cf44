"""How attention, hidden states and weights of a model are reached; what a hook changes is restored on exit."""
