"""Text from files, directories and URIs: documents, shards of a corpus, windows of tokens."""
