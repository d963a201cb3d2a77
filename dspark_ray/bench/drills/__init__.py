"""Fault drills on a running deployment: steady traffic, one fault, and what it cost. See ``__main__``."""
