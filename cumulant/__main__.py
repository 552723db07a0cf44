"""`python -m cumulant` is `cumulant`."""

from cumulant.cli import main

main()
