"""Do jobs in this process, in processes of this machine, or on the machines of a Ray cluster."""

from bract.pool.jobs import Here, Lost, Note, Pool, cores
from bract.pool.processes import Processes
from bract.pool.ray import Ray

__all__ = ["Here", "Lost", "Note", "Pool", "Processes", "Ray", "cores"]
