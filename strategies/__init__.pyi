from bract.strategies.encrypted.own_app import Encrypted as Encrypted
from bract.strategies.fedavg import FedAvg as FedAvg
from bract.strategies.fedavg import RoundOutcome as RoundOutcome
from bract.strategies.fedboosting import FedBoosting as FedBoosting
from bract.strategies.fedprox import FedProx as FedProx
from bract.strategies.registry import STRATEGIES as STRATEGIES
