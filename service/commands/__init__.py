"""The commands of `python -m service`, one file each."""
