"""The papers' tables and figures: declared, run at three sizes, held against what was published."""
