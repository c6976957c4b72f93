"""`python -m k3cuda` is the command `k3cuda`."""
from .cli import main

main()
