// Backward of few rows in one launch: CTAs that add whole columns up, and CTAs that have a few rows each.
#pragma once
#include "norms/norm_backward.cu"
#include "norms/weight_gradient.cu"
