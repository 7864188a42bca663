"""Rules for Flower's processes, and the start of processes under them."""
