"""Connections and topology. Relay and consumers publish and read; commands open connections of their own."""
