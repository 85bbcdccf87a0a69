"""Jobs that are run as modules, `python -m pkg.NAME`."""
