"""One file for each group of routes; each has a `router`, which `app.py` takes in."""
