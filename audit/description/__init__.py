"""What captures say of an app that nobody described, and whether a description fits them."""
