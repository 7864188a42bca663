"""What a party keeps on its disk: records that are its own, each changed under a lock."""

from bract.disk.private import locked, read_private
from bract.disk.record import LockedRecord, Memory, parse_record

__all__ = ["LockedRecord", "Memory", "locked", "parse_record", "read_private"]
