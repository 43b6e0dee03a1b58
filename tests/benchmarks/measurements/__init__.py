"""The measurements of `make bench`, one a module, each with a `measure(stand)`."""
