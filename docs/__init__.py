"""Pages and what writes the generated ones among them."""
