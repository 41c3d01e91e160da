"""The `octavo` command. Importing it, and `--help`, stay clear of torch."""

from octavo.cli.commands import app, main

__all__ = ["app", "main"]
