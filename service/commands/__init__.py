"""The subcommands of `python -m service`."""
