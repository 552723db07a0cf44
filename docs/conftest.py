"""What `make docs` writes and reads here is no test."""

collect_ignore = ["conf.py", "picture.py"]
collect_ignore_glob = ["gallery/*", "_build/*", "generate/__main__.py"]
