"""`python -m octavo` is `octavo`."""

from octavo.cli import main

main()
