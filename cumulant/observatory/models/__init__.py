"""Models to observe: loaded from a package, a directory, a GGUF file or a repository of the hub."""
