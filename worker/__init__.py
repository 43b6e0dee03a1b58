"""Everything that happens after a request is stored."""
