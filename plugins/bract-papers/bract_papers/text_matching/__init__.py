"""Texts by gradient matching over embeddings: TAG, SIM and LAMP."""
