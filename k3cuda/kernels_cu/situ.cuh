// The gated activation of every feed-forward part.
#pragma once
#include "exchange.cuh"

// [b tanh(g / b) sigmoid(g)] [c tanh(u / c)], b = beta, c = linear_beta: the sigmoid takes the raw gate.
K3_DEVICE float situ(float gate, float up, float beta, float linear_beta) {
  return beta * tanhf(gate / beta) * sigmoid(gate) * (linear_beta * tanhf(up / linear_beta));
}
