// Kernels that test the emulator, right and faulty. A GPU would run none of the faulty ones correctly.
#include <common.cuh>
#include <ptx.cuh>

// y [32, 4] = x, in packs of 16 bytes.
KERNEL(32) copy_packs(const float* x, float* y) {
    const int i = threadIdx.x * 4;
    store(y + i, load<4>(x + i));
}

// The same, with a pack that the kernel itself reads.
KERNEL(32) read_pack(const float* x, float* y) {
    const auto pack = *reinterpret_cast<const Pack<float, 4>*>(x + threadIdx.x * 4);  // line of read_pack
    for (int i = 0; i < 4; ++i) y[threadIdx.x * 4 + i] = pack.at[i];
}

// y [32] = each lane's element plus its predecessor's.
template <bool SYNCHRONIZED> __device__ __forceinline__ void add_predecessor(const float* x, float* y) {
    __shared__ float shared[32];
    const int lane = threadIdx.x;
    shared[lane] = x[lane];
    if (SYNCHRONIZED) __syncwarp();
    y[lane] = x[lane] + (lane > 0 ? shared[lane - 1] : 0.0f);
}

KERNEL(32) predecessor(const float* x, float* y) { add_predecessor<true>(x, y); }

// In the order of the lanes, each predecessor has written its element.
KERNEL(32) predecessor_without_wait(const float* x, float* y) { add_predecessor<false>(x, y); }

// y [32] = the elements of x, moved by one lane twice.
template <bool SYNCHRONIZED> __device__ __forceinline__ void move_twice(const float* x, float* y) {
    __shared__ float shared[32];
    const int lane = threadIdx.x;
    float own = x[lane];
    for (int step = 0; step < 2; ++step) {
        shared[lane] = own;
        __syncwarp();
        own = shared[(lane + 31) % 32];
        if (SYNCHRONIZED) __syncwarp();
    }
    y[lane] = own;
}

KERNEL(32) moved(const float* x, float* y) { move_twice<true>(x, y); }

// A lane overwrites its element while its successor has not read the former one.
KERNEL(32) moved_without_second_wait(const float* x, float* y) { move_twice<false>(x, y); }

// y [2] = x, and block 1 reads the output of block 0.
KERNEL(32) previous_block(const float* x, float* y) {
    if (threadIdx.x > 0) return;
    y[blockIdx.x] = x[blockIdx.x] + (blockIdx.x > 0 ? y[blockIdx.x - 1] : 0.0f);
}

// A warp-wide instruction of half a warp.
KERNEL(32) half_warp(const float* x, float* y) {
    float sums[4] = {x[0], 0.0f, 0.0f, 0.0f};
    const unsigned operand[4] = {};
    if (threadIdx.x < 16) multiply_add<__half>(sums[0], sums[1], sums[2], sums[3], operand, 0, 0);
    y[threadIdx.x] = sums[0];
}

// Lane 0 waits for its warp, the others for the block.
KERNEL(32) uneven_waits(const float* x, float* y) {
    __syncthreads();
    if (threadIdx.x == 0) __syncwarp();
    else __syncthreads();
    y[threadIdx.x] = x[threadIdx.x];
}
