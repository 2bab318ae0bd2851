// Everything that is spelled differently on different hardware. All inline PTX of the project lives in the three files
// below, which others include by way of this one, so that a CPU build replaces it alone
// (tests/kernels/cpu/platform.cuh). No CUDA header is included: NVRTC then compiles a kernel in under 0.1 s.
#pragma once
#include "rows/memory.cuh"
#include "rows/numbers.cuh"
#include "rows/threads.cuh"
