"""Everything that happens after a request is stored: relay, notifications, calculations."""
