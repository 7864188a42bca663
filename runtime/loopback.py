"""What messages in one process, and captures by their run, need of Flower."""

from __future__ import annotations

from bract.installed.flower import place
from bract.runtime.rule import BRACT, Rule

RULE = Rule(
    name="messages in one process",
    kind="reliability",
    commands=(BRACT, "flwr-serverapp"),
    needs=(place("TaskIdentity"),),
    does="`LoopbackGrid` makes messages in one process, and captures are kept by their run.",
    without="Captures of several runs of an app share a folder, unless the grid names the run.",
)
