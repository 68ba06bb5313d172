// moe: routing, permutation of tokens, grouped matmuls and router losses.
#include "common.cuh"

#include "capacity.cuh"
#include "expert_counts.cuh"
#include "grouped.cuh"
#include "grouped_mma.cuh"
#include "permute.cuh"
#include "router.cuh"
#include "router_loss.cuh"
#include "router_noise.cuh"
#include "sinkhorn.cuh"
#include "sort.cuh"
#include "swiglu.cuh"
