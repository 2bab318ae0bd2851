"""The commands of `python -m cunorm`, a file each: `add_parser` declares the arguments, `run` gives the exit status."""
