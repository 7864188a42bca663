"""The problem under attack: evidence, the client's computation, and the matching problem."""
