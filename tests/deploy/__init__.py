"""Tests of what runs the service on one machine."""
