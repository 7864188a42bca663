"""Extensions of bract, one file each; nothing is imported before it is asked for."""
