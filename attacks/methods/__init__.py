"""The attacks: a file or a folder each. Importing this registers those of every module."""

import importlib
import pkgutil

for _module in pkgutil.walk_packages(__path__, f"{__name__}."):
    importlib.import_module(_module.name)
