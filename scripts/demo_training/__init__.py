"""Trains the demo model and its drafts: `scripts/train_demo.py`. The only part of this repository that needs PyTorch, with scripts/compare_torch.py.

data -> model -> optimizer -> export, one way. Tasks and their held-out sets are k3cuda/runtime/demo_tasks.py.
"""
