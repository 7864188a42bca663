"""Adaptive attackers of the defenses beside this folder, alone and in chains."""
