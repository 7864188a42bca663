"""The client: local training, defenses, and what it agrees to send."""
