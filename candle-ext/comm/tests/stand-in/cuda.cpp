// Stand-in for the CUDA driver, cuBLAS and cuRAND on machines without a GPU. Device memory is host memory, streams are threads,
// and the kernels are those of candle that a process group needs. Unspecified behaviour is adversarial: allocated and freed
// memory is filled with NaN, streams synchronize by events only, and calls without a current context fail.
#include "machine.h"

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <map>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "numbers.h"

namespace machine {

// Never destroyed: streams may outlive the program's last test.
std::mutex &lock = *new std::mutex;
std::condition_variable &changed = *new std::condition_variable;

namespace {

constexpr int N_DEVICES = 4;
struct Device {
    int number;
} devices[N_DEVICES] = {{0}, {1}, {2}, {3}};
thread_local Device *current = nullptr;
std::set<Stream *> &streams = *new std::set<Stream *>;

void work(Stream *stream) {
    std::unique_lock held(lock);
    for (;;) {
        changed.wait(held, [&] { return stream->ends || !stream->jobs.empty(); });
        if (stream->jobs.empty()) break;
        Job job = std::move(stream->jobs.front());
        stream->jobs.pop_front();
        held.unlock();
        job();
        job = nullptr;
        held.lock();
        stream->n_done++;
        changed.notify_all();
    }
    streams.erase(stream);
    changed.notify_all();
    delete stream;
}

}  // namespace

int current_device() { return current ? current->number : -1; }

void put(Stream *stream, Job job) {
    std::lock_guard held(lock);
    stream->jobs.push_back(std::move(job));
    stream->n_put++;
    changed.notify_all();
}

void drain(Stream *stream) {
    std::unique_lock held(lock);
    changed.wait(held, [=, n = stream->n_put] { return stream->n_done >= n; });
}

// Event. Each record creates a new flag, so that earlier waits continue to wait for the earlier flag.
struct Event {
    std::shared_ptr<bool> is_done;
};

// Strided layout as candle passes it to kernels: the dims, then the strides of each operand, or null if contiguous.
struct Shape {
    size_t n, n_dims;
    const size_t *info;

    size_t at(size_t i, int operand = 0) const {
        if (!info) return i;
        size_t place = 0;
        for (size_t d = n_dims; d-- > 0; i /= info[d]) place += i % info[d] * info[(operand + 1) * n_dims + d];
        return place;
    }
};

template <class T>
T argument(void **arguments, int i) {
    return *static_cast<T *>(arguments[i]);
}

Shape shape(void **arguments) {
    return {argument<size_t>(arguments, 0), argument<size_t>(arguments, 1), argument<const size_t *>(arguments, 2)};
}

template <class A, class B>
Job cast(void **arguments) {
    return [s = shape(arguments), x = argument<const A *>(arguments, 3), y = argument<B *>(arguments, 4)] {
        for (size_t i = 0; i < s.n; i++) y[i] = B(float(x[s.at(i)]));
    };
}

template <class T>
Job copy(void **arguments) {
    return [s = shape(arguments), x = argument<const T *>(arguments, 3), y = argument<T *>(arguments, 4)] {
        for (size_t i = 0; i < s.n; i++) y[i] = x[s.at(i)];
    };
}

template <class T>
Job affine(void **arguments) {
    return [s = shape(arguments), x = argument<const T *>(arguments, 3), y = argument<T *>(arguments, 4),
            factor = argument<T>(arguments, 5), term = argument<T>(arguments, 6)] {
        for (size_t i = 0; i < s.n; i++) y[i] = T(wide(x[s.at(i)]) * wide(factor) + wide(term));
    };
}

template <class T>
Job not_equal(void **arguments) {
    return [s = shape(arguments), a = argument<const T *>(arguments, 3), b = argument<const T *>(arguments, 4),
            y = argument<uint8_t *>(arguments, 5)] {
        for (size_t i = 0; i < s.n; i++) y[i] = wide(a[s.at(i)]) != wide(b[s.at(i, 1)]);
    };
}

template <class T>
Job where(void **arguments) {
    return [s = shape(arguments), c = argument<const uint8_t *>(arguments, 3), t = argument<const T *>(arguments, 4),
            f = argument<const T *>(arguments, 5), y = argument<T *>(arguments, 6)] {
        for (size_t i = 0; i < s.n; i++) y[i] = c[s.at(i)] ? t[s.at(i, 1)] : f[s.at(i, 2)];
    };
}

template <class T>
Job set(void **arguments) {
    return [s = shape(arguments), value = argument<T>(arguments, 3), y = argument<T *>(arguments, 4)] {
        for (size_t i = 0; i < s.n; i++) y[s.at(i)] = value;
    };
}

// The `fill` kernel of ops: c = plus + bias. Either may be null.
template <class T>
Job fill(void **arguments) {
    return [plus = argument<const T *>(arguments, 0), bias = argument<const T *>(arguments, 1),
            c = argument<T *>(arguments, 2), m = argument<long long>(arguments, 3), n = argument<long long>(arguments, 4),
            stride = argument<long long>(arguments, 5)] {
        for (long long row = 0; row < m; row++) {
            for (long long i = 0; i < n; i++) {
                float sum = plus ? float(wide(plus[row * stride + i])) : 0.0f;
                c[row * stride + i] = T(bias ? sum + float(wide(bias[i])) : sum);
            }
        }
    };
}

using Kernel = Job (*)(void **);

template <class T>
void add_float(std::map<std::string, Kernel> &kernels, const std::string &name) {
    kernels["const_set_" + name] = set<T>;
    kernels["affine_" + name] = affine<T>;
    kernels["ne_" + name] = not_equal<T>;
    kernels["where_u8_" + name] = where<T>;
    kernels["ucopy_" + name] = copy<T>;
    kernels["fill_" + name] = fill<T>;
}

std::map<std::string, Kernel> all_kernels() {
    std::map<std::string, Kernel> kernels = {
        {"cast_bf16_f32", cast<Bf16, float>},
        {"cast_f32_bf16", cast<float, Bf16>},
        {"cast_f16_f32", cast<F16, float>},
        {"cast_f32_f16", cast<float, F16>},
    };
    add_float<float>(kernels, "f32");
    add_float<double>(kernels, "f64");
    add_float<Bf16>(kernels, "bf16");
    add_float<F16>(kernels, "f16");
    return kernels;
}

}  // namespace machine

using namespace machine;

using Result = int;
constexpr Result SUCCESS = 0, INVALID_VALUE = 1, INVALID_CONTEXT = 201, NOT_FOUND = 500, NOT_READY = 600;

// Returns memory whose elements are NaN in every float dtype.
static void *allocate_nan(size_t n) {
    void *memory = aligned_alloc(256, (n + 255) / 256 * 256);
    memset(memory, 0xFF, n);
    return memory;
}

static std::map<void *, size_t> &sizes = *new std::map<void *, size_t>;

// Sizes of pinned host memory, by address.
static std::map<const void *, size_t> &pinned = *new std::map<const void *, size_t>;

static bool is_pinned(const void *address) {
    std::lock_guard held(lock);
    auto after = pinned.upper_bound(address);
    if (after == pinned.begin()) return false;
    const auto [start, n] = *std::prev(after);
    return static_cast<const char *>(address) < static_cast<const char *>(start) + n;
}

static void free_memory(void *memory) {
    size_t n;
    {
        std::lock_guard held(lock);
        auto found = sizes.find(memory);
        if (found == sizes.end()) abort();
        n = found->second;
        sizes.erase(found);
    }
    memset(memory, 0xFF, n);
    free(memory);
}

extern "C" {

Result cuInit(unsigned) { return SUCCESS; }
Result cuGetErrorName(Result, const char **text) { return *text = "stand-in", SUCCESS; }
Result cuGetErrorString(Result, const char **text) { return *text = "rejected by the stand-in for CUDA", SUCCESS; }

Result cuDriverGetVersion(int *release) { return *release = 13000, SUCCESS; }
Result cuDeviceGetCount(int *n) { return *n = N_DEVICES, SUCCESS; }
Result cuDeviceGet(int *device, int ordinal) {
    return ordinal < N_DEVICES ? (*device = ordinal, SUCCESS) : INVALID_VALUE;
}
Result cuDeviceGetName(char *name, int n, int) { return strncpy(name, "stand-in", n), SUCCESS; }
Result cuDeviceGetUuid_v2(char *uuid, int device) {
    memset(uuid, 0, 16);
    return uuid[15] = char(device + 1), SUCCESS;
}
// Memory pools, compute capability 9.0, and one of everything else.
Result cuDeviceGetAttribute(int *value, int attribute, int) {
    return *value = attribute == 75 ? 9 : attribute == 76 ? 0 : 1, SUCCESS;
}
Result cuDevicePrimaryCtxRetain(void **context, int device) { return *context = &devices[device], SUCCESS; }
Result cuDevicePrimaryCtxRelease_v2(int) { return SUCCESS; }
Result cuCtxGetCurrent(void **context) { return *context = current, SUCCESS; }
Result cuCtxSetCurrent(void *context) { return current = static_cast<Device *>(context), SUCCESS; }

Result cuCtxSynchronize() {
    std::unique_lock held(lock);
    changed.wait(held, [] {
        for (Stream *stream : streams)
            if (stream->device == current_device() && stream->n_done < stream->n_put) return false;
        return true;
    });
    return SUCCESS;
}

Result cuStreamCreate(Stream **stream, unsigned) {
    if (!current) return INVALID_CONTEXT;
    *stream = new Stream(current->number);
    {
        std::lock_guard held(lock);
        streams.insert(*stream);
    }
    std::thread(work, *stream).detach();
    return SUCCESS;
}
Result cuStreamDestroy_v2(Stream *stream) {
    std::lock_guard held(lock);
    stream->ends = true;
    changed.notify_all();
    return SUCCESS;
}
Result cuStreamSynchronize(Stream *stream) { return drain(stream), SUCCESS; }
// Compute that lasts as long as the function.
Result cuLaunchHostFunc(Stream *stream, void (*function)(void *), void *argument) {
    return put(stream, [=] { function(argument); }), SUCCESS;
}
Result cuStreamIsCapturing(Stream *, int *status) { return *status = 0, SUCCESS; }

Result cuEventCreate(Event **event, unsigned) { return current ? (*event = new Event, SUCCESS) : INVALID_CONTEXT; }
Result cuEventDestroy_v2(Event *event) { return delete event, SUCCESS; }
Result cuEventRecord(Event *event, Stream *stream) {
    auto is_done = std::make_shared<bool>(false);
    event->is_done = is_done;
    put(stream, [=] {
        std::lock_guard held(lock);
        *is_done = true;
    });
    return SUCCESS;
}
Result cuEventQuery(Event *event) {
    std::lock_guard held(lock);
    return !event->is_done || *event->is_done ? SUCCESS : NOT_READY;
}
Result cuEventSynchronize(Event *event) {
    std::unique_lock held(lock);
    changed.wait(held, [=] { return !event->is_done || *event->is_done; });
    return SUCCESS;
}
Result cuStreamWaitEvent(Stream *stream, Event *event, unsigned) {
    if (!event->is_done) return SUCCESS;
    put(stream, [is_done = event->is_done] {
        std::unique_lock held(lock);
        changed.wait(held, [&] { return *is_done; });
    });
    return SUCCESS;
}

Result cuMemAlloc_v2(void **memory, size_t n) {
    if (!current) return INVALID_CONTEXT;
    *memory = allocate_nan(n);
    std::lock_guard held(lock);
    sizes[*memory] = n;
    return SUCCESS;
}
Result cuMemAllocAsync(void **memory, size_t n, Stream *) { return cuMemAlloc_v2(memory, n); }
Result cuMemFree_v2(void *memory) { return free_memory(memory), SUCCESS; }
Result cuMemFreeAsync(void *memory, Stream *stream) { return put(stream, [=] { free_memory(memory); }), SUCCESS; }
Result cuMemsetD8Async(void *to, unsigned char value, size_t n, Stream *stream) {
    return put(stream, [=] { memset(to, value, n); }), SUCCESS;
}
// Pinned memory: copies from and to it run in the order of their stream, and the host does not wait.
Result cuMemHostAlloc(void **memory, size_t n, unsigned) {
    if (!current) return INVALID_CONTEXT;
    *memory = allocate_nan(n);
    std::lock_guard held(lock);
    pinned[*memory] = n;
    return SUCCESS;
}
Result cuMemFreeHost(void *memory) {
    std::lock_guard held(lock);
    return pinned.erase(memory) ? (free(memory), SUCCESS) : INVALID_VALUE;
}
// Copies of pageable memory: the driver has read or written it when it returns.
Result cuMemcpyHtoDAsync_v2(void *to, const void *from, size_t n, Stream *stream) {
    if (is_pinned(from)) return put(stream, [=] { memcpy(to, from, n); }), SUCCESS;
    auto bytes = std::make_shared<std::vector<char>>(static_cast<const char *>(from), static_cast<const char *>(from) + n);
    return put(stream, [=] { memcpy(to, bytes->data(), n); }), SUCCESS;
}
Result cuMemcpyDtoHAsync_v2(void *to, const void *from, size_t n, Stream *stream) {
    put(stream, [=] { memcpy(to, from, n); });
    if (!is_pinned(to)) drain(stream);
    return SUCCESS;
}
Result cuMemcpyDtoDAsync_v2(void *to, const void *from, size_t n, Stream *stream) {
    return put(stream, [=] { memcpy(to, from, n); }), SUCCESS;
}

Result cuModuleLoadData(void **module, const void *) {
    static int any;
    return *module = &any, SUCCESS;
}
Result cuModuleUnload(void *) { return SUCCESS; }
Result cuModuleGetFunction(const Kernel **function, void *, const char *name) {
    static const std::map<std::string, Kernel> kernels = all_kernels();
    auto found = kernels.find(name);
    if (found == kernels.end()) {
        fprintf(stderr, "the stand-in for CUDA has no kernel %s\n", name);
        return NOT_FOUND;
    }
    return *function = &found->second, SUCCESS;
}
Result cuLaunchKernel(const Kernel *function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                      Stream *stream, void **arguments, void **) {
    return put(stream, (*function)(arguments)), SUCCESS;
}

static int some;
int cublasCreate_v2(void **handle) { return *handle = &some, 0; }
int cublasSetStream_v2(void *, Stream *) { return 0; }
int cublasDestroy_v2(void *) { return 0; }
int curandCreateGenerator(void **generator, int) { return *generator = &some, 0; }
int curandSetStream(void *, Stream *) { return 0; }
int curandSetPseudoRandomGeneratorSeed(void *, unsigned long long) { return 0; }
int curandDestroyGenerator(void *) { return 0; }
}
