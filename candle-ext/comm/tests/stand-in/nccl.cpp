// Stand-in for NCCL between threads of one process. Communicators are nonblocking. Operations wait on their streams for the
// other ranks until they are aborted. An operation is enqueued some time after its call has returned. As in NCCL, the first
// operation of a communicator, and the first one between two ranks, waits for the other ranks' calls to connect. Reductions are
// in rank order. Undefined behaviour of NCCL is an error here: a call while the last one is in progress, and a call on a thread
// with another current device.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "machine.h"
#include "numbers.h"

using namespace machine;

namespace {

constexpr int SUCCESS = 0, UNHANDLED_CUDA_ERROR = 1, INVALID_ARGUMENT = 4, INVALID_USAGE = 5, IN_PROGRESS = 7;

enum class Kind { ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, BROADCAST, SEND, RECEIVE };

struct Step {
    Kind kind;
    const char *from;
    char *to;
    size_t n;
    int dtype;
    int op = 0;
    // Root or peer rank.
    int peer = 0;

    bool matches(const Step &other) const {
        return kind == other.kind && n == other.n && dtype == other.dtype && op == other.op && peer == other.peer;
    }
};

constexpr int EVERYONE = -1;

// One collective of all ranks.
struct Collective {
    std::map<int, Step> steps;
    size_t n_computed = 0, n_left = 0;
    bool is_aborted_by_a_rank = false;
};

struct Message {
    Step step;
    bool is_read = false;
};

// State of a communicator, shared by its ranks.
struct World {
    uint64_t number;
    int n_joined = 0;
    // Calls so far: a rank, and the peer of its send or receive, or EVERYONE.
    std::set<std::pair<int, int>> called;
    std::map<uint64_t, Collective> collectives;
    std::map<std::pair<int, int>, std::deque<std::shared_ptr<Message>>> messages;
};

struct Communicator {
    std::shared_ptr<World> world;
    int rank, size, device;
    bool is_aborted = false, is_finalized = false, is_launching = false;
    uint64_t n_operations = 0;
    size_t n_in_flight = 0;

    bool is_ready() const {
        return world->n_joined == size && !is_launching && (!is_finalized || n_in_flight == 0);
    }
};

using Handle = std::shared_ptr<Communicator> *;

std::map<std::string, std::weak_ptr<World>> &worlds = *new std::map<std::string, std::weak_ptr<World>>;

// Ids of the communicators that have launched an operation on each device, in launch order.
std::map<int, std::vector<uint64_t>> &launches = *new std::map<int, std::vector<uint64_t>>;
// Function whose next call fails.
std::string &failing = *new std::string;

bool is_to_fail(const char *function) {
    std::lock_guard held(lock);
    return failing == function && (failing.clear(), true);
}

// Returns a random launch time, unless STAND_IN_LAUNCH_US is set.
std::chrono::microseconds launch_time() {
    static const char *fixed = getenv("STAND_IN_LAUNCH_US");
    static std::atomic<uint32_t> state{1};
    uint32_t random = state = state * 1664525 + 1013904223;
    return std::chrono::microseconds(fixed ? atoi(fixed) : 20 + random / 65536 % 300);
}

thread_local int n_groups = 0;
thread_local std::vector<std::pair<Stream *, Step>> group;
thread_local std::shared_ptr<Communicator> group_communicator;

size_t size_of(int dtype) {
    switch (dtype) {
        case 1: return 1;
        case 6: case 9: return 2;
        case 3: case 7: return 4;
        default: return 8;
    }
}

size_t n_bytes(const Step &step) { return step.n * size_of(step.dtype); }

template <class T>
void reduce(const std::vector<const char *> &from, std::vector<char> &to, size_t n, int op) {
    auto out = reinterpret_cast<T *>(to.data());
    for (size_t i = 0; i < n; i++) {
        auto value = wide(reinterpret_cast<const T *>(from[0])[i]);
        for (size_t rank = 1; rank < from.size(); rank++) {
            auto other = wide(reinterpret_cast<const T *>(from[rank])[i]);
            // Comparisons ignore NaN, as in NCCL.
            // Each partial sum is sent in the dtype of the call.
            if (op == 0) value = wide(T(value + other));
            else if (op == 2 ? (other > value || value != value) : (other < value || value != value)) value = other;
        }
        out[i] = T(value);
    }
}

// Returns the result of `rank` for matching steps.
std::vector<char> outcome(const std::map<int, Step> &steps, int rank) {
    const Step &own = steps.at(rank);
    size_t n_bytes = own.n * size_of(own.dtype);
    std::vector<char> out;
    switch (own.kind) {
        case Kind::ALL_GATHER:
            for (auto &[_, step] : steps) out.insert(out.end(), step.from, step.from + n_bytes);
            return out;
        case Kind::BROADCAST: {
            auto from = steps.at(own.peer).from;
            return {from, from + n_bytes};
        }
        default: break;
    }
    std::vector<const char *> from;
    for (auto &[_, step] : steps) from.push_back(step.from + (own.kind == Kind::REDUCE_SCATTER ? rank * n_bytes : 0));
    out.resize(n_bytes);
    switch (own.dtype) {
        case 1: reduce<uint8_t>(from, out, own.n, own.op); break;
        case 3: reduce<uint32_t>(from, out, own.n, own.op); break;
        case 4: reduce<int64_t>(from, out, own.n, own.op); break;
        case 6: reduce<F16>(from, out, own.n, own.op); break;
        case 7: reduce<float>(from, out, own.n, own.op); break;
        case 8: reduce<double>(from, out, own.n, own.op); break;
        case 9: reduce<Bf16>(from, out, own.n, own.op); break;
    }
    return out;
}

// The lock protects all buffers: a rank leaves under it, and aborts a collective that is not computed yet.
void run_collective(Communicator &own, uint64_t number, const Step &step) {
    std::unique_lock held(lock);
    auto size = size_t(own.size);
    Collective &collective = own.world->collectives[number];
    collective.steps[own.rank] = step;
    changed.notify_all();
    auto all_match = [&] {
        for (auto &[_, other] : collective.steps)
            if (!other.matches(step)) return false;
        return collective.steps.size() == size && !collective.is_aborted_by_a_rank;
    };
    changed.wait(held, [&] { return own.is_aborted || all_match(); });
    if (!own.is_aborted) {
        std::vector<char> out = outcome(collective.steps, own.rank);
        collective.n_computed++;
        changed.notify_all();
        changed.wait(held, [&] { return own.is_aborted || collective.n_computed == size; });
        if (!own.is_aborted) memcpy(step.to, out.data(), out.size());
    }
    collective.is_aborted_by_a_rank |= own.is_aborted;
    changed.notify_all();
    if (++collective.n_left == size) own.world->collectives.erase(number);
}

void run_point_to_point(Communicator &own, const std::vector<Step> &steps) {
    std::unique_lock held(lock);
    std::vector<std::shared_ptr<Message>> sent;
    for (const Step &step : steps)
        if (step.kind == Kind::SEND) {
            sent.push_back(std::make_shared<Message>(Message{step}));
            own.world->messages[{own.rank, step.peer}].push_back(sent.back());
        }
    changed.notify_all();
    for (const Step &step : steps)
        if (step.kind == Kind::RECEIVE) {
            auto &mailbox = own.world->messages[{step.peer, own.rank}];
            changed.wait(held, [&] {
                return own.is_aborted || (!mailbox.empty() && n_bytes(mailbox[0]->step) == n_bytes(step));
            });
            if (own.is_aborted) break;
            memcpy(step.to, mailbox[0]->step.from, n_bytes(step));
            mailbox[0]->is_read = true;
            mailbox.pop_front();
            changed.notify_all();
        }
    for (auto &message : sent) {
        changed.wait(held, [&] { return own.is_aborted || message->is_read; });
        if (message->is_read) continue;
        auto &mailbox = own.world->messages[{own.rank, message->step.peer}];
        for (auto at = mailbox.begin(); at != mailbox.end(); ++at)
            if (*at == message) {
                mailbox.erase(at);
                break;
            }
    }
}

bool is_point_to_point(const Step &step) { return step.kind == Kind::SEND || step.kind == Kind::RECEIVE; }

using Group = std::vector<std::pair<Stream *, Step>>;

// Waits for the first calls of all ranks that this rank is not connected to yet.
void connect(Communicator &own, const Group &steps) {
    auto &called = own.world->called;
    std::unique_lock held(lock);
    for (auto &[_, step] : steps) called.insert({own.rank, is_point_to_point(step) ? step.peer : EVERYONE});
    changed.notify_all();
    auto is_connected = [&](const Step &step) {
        if (is_point_to_point(step)) return called.count({step.peer, own.rank}) > 0;
        for (int rank = 0; rank < own.size; rank++)
            if (!called.count({rank, EVERYONE})) return false;
        return true;
    };
    changed.wait(held, [&] {
        if (own.is_aborted) return true;
        for (auto &[_, step] : steps)
            if (!is_connected(step)) return false;
        return true;
    });
}

void start(std::shared_ptr<Communicator> own, Stream *stream, std::function<void(Communicator &)> what) {
    {
        std::lock_guard held(lock);
        own->n_in_flight++;
        launches[own->device].push_back(own->world->number);
    }
    put(stream, [own, what] {
        what(*own);
        std::lock_guard held(lock);
        own->n_in_flight--;
        changed.notify_all();
    });
}

void launch(std::shared_ptr<Communicator> own, const Group &steps) {
    std::this_thread::sleep_for(launch_time());
    connect(*own, steps);
    std::map<Stream *, std::vector<Step>> messages;
    for (auto &[stream, step] : steps) {
        if (is_point_to_point(step)) {
            messages[stream].push_back(step);
        } else {
            start(own, stream, [step = step, number = own->n_operations++](auto &own) { run_collective(own, number, step); });
        }
    }
    for (auto &[stream, steps] : messages) start(own, stream, [steps = steps](auto &own) { run_point_to_point(own, steps); });
    std::lock_guard held(lock);
    own->is_launching = false;
    own->n_in_flight--;
    changed.notify_all();
}

int enqueue(Handle handle, Stream *stream, Step step) {
    auto &own = **handle;
    if (n_groups == 0 || (group_communicator && group_communicator != *handle)) return INVALID_USAGE;
    if (current_device() != own.device || stream->device != own.device) return INVALID_ARGUMENT;
    if (step.peer >= own.size) return INVALID_ARGUMENT;
    std::lock_guard held(lock);
    if (group.empty() && !own.is_ready()) return INVALID_USAGE;
    group_communicator = *handle;
    group.push_back({stream, step});
    return SUCCESS;
}

}  // namespace

extern "C" {

struct Id {
    char bytes[128];
};
struct Config {
    size_t size;
    unsigned magic, version;
    int blocking;
};

int ncclGetVersion(int *version) { return *version = 22703, SUCCESS; }
const char *ncclGetErrorString(int) { return "rejected by the stand-in for NCCL"; }
const char *ncclGetLastError(Handle) { return ""; }

int ncclGetUniqueId(Id *id) {
    static uint64_t n_ids = 0;
    std::lock_guard held(lock);
    memset(id, 0, sizeof *id);
    memcpy(id->bytes, &++n_ids, sizeof n_ids);
    return SUCCESS;
}

int ncclCommInitRankConfig(Handle *handle, int size, Id id, int rank, const Config *config) {
    bool is_known = config->size >= sizeof *config && config->magic == 0xcafebeef && config->version >= 21400;
    if (!is_known || config->blocking != 0 || rank < 0 || rank >= size || current_device() < 0) return INVALID_ARGUMENT;
    if (is_to_fail("ncclCommInitRankConfig")) return UNHANDLED_CUDA_ERROR;
    std::lock_guard held(lock);
    auto &known = worlds[{id.bytes, sizeof id.bytes}];
    auto world = known.lock();
    if (!world) known = world = std::make_shared<World>();
    memcpy(&world->number, id.bytes, sizeof world->number);
    world->n_joined++;
    *handle = new std::shared_ptr<Communicator>(new Communicator{world, rank, size, current_device()});
    changed.notify_all();
    return IN_PROGRESS;
}

int ncclCommGetAsyncError(Handle handle, int *state) {
    std::lock_guard held(lock);
    return *state = (*handle)->is_ready() ? SUCCESS : IN_PROGRESS, SUCCESS;
}

int ncclGroupStart() { return n_groups++, SUCCESS; }

int ncclGroupEnd() {
    if (n_groups == 0) return INVALID_USAGE;
    if (--n_groups > 0 || !group_communicator) return SUCCESS;
    auto own = std::move(group_communicator);
    group_communicator = nullptr;
    {
        std::lock_guard held(lock);
        own->is_launching = true;
        own->n_in_flight++;
    }
    std::thread([own, steps = std::move(group)] { launch(own, steps); }).detach();
    group.clear();
    return IN_PROGRESS;
}

int ncclAllReduce(const char *from, char *to, size_t n, int dtype, int op, Handle handle, Stream *stream) {
    return enqueue(handle, stream, {Kind::ALL_REDUCE, from, to, n, dtype, op});
}
int ncclAllGather(const char *from, char *to, size_t n, int dtype, Handle handle, Stream *stream) {
    return enqueue(handle, stream, {Kind::ALL_GATHER, from, to, n, dtype});
}
int ncclReduceScatter(const char *from, char *to, size_t n, int dtype, int op, Handle handle, Stream *stream) {
    return enqueue(handle, stream, {Kind::REDUCE_SCATTER, from, to, n, dtype, op});
}
int ncclBroadcast(const char *from, char *to, size_t n, int dtype, int root, Handle handle, Stream *stream) {
    return enqueue(handle, stream, {Kind::BROADCAST, from, to, n, dtype, 0, root});
}
int ncclSend(const char *from, size_t n, int dtype, int peer, Handle handle, Stream *stream) {
    return enqueue(handle, stream, {Kind::SEND, from, nullptr, n, dtype, 0, peer});
}
int ncclRecv(char *to, size_t n, int dtype, int peer, Handle handle, Stream *stream) {
    return enqueue(handle, stream, {Kind::RECEIVE, nullptr, to, n, dtype, 0, peer});
}

int ncclCommFinalize(Handle handle) {
    if (is_to_fail("ncclCommFinalize")) return UNHANDLED_CUDA_ERROR;
    std::lock_guard held(lock);
    return (*handle)->is_finalized = true, IN_PROGRESS;
}

int ncclCommDestroy(Handle handle) {
    if (is_to_fail("ncclCommDestroy")) return UNHANDLED_CUDA_ERROR;
    {
        std::lock_guard held(lock);
        if (!(*handle)->is_finalized || (*handle)->n_in_flight > 0) return INVALID_USAGE;
    }
    return delete handle, SUCCESS;
}

int ncclCommAbort(Handle handle) {
    {
        std::unique_lock held(lock);
        (*handle)->is_aborted = true;
        changed.notify_all();
        changed.wait(held, [=] { return (*handle)->n_in_flight == 0; });
    }
    return delete handle, SUCCESS;
}

// For tests: writes up to `n_most` ids of the communicators that have launched on a device, and returns their number.
size_t stand_in_launches(int device, uint64_t *numbers, size_t n_most) {
    std::lock_guard held(lock);
    auto &all = launches[device];
    std::copy_n(all.begin(), std::min(n_most, all.size()), numbers);
    return all.size();
}

// For tests: makes the next call of an NCCL function fail.
void stand_in_fail_next(const char *function) {
    std::lock_guard held(lock);
    failing = function;
}
}
