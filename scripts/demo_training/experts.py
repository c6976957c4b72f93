"""Experts of a LatentMoE on many rows: each expert gets its rows side by side, in a place of a fixed size, so that no shape depends on the
routing and nothing waits for the device. Rows beyond an expert's room are left out and counted.

Both moves are gathers, also backwards, by two tables that invert each other: no sums in an order that differs from run to run.
"""
import torch


class Places:
    """Where the rows of every choice stand.

    Attributes:
        of_choice: int64 [n, k] in the experts' places [experts x room], one behind the last for a choice that has none.
        row_of: int64 [experts x room] rows, n for an empty place. load: float32 [experts], rows that chose each.
    """

    def __init__(self, ids: torch.Tensor, real: torch.Tensor, num_experts: int, room: int):
        n, k = ids.shape
        flat = ids.masked_fill(~real[:, None], num_experts).reshape(-1)     # rows of padding choose nobody
        chosen, order = flat.sort(stable=True)
        every = torch.arange(num_experts + 1, device=ids.device)
        first = torch.searchsorted(chosen, every)
        self.load = (first[1:] - first[:-1]).float()
        place = torch.arange(n * k, device=ids.device) - first[chosen]
        none = num_experts * room
        place = (chosen * room + place).masked_fill((place >= room) | (chosen >= num_experts), none)
        self.of_choice = torch.empty_like(place).scatter_(0, order, place).view(n, k)
        self.row_of = torch.full((none + 1,), n, device=ids.device).scatter_(0, place, order // k)[:-1]
        self.left_out = self.load.sum() - (self.row_of < n).sum()


class Spread(torch.autograd.Function):
    """x [n, z] -> [experts x room, z], zeros in empty places."""

    @staticmethod
    def forward(ctx, x, of_choice, row_of):
        ctx.save_for_backward(of_choice)
        return _padded(x)[row_of]

    @staticmethod
    def backward(ctx, grad):
        (of_choice,) = ctx.saved_tensors
        return _padded(grad)[of_choice].sum(1), None, None


class Collect(torch.autograd.Function):
    """y [experts x room, z] -> [n, k, z], zeros for choices without a place."""

    @staticmethod
    def forward(ctx, y, of_choice, row_of):
        ctx.save_for_backward(of_choice, row_of)
        return _padded(y)[of_choice]

    @staticmethod
    def backward(ctx, grad):
        of_choice, row_of = ctx.saved_tensors
        n, k, z = grad.shape
        # The choice that each place belongs to; the last entry takes those without one.
        choice_of = torch.full((len(row_of) + 1,), n * k, device=grad.device).scatter_(0, of_choice.reshape(-1), torch.arange(n * k, device=grad.device))
        return _padded(grad.reshape(n * k, z))[choice_of[:-1].masked_fill(row_of >= n, n * k)], None, None


def _padded(x: torch.Tensor) -> torch.Tensor:
    return torch.cat([x, x.new_zeros(1, x.shape[1])])
