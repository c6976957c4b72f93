"""Gradients as CUDA graphs: a step is some 12,500 small kernels, which then no host has to launch; docs/demo.md says how little that gave."""
import torch


class Captured:
    """Calls of `gradients(batches)`, batches a list of tuples of numpy arrays, captured once for each set of their shapes and replayed from then on.

    Args:
        gradients: takes the same as tensors on the device, leaves gradients in `parameters` and returns tensors, all by kernels that no value
            decides, without waiting for the device.
        parameters: have no gradient before a call. After it they have those of the call, in memory that the next call writes again, as it does what
            a call returns.
    """

    def __init__(self, gradients, parameters):
        self.gradients, self.parameters, self.captures, self.pool = gradients, [p for p in parameters if p.requires_grad], {}, None

    def __call__(self, batches):
        shapes = tuple(array.shape for arrays in batches for array in arrays)
        if shapes not in self.captures:
            self.captures[shapes] = self._capture(batches)
        graph, inputs, grads, found = self.captures[shapes]
        for places, arrays in zip(inputs, batches):
            for place, array in zip(places, arrays):
                place.copy_(torch.from_numpy(array).pin_memory(), non_blocking=True)
        graph.replay()
        for p, grad in zip(self.parameters, grads):
            p.grad = grad
        return found

    def _capture(self, batches):
        inputs = [tuple(torch.from_numpy(array).cuda() for array in arrays) for arrays in batches]
        aside = torch.cuda.Stream()   # what a first call sets up must not be part of a graph, nor belong to the stream that others use
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            self.gradients(inputs)
            self._clear()
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool):   # one pool for all: no two replays overlap, and what a replay leaves stays allocated
            found = self.gradients(inputs)
        self.pool = self.pool or graph.pool()
        grads = [p.grad for p in self.parameters]
        self._clear()
        return graph, inputs, grads, found

    def _clear(self):
        for p in self.parameters:
            p.grad = None
