"""Certificates of a federation: who signs them, and what is wrong with one."""
