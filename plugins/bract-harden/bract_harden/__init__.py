"""Search a federation's settings for what leaks least at a bearable price: ``bract harden``."""
