"""How much at most: epsilon, measured by canaries, beside the account's."""
