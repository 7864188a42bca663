"""Write what each image's layer installs: ``/all.txt``, ``/server.txt`` and ``/audit.txt``."""

import tomllib
from pathlib import Path

project = tomllib.loads(Path("/pyproject.toml").read_text())["project"]
layers = {"all": project["dependencies"]} | {
    part: project["optional-dependencies"][part] for part in ("server", "audit")
}
for name, packages in layers.items():
    # What begins with bract itself is the layer below.
    wanted = [package for package in packages if not package.startswith("bract[")]
    Path(f"/{name}.txt").write_text("\n".join(wanted) + "\n")
