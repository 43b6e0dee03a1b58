"""What speaks HTTP with callers."""
