"""The documents that callers and consumers build on, made from the types of the code."""
