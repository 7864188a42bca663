"""Masked sums: secure aggregation by pairwise masks (Bonawitz et al. 2017, Bell et al. 2020).

Client ``i`` sends ``w_i x_i + k_i + sum_{j > i} m_ij - sum_{j < i} m_ij`` modulo ``2^b``: its
quantised update ``x_i`` times its integer weight ``w_i``, a mask of its own ``k_i``, and one
``m_ij`` for each neighbour, which cancels in the sum. Shares of the seeds let ``t`` clients remove
what does not cancel: ``k_i`` of who answered, ``m_ij`` of who did not. The server learns the sum
of who answered and, of no client, both seeds.
"""
