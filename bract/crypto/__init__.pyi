from bract.crypto.randomness import SecretStream as SecretStream
from bract.crypto.x25519 import key_problem as key_problem
