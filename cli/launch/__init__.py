"""Start a federation as processes on this machine."""
