// grad_scaler: one warp decides about a step's gradients, by the rules of `decide` in mod.rs.
#include "common.cuh"
#include "grad_scaler.cuh"

struct Policy {
    int halts, window, hysteresis;
    double max_norm, min_scale, max_scale;
};

__device__ __forceinline__ void decide(
        float* state, double norm, bool is_loss_finite, bool is_spike, const Policy& policy) {
    const double scale = state[LOSS_SCALE];
    state[NORM] = static_cast<float>(norm);
    if (isfinite(norm) && is_loss_finite && is_spike) {
        state[OUTCOME] = LOSS_SPIKE;
    } else if (isfinite(norm) && is_loss_finite) {
        const double clip = fmin(policy.max_norm / (norm + 1e-6), 1.0);
        state[OUTCOME] = APPLIED;
        state[FACTOR] = static_cast<float>(clip / scale);
        state[N_UPDATES] += 1.0f;
        state[GOOD_STEPS] += 1.0f;
        if (policy.window > 0 && state[GOOD_STEPS] >= policy.window) {
            state[LOSS_SCALE] = static_cast<float>(fmin(scale * 2.0, policy.max_scale));
            state[GOOD_STEPS] = 0.0f;
            state[HYSTERESIS_LEFT] = policy.hysteresis;
        }
    } else if (is_loss_finite && policy.window > 0 && scale > policy.min_scale) {
        state[OUTCOME] = OVERFLOWED;
        state[GOOD_STEPS] = 0.0f;
        if (state[HYSTERESIS_LEFT] > 1.0f) state[HYSTERESIS_LEFT] -= 1.0f;
        else state[LOSS_SCALE] = static_cast<float>(fmax(scale / 2.0, policy.min_scale));
    } else {
        state[OUTCOME] = NON_FINITE;
    }
}

KERNEL(32) update_scaler(float* state, const double* squares, const float* losses, int n_squares, int n_losses, int n_limited,
        int halts, int window, int hysteresis, double max_norm, double min_scale, double max_scale, double max_loss) {
    double sum = 0.0;
    double loss = 0.0;
    int n_bad = 0;
    for (int i = threadIdx.x; i < n_squares; i += 32) sum += squares[i];
    for (int i = threadIdx.x; i < n_losses; i += 32) n_bad += isfinite(losses[i]) ? 0 : 1;
    for (int i = threadIdx.x; i < n_limited; i += 32) loss += losses[i];
#pragma unroll
    for (int offset = 16; offset > 0; offset >>= 1) {
        sum += __shfl_xor_sync(0xffffffffu, sum, offset);
        loss += __shfl_xor_sync(0xffffffffu, loss, offset);
        n_bad += __shfl_xor_sync(0xffffffffu, n_bad, offset);
    }
    if (threadIdx.x != 0) return;
    if (halts && (state[OUTCOME] == NON_FINITE || state[OUTCOME] == HALTED)) {
        state[OUTCOME] = HALTED;
        return;
    }
    const Policy policy = {halts, window, hysteresis, max_norm, min_scale, max_scale};
    decide(state, sqrt(sum) / state[LOSS_SCALE], n_bad == 0, loss > max_loss, policy);
}
