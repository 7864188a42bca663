"""Several rounds that each took part of one client's images."""
