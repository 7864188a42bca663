"""Client-side defenses, one file each."""
