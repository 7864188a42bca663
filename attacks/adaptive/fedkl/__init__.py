"""Against FedKL: regress the lock; and attackers who hold a part of it, to compare with."""
