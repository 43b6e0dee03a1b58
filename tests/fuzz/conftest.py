"""How long to fuzz: briefly in `make test`, for long in `make fuzz`."""

import os

LONG = os.environ.get("FUZZ") == "long"

collect_ignore = [] if LONG else ["test_linters.py"]  # npx downloads those linters
