"""Against AdaDefense."""
