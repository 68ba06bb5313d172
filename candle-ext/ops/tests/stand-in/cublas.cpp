// A fake of cuBLASLt and cublasGemmEx for machines without a GPU, on top of comm's fake CUDA driver. It computes in f64,
// returns the errors that a test sets, and counts its calls. A GEMM fills its workspace, and aborts if another one changes it
// meanwhile.
#include "machine.h"
#include "numbers.h"

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>

namespace {

using Status = int;
constexpr Status SUCCESS = 0, INVALID_VALUE = 7, NOT_SUPPORTED = 15;
constexpr uint64_t MAGIC = 0x43616e646c657769;

// As in cudaDataType.
constexpr int IN_F32 = 0, IN_F16 = 2, IN_BF16 = 14, IN_E4M3 = 28, IN_E5M2 = 29;

// As in cublasLtMatmulMatrixScale_t.
constexpr int SCALE_TENSOR = 0, SCALE_VEC128 = 4, SCALE_BLK128X128 = 5;

bool is_fp8(int data) { return data == IN_E4M3 || data == IN_E5M2; }

struct Layout {
    int data;
    uint64_t rows, columns;
    int64_t stride;
    // Of a grouped layout: arrays on the device.
    int n_groups = 0;
    const int *all_rows = nullptr, *all_columns = nullptr, *all_strides = nullptr;

    // Layout of a group's matrix.
    Layout of(int group) const {
        return {data, uint64_t(all_rows[group]), uint64_t(all_columns[group]), all_strides[group]};
    }
};

struct Description {
    int transposed[2] = {0, 0};
    int epilogue = 1;
    int pointer_mode = 0;
    const void *bias = nullptr;
    // Inverse scales of FP8 operands, their modes, and the accumulation.
    const float *scales[2] = {nullptr, nullptr};
    int scale_modes[2] = {SCALE_TENSOR, SCALE_TENSOR};
    int8_t fast_accumulation = 0;
};

struct Preference {
    size_t workspace = 0;
    int64_t averages[3] = {0, 0, 0};
    uint32_t reductions = ~0u, alignments[4] = {256, 256, 256, 256};
};

struct Algorithm {
    uint64_t words[8];
};

struct Heuristic {
    Algorithm algorithm;
    size_t workspace;
    int state;
    float waves;
    int reserved[4];
};

// Value of an FP8 code with this many mantissa bits.
double fp8_value(unsigned char code, int mantissa_bits) {
    int bias = mantissa_bits == 3 ? 7 : 15, exponent = (code & 0x7f) >> mantissa_bits;
    int mantissa = code & ((1 << mantissa_bits) - 1);
    if (exponent == 0) exponent = 1;
    else mantissa += 1 << mantissa_bits;
    double magnitude = std::ldexp(double(mantissa), exponent - bias - mantissa_bits);
    return code & 0x80 ? -magnitude : magnitude;
}

double read(const void *from, int data, size_t i) {
    switch (data) {
        case IN_E4M3: return fp8_value(static_cast<const unsigned char *>(from)[i], 3);
        case IN_E5M2: return fp8_value(static_cast<const unsigned char *>(from)[i], 2);
        case IN_F32: return static_cast<const float *>(from)[i];
        case IN_F16: return float(static_cast<const F16 *>(from)[i]);
        default: return float(static_cast<const Bf16 *>(from)[i]);
    }
}

void write(void *to, int data, size_t i, double value) {
    switch (data) {
        case IN_F32: static_cast<float *>(to)[i] = float(value); break;
        case IN_F16: static_cast<F16 *>(to)[i] = F16(float(value)); break;
        default: static_cast<Bf16 *>(to)[i] = Bf16(float(value));
    }
}

// Inverse scales of an FP8 operand [k, outer], column-major.
struct Scales {
    const float *at = nullptr;
    int mode = SCALE_TENSOR;
    size_t n_outer = 0, n_k = 0;

    double operator()(size_t outer, size_t k) const {
        size_t padded_outer = (n_outer + 3) / 4 * 4, padded_k = ((n_k + 127) / 128 + 3) / 4 * 4;
        if (!at) return 1.0;
        if (mode == SCALE_VEC128) return at[k / 128 * padded_outer + outer];
        if (mode == SCALE_BLK128X128) return at[outer / 128 * padded_k + k / 128];
        return at[0];
    }
};

// A column-major matrix, as a GEMM reads it.
struct Matrix {
    const void *at;
    int data;
    int64_t stride;
    bool is_transposed;
    Scales scales = {};

    double operator()(size_t row, size_t column) const {
        return read(at, data, is_transposed ? row * stride + column : column * stride + row);
    }
};

struct Product {
    size_t rows, columns, depth;
    Matrix a, b;
    double alpha, beta;
    Matrix addend;
    const void *bias;
    void *to;

    void operator()() const {
        for (size_t column = 0; column < columns; column++) {
            for (size_t row = 0; row < rows; row++) {
                double sum = beta == 0.0 ? 0.0 : beta * addend(row, column);
                if (bias) sum += read(bias, addend.data, row);
                for (size_t i = 0; i < depth; i++) {
                    sum += alpha * a(row, i) * a.scales(row, i) * b(i, column) * b.scales(column, i);
                }
                write(to, addend.data, column * addend.stride + row, sum);
            }
        }
    }
};

template <typename Compute> void put_product(machine::Stream *stream, const Compute &product, void *workspace, size_t n_bytes) {
    machine::put(stream, [=] {
        memset(workspace, 0x5A, n_bytes);
        product();
        for (size_t i = 0; i < n_bytes; i++) {
            if (static_cast<unsigned char *>(workspace)[i] != 0x5A) abort();
        }
    });
}

constexpr size_t WORKSPACE = 4096;

}  // namespace

extern "C" {

// Refusals that a test sets. Same layout as in tests.rs.
struct Rules {
    int mask, heuristics, max_alignment, n_algorithms, gemm_ex, fastest, is_old, by_rows;
} stand_in_rules = {};

// Request of the last matmul of FP8 operands: types of a, b and the output, scaling modes, accumulation, epilogue, and
// the addend. As in tests.rs.
struct Fp8Call {
    int types[3], modes[2], fast_accumulation, has_bias, has_addend;
} stand_in_fp8 = {};

// Calls so far, and the last algorithm that computed. As in tests.rs.
struct Calls {
    int heuristics, products, gemm_ex, last, reductions;
} stand_in_calls = {};

size_t cublasLtGetVersion() { return stand_in_rules.is_old ? 130100 : 130400; }
Status cublasLtCreate(void **handle) {
    static int some;
    return *handle = &some, SUCCESS;
}
Status cublasLtDestroy(void *) { return SUCCESS; }

Status cublasLtMatrixLayoutCreate(Layout **layout, int data, uint64_t rows, uint64_t columns, int64_t stride) {
    if (stride < int64_t(rows)) return INVALID_VALUE;
    return *layout = new Layout{data, rows, columns, stride}, SUCCESS;
}
Status cublasLtGroupedMatrixLayoutCreate(Layout **layout, int data, int n_groups, const int *rows, const int *columns,
                                         const int *strides) {
    if (n_groups < 1 || !rows || !columns || !strides) return INVALID_VALUE;
    return *layout = new Layout{data, 0, 0, 0, n_groups, rows, columns, strides}, SUCCESS;
}
Status cublasLtMatrixLayoutDestroy(Layout *layout) { return delete layout, SUCCESS; }

Status cublasLtMatmulDescCreate(Description **description, int compute, int scale) {
    if (compute != 68 || scale != IN_F32) return INVALID_VALUE;
    return *description = new Description, SUCCESS;
}
Status cublasLtMatmulDescDestroy(Description *description) { return delete description, SUCCESS; }
Status cublasLtMatmulDescSetAttribute(Description *description, int attribute, const void *value, size_t size) {
    switch (attribute) {
        case 2:
            if (size != 4) return INVALID_VALUE;
            return memcpy(&description->pointer_mode, value, 4), SUCCESS;
        case 3:
        case 4:
            if (size != 4) return INVALID_VALUE;
            return memcpy(&description->transposed[attribute - 3], value, 4), SUCCESS;
        case 7:
            if (size != 4) return INVALID_VALUE;
            return memcpy(&description->epilogue, value, 4), SUCCESS;
        case 8:
            if (size != 8) return INVALID_VALUE;
            return memcpy(&description->bias, value, 8), SUCCESS;
        case 17:
        case 18:
            if (size != 8) return INVALID_VALUE;
            return memcpy(&description->scales[attribute - 17], value, 8), SUCCESS;
        case 25:
            if (size != 1) return INVALID_VALUE;
            return memcpy(&description->fast_accumulation, value, 1), SUCCESS;
        case 31:
        case 32:
            if (size != 4) return INVALID_VALUE;
            return memcpy(&description->scale_modes[attribute - 31], value, 4), SUCCESS;
        default: return INVALID_VALUE;
    }
}

// True if cuBLASLt multiplies these FP8 operands on Hopper: both along the sum, with aligned sizes.
static bool fits_fp8(const Description *description, const Layout *a, const Layout *b, const Layout *d) {
    bool has_fp8 = is_fp8(a->data) || is_fp8(b->data);
    if (!has_fp8) return a->data == b->data && !description->scales[0] && !description->scales[1];
    const int *modes = description->scale_modes;
    bool is_scaled = description->scales[0] && description->scales[1];
    bool is_along_sum = description->transposed[0] == 1 && description->transposed[1] == 0;
    bool is_aligned = d->rows % 16 == 0 && a->rows % 16 == 0 && a->stride % 16 == 0 && b->stride % 16 == 0;
    bool both_fp8 = is_fp8(a->data) && is_fp8(b->data) && !(a->data == IN_E5M2 && b->data == IN_E5M2);
    bool in_blocks = modes[0] != SCALE_TENSOR || modes[1] != SCALE_TENSOR;
    bool mode_fits = !in_blocks || (modes[0] != SCALE_TENSOR && modes[1] != SCALE_TENSOR &&
                                    !(modes[0] == SCALE_BLK128X128 && modes[1] == SCALE_BLK128X128) &&
                                    !description->fast_accumulation && d->columns % 8 == 0);
    // An f32 output takes a bf16 bias only.
    bool bias_fits = description->epilogue != 4 || d->data == IN_BF16 || d->data == IN_F16;
    return is_scaled && is_along_sum && is_aligned && both_fp8 && mode_fits && bias_fits;
}

Status cublasLtMatmulPreferenceCreate(Preference **preference) { return *preference = new Preference, SUCCESS; }
Status cublasLtMatmulPreferenceDestroy(Preference *preference) { return delete preference, SUCCESS; }
Status cublasLtMatmulPreferenceSetAttribute(Preference *preference, int attribute, const void *value, size_t size) {
    if (attribute == 1 && size == 8) return memcpy(&preference->workspace, value, 8), SUCCESS;
    if (attribute == 3 && size == 4) return memcpy(&preference->reductions, value, 4), SUCCESS;
    if (attribute >= 13 && attribute <= 15 && size == 8) {
        return memcpy(&preference->averages[attribute - 13], value, 8), SUCCESS;
    }
    if (attribute < 5 || attribute > 8 || size != 4) return INVALID_VALUE;
    return memcpy(&preference->alignments[attribute - 5], value, 4), SUCCESS;
}

Status cublasLtMatmulAlgoGetHeuristic(void *, Description *, Layout *of_a, Layout *, Layout *, Layout *of_d,
                                      Preference *preference, int n, Heuristic *results, int *n_found) {
    stand_in_calls.heuristics++;
    stand_in_calls.reductions = preference->reductions;
    *n_found = 0;
    bool is_refused = stand_in_rules.heuristics || (stand_in_rules.mask && preference->reductions == 2);
    for (uint32_t alignment : preference->alignments) {
        if (alignment == 0 || (alignment & (alignment - 1)) != 0) return INVALID_VALUE;
        if (stand_in_rules.max_alignment && int(alignment) > stand_in_rules.max_alignment) is_refused = true;
    }
    if (is_refused || preference->workspace < WORKSPACE) return NOT_SUPPORTED;
    for (int64_t average : preference->averages) {
        if ((average > 0) != (of_a->n_groups > 0)) return INVALID_VALUE;
    }
    for (int i = 0; i < n && i < 5; i++, (*n_found)++) {
        // The row-major output's rows are the columns here.
        uint64_t number = stand_in_rules.by_rows ? (i + of_d->columns) % 5 : i;
        results[i] = {{{MAGIC, number, 0, 0, 0, 0, 0, MAGIC}}, WORKSPACE, SUCCESS, 1.0f, {}};
    }
    return SUCCESS;
}

Status cublasLtMatmulAlgoCheck(void *, Description *, Layout *, Layout *, Layout *, Layout *of_d, const Algorithm *algorithm,
                               Heuristic *result) {
    if (algorithm->words[0] != MAGIC || algorithm->words[7] != MAGIC) return INVALID_VALUE;
    // The heuristic's first algorithm for 1024 rows does not support a single row.
    if (stand_in_rules.by_rows && of_d->columns == 1 && algorithm->words[1] == 1024 % 5) return NOT_SUPPORTED;
    *result = {*algorithm, WORKSPACE, SUCCESS, 1.0f, {}};
    return SUCCESS;
}

// A matmul per group. Addresses, sizes and factors are read when it computes.
static Status grouped_matmul(const Description *description, const float *alpha, const void *const *a, const Layout *of_a,
                             const void *const *b, const Layout *of_b, const float *beta, const void *c, void **d,
                             const Layout *of_d, void *workspace, machine::Stream *stream) {
    bool fits = of_a->n_groups == of_b->n_groups && of_a->n_groups == of_d->n_groups && of_a->data == of_b->data;
    for (const void *array : {(const void *)a, (const void *)b, (const void *)d}) fits = fits && uintptr_t(array) % 16 == 0;
    if (!fits || description->pointer_mode != 1 || c != d || of_a->data == IN_F32) return INVALID_VALUE;
    stand_in_calls.products++;
    auto product = [=, of_a = *of_a, of_b = *of_b, of_d = *of_d, transposed_a = description->transposed[0] == 1,
                    transposed_b = description->transposed[1] == 1] {
        for (int group = 0; group < of_a.n_groups; group++) {
            Layout left = of_a.of(group), right = of_b.of(group), output = of_d.of(group);
            size_t depth = transposed_a ? left.rows : left.columns;
            bool fits = depth == (transposed_b ? right.columns : right.rows) &&
                        output.rows == (transposed_a ? left.columns : left.rows) &&
                        output.columns == (transposed_b ? right.rows : right.columns);
            if (!fits) abort();
            Product{output.rows, output.columns, depth, {a[group], left.data, left.stride, transposed_a},
                    {b[group], right.data, right.stride, transposed_b}, *alpha, *beta,
                    {d[group], output.data, output.stride, false}, nullptr, d[group]}();
        }
    };
    return put_product(stream, product, workspace, WORKSPACE), SUCCESS;
}

Status cublasLtMatmul(void *, Description *description, const float *alpha, const void *a, Layout *of_a, const void *b,
                      Layout *of_b, const float *beta, const void *c, Layout *of_c, void *d, Layout *of_d,
                      const Algorithm *algorithm, void *workspace, size_t n_bytes, machine::Stream *stream) {
    if (algorithm->words[0] != MAGIC || n_bytes < WORKSPACE || !workspace) return INVALID_VALUE;
    int id = int(algorithm->words[1]);
    if (id < stand_in_rules.n_algorithms) return NOT_SUPPORTED;
    if (of_a->n_groups > 0) {
        return grouped_matmul(description, alpha, static_cast<const void *const *>(a), of_a, static_cast<const void *const *>(b),
                              of_b, beta, c, static_cast<void **>(d), of_d, workspace, stream);
    }
    bool transposed[2] = {description->transposed[0] == 1, description->transposed[1] == 1};
    size_t depth = transposed[0] ? of_a->rows : of_a->columns;
    size_t rows = transposed[0] ? of_a->columns : of_a->rows, columns = transposed[1] ? of_b->rows : of_b->columns;
    bool fits = depth == (transposed[1] ? of_b->columns : of_b->rows) && rows == of_d->rows && columns == of_d->columns;
    if (!fits || depth == 0 || of_c->stride != of_d->stride || !fits_fp8(description, of_a, of_b, of_d)) return INVALID_VALUE;
    stand_in_calls.products++;
    stand_in_calls.last = id;
    Scales scales_a{description->scales[0], description->scale_modes[0], rows, depth};
    Scales scales_b{description->scales[1], description->scale_modes[1], columns, depth};
    if (is_fp8(of_a->data)) {
        bool is_aligned = uintptr_t(a) % 16 == 0 && uintptr_t(b) % 16 == 0 && uintptr_t(d) % 16 == 0;
        if (!is_aligned) return INVALID_VALUE;
        stand_in_fp8 = {{of_a->data, of_b->data, of_d->data}, {scales_a.mode, scales_b.mode},
                        description->fast_accumulation, description->epilogue == 4, *beta != 0.0f};
    }
    Product product{rows, columns, depth, {a, of_a->data, of_a->stride, transposed[0], scales_a},
                    {b, of_b->data, of_b->stride, transposed[1], scales_b}, *alpha, *beta, {c, of_d->data, of_d->stride, false},
                    description->epilogue == 4 ? description->bias : nullptr, d};
    return put_product(stream, product, workspace, WORKSPACE), SUCCESS;
}

// cublasSetStream of the fake driver has no effect: cublasGemmEx computes at once, after all queued work.
static void *gemm_ex_workspace = nullptr;
Status cublasSetWorkspace_v2(void *, void *workspace, size_t n_bytes) {
    return gemm_ex_workspace = workspace, n_bytes < WORKSPACE ? INVALID_VALUE : SUCCESS;
}
Status cublasSetMathMode(void *, int mode) { return mode == 16 ? SUCCESS : INVALID_VALUE; }
int cuCtxSynchronize();
Status cublasGemmEx(void *, int transposed_a, int transposed_b, int rows, int columns, int depth, const float *alpha,
                    const void *a, int of_a, int lda, const void *b, int of_b, int ldb, const float *beta, void *c, int of_c,
                    int ldc, int compute, int algorithm) {
    stand_in_calls.gemm_ex++;
    if (stand_in_rules.gemm_ex) return NOT_SUPPORTED;
    bool fits = lda >= (transposed_a ? depth : rows) && ldb >= (transposed_b ? columns : depth) && ldc >= rows;
    if (!fits || depth == 0 || compute != 68 || algorithm != -1 || !gemm_ex_workspace) return INVALID_VALUE;
    cuCtxSynchronize();
    Product product{size_t(rows), size_t(columns), size_t(depth), {a, of_a, lda, transposed_a == 1},
                    {b, of_b, ldb, transposed_b == 1}, *alpha, *beta, {c, of_c, ldc, false}, nullptr, c};
    return product(), SUCCESS;
}

// In milliseconds, of the algorithm that ran last: all take 10 us, but for one.
int cuEventElapsedTime_v2(float *time, void *, void *) {
    return *time = stand_in_calls.last == stand_in_rules.fastest ? 0.004f : 0.01f, 0;
}
}
