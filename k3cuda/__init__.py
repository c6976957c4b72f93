"""Kimi K3 decode on NVIDIA GPUs without torch; a NumPy reference everywhere else."""

__version__ = "0.1.0"
