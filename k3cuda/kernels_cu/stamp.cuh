// When a stream came to a place: nanoseconds of the device's clock, one behind the other; *count is how many there are.
#pragma once
#include "prims.cuh"

extern "C" __global__ void stamp(u64* times, u32* count) { times[(*count)++] = device_ns(); }
