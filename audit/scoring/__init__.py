"""Score reconstructions."""
