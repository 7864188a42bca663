"""Against FedKL: regress the lock; attackers with a part of the secrets, for comparison."""
