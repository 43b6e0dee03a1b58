"""The whole journey in a browser: small stand-ins for the other teams, with only what those teams have."""
