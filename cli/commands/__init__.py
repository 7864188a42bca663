"""Commands, a module for each group: each parses its options and calls one function."""
