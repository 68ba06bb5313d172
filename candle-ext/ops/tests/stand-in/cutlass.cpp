// Checks that every kernel of CUTLASS accepts the options that it is compiled with, and queries its workspace. It needs no GPU.
// scripts/check-cutlass runs it.
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <initializer_list>

// As in gemm.cuh and cutlass.rs.
struct Call {
    uint64_t sizes, addresses[3], strides[3], workspace, stream;
    int n_groups, n_multiprocessors;
    float beta;
    int is_wide;
};

extern "C" int candlewick_cutlass_multiply(const Call*, int right_is_transposed, size_t* workspace_bytes, char* error, size_t);
extern "C" int candlewick_cutlass_grad_w(const Call*, int is_f32, size_t* workspace_bytes, char* error, size_t);

using Kernel = int (*)(const Call*, int, size_t*, char*, size_t);

static int check(const char* name, Kernel kernel, int variant, int is_wide) {
    Call call{};
    call.n_groups = 128;
    call.n_multiprocessors = 132;
    call.is_wide = is_wide;
    size_t bytes = 0;
    char error[512] = "";
    const int status = kernel(&call, variant, &bytes, error, sizeof error);
    // At least a descriptor of 128 bytes for each operand and multiprocessor, and not much more.
    const bool is_right = status == 0 && bytes >= 132 * 3 * 128 && bytes <= 132 * 8 * 128 && bytes % 64 == 0;
    printf("%s %d%s: %zu bytes of workspace %s\n", name, variant, is_wide ? " wide" : "", bytes, error);
    return is_right ? 0 : 1;
}

int main() {
    int failures = 0;
    for (int variant : {0, 1}) {
        for (int is_wide : {0, 1}) failures += check("multiply", candlewick_cutlass_multiply, variant, is_wide);
        failures += check("grad_w", candlewick_cutlass_grad_w, variant, 0);
    }
    return failures;
}
