"""The controllers: what each endpoint takes, does and answers."""
