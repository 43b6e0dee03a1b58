"""The documents that callers and consumers build on, generated from the types in the code."""
