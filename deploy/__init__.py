"""Run Flower's processes under bract's rules: their sockets, and the one app of a site."""
