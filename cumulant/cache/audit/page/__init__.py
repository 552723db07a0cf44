"""The page of an audit: one HTML file, from the record alone."""
