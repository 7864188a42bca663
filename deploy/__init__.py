"""Run Flower's processes under bract's rules: what they listen on, and which app a site runs."""
