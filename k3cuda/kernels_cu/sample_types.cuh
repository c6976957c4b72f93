// What the sampler is told about a row and where it answers; its random numbers and its division.
#pragma once
#include "prims.cuh"

constexpr int kSampleNode = 1024, kSampleTop = 20;       // ids of a subtree; log-probabilities reported at most
constexpr float kLargestFloat = 3.402823466e38f;

struct SampleRow {
  int active;                       // 0: nothing of this row is read or written
  int greedy;
  float temperature, top_p, min_p;  // above 0; at least 1 is off; 0 is off
  int top_k;                        // 0 is off
  u32 seed_low, seed_high;
  u32 position, stream;             // of the token to be drawn
  int logprobs;                     // most likely tokens to report, -1 for no log-probabilities at all
  int penalty_begin, penalty_count; // entries of this row
  float repetition, frequency, presence;
  int slot;                         // its entry of slot_tokens is set to the token drawn; -1: none is
  int after_sampled;                // the penalties also count the token that is that entry before
};

struct SamplePenalty {              // by rising id, each id once
  int id;
  int count;                        // in the answer; 0 where only the prompt has it
};

struct SampleArgs {
  const float* logits;              // [rows][vocab]
  const SampleRow* rows;
  const SamplePenalty* penalties;
  int* slot_tokens;                 // [slots], the token last drawn for each
  u64* ended;                       // [rows], when the row was done: nanoseconds of the device's clock
  int* token;                       // [rows]; -1 where a logit is not finite
  float* logprob;                   // [rows]; written where asked for
  int* top_ids;                     // [rows][kSampleTop]
  float* top_logprobs;
};

// Ten rounds of Philox4x32 (Salmon, Moraes, Dror and Shaw, SC 2011); the first word of four.
K3_DEVICE u32 philox(u32 c0, u32 c1, u32 c2, u32 c3, u32 k0, u32 k1) {
  for (int i = 0; i < 10; ++i) {
    u64 first = u64(c0) * 0xD2511F53u, second = u64(c2) * 0xCD9E8D57u;
    c0 = u32(second >> 32) ^ c1 ^ k0;
    c2 = u32(first >> 32) ^ c3 ^ k1;
    c1 = u32(second);
    c3 = u32(first);
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return c0;
}

// a / b rounded to nearest, inverse = 1 / b: two corrections (Markstein), without the registers of the general division. Where they could
// overflow or underflow they are left out: e to such a quotient is 0 or 1 whatever its last bit.
K3_DEVICE float divide(float a, float b, float inverse) {
  float q = a * inverse;
  if (fabsf(q) > 0x1p-100f && fabsf(q) < 0x1p100f) {
    q = fmaf(fmaf(-q, b, a), inverse, q);
    q = fmaf(fmaf(-q, b, a), inverse, q);
  }
  return q;
}
