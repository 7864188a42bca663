"""Who was in it: whether records can be recognised as trained on."""
