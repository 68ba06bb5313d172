// Stands in for NCCL between threads of one process: communicators that do not block the host, and operations that wait on
// their streams for the other ranks, for ever if need be: until they are aborted. An operation is put onto its stream some time
// after the call has returned; the first one of a communicator, and the first one between two ranks, when the others have called,
// too: that is when NCCL connects them. Sums are taken in the order of the ranks. What NCCL leaves undefined is refused here: a
// call while the last one is under way, and one from a thread whose device is another.
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
    // The root, or the other rank.
    int peer = 0;

    bool fits(const Step &other) const {
        return kind == other.kind && n == other.n && dtype == other.dtype && op == other.op && peer == other.peer;
    }
};

constexpr int EVERYONE = -1;

// One operation of all ranks.
struct Meeting {
    std::map<int, Step> steps;
    size_t n_computed = 0, n_left = 0;
    bool is_broken = false;
};

struct Letter {
    Step step;
    bool is_read = false;
};

// What the ranks of a communicator share.
struct World {
    uint64_t number;
    int n_joined = 0;
    // Who has called: a rank, and the other rank of a send or receive, or EVERYONE.
    std::set<std::pair<int, int>> called;
    std::map<uint64_t, Meeting> meetings;
    std::map<std::pair<int, int>, std::deque<std::shared_ptr<Letter>>> letters;
};

struct Communicator {
    std::shared_ptr<World> world;
    int rank, size, device;
    bool is_aborted = false, is_finalized = false, is_launching = false;
    uint64_t n_operations = 0;
    size_t n_under_way = 0;

    bool is_ready() const {
        return world->n_joined == size && !is_launching && (!is_finalized || n_under_way == 0);
    }
};

using Handle = std::shared_ptr<Communicator> *;

std::map<std::string, std::weak_ptr<World>> &worlds = *new std::map<std::string, std::weak_ptr<World>>;

// The numbers of the communicators that have launched an operation on each device.
std::map<int, std::vector<uint64_t>> &launches = *new std::map<int, std::vector<uint64_t>>;
// The function that fails when it is called next.
std::string &failing = *new std::string;

bool is_to_fail(const char *function) {
    std::lock_guard held(lock);
    return failing == function && (failing.clear(), true);
}

// Each launch takes another time, unless the variable says it.
std::chrono::microseconds launch_time() {
    static const char *fixed = getenv("STAND_IN_LAUNCH_US");
    static std::atomic<uint32_t> state{1};
    uint32_t random = state = state * 1664525 + 1013904223;
    return std::chrono::microseconds(fixed ? atoi(fixed) : 20 + random / 65536 % 300);
}

thread_local int n_groups = 0;
thread_local std::vector<std::pair<Stream *, Step>> group;
thread_local std::shared_ptr<Communicator> group_of;

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
            // A comparison passes over a NaN, as NCCL's do.
            if (op == 0) value += other;
            else if (op == 2 ? (other > value || value != value) : (other < value || value != value)) value = other;
        }
        out[i] = T(value);
    }
}

// What `rank` gets, for ranks whose steps fit together.
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

// All buffers may be read while the lock is held: a rank leaves only under it, and breaks up what has not been computed.
void meet(Communicator &own, uint64_t number, const Step &step) {
    std::unique_lock held(lock);
    auto size = size_t(own.size);
    Meeting &meeting = own.world->meetings[number];
    meeting.steps[own.rank] = step;
    changed.notify_all();
    auto fit = [&] {
        for (auto &[_, other] : meeting.steps)
            if (!other.fits(step)) return false;
        return meeting.steps.size() == size && !meeting.is_broken;
    };
    changed.wait(held, [&] { return own.is_aborted || fit(); });
    if (!own.is_aborted) {
        std::vector<char> out = outcome(meeting.steps, own.rank);
        meeting.n_computed++;
        changed.notify_all();
        changed.wait(held, [&] { return own.is_aborted || meeting.n_computed == size; });
        if (!own.is_aborted) memcpy(step.to, out.data(), out.size());
    }
    meeting.is_broken |= own.is_aborted;
    changed.notify_all();
    if (++meeting.n_left == size) own.world->meetings.erase(number);
}

void post(Communicator &own, const std::vector<Step> &steps) {
    std::unique_lock held(lock);
    std::vector<std::shared_ptr<Letter>> sent;
    for (const Step &step : steps)
        if (step.kind == Kind::SEND) {
            sent.push_back(std::make_shared<Letter>(Letter{step}));
            own.world->letters[{own.rank, step.peer}].push_back(sent.back());
        }
    changed.notify_all();
    for (const Step &step : steps)
        if (step.kind == Kind::RECEIVE) {
            auto &box = own.world->letters[{step.peer, own.rank}];
            changed.wait(held, [&] {
                return own.is_aborted || (!box.empty() && n_bytes(box[0]->step) == n_bytes(step));
            });
            if (own.is_aborted) break;
            memcpy(step.to, box[0]->step.from, n_bytes(step));
            box[0]->is_read = true;
            box.pop_front();
            changed.notify_all();
        }
    for (auto &letter : sent) {
        changed.wait(held, [&] { return own.is_aborted || letter->is_read; });
        if (letter->is_read) continue;
        auto &box = own.world->letters[{own.rank, letter->step.peer}];
        for (auto at = box.begin(); at != box.end(); ++at)
            if (*at == letter) {
                box.erase(at);
                break;
            }
    }
}

bool is_letter(const Step &step) { return step.kind == Kind::SEND || step.kind == Kind::RECEIVE; }

using Group = std::vector<std::pair<Stream *, Step>>;

// Waits until those have called whom this rank has not met before.
void connect(Communicator &own, const Group &steps) {
    auto &called = own.world->called;
    std::unique_lock held(lock);
    for (auto &[_, step] : steps) called.insert({own.rank, is_letter(step) ? step.peer : EVERYONE});
    changed.notify_all();
    auto is_met = [&](const Step &step) {
        if (is_letter(step)) return called.count({step.peer, own.rank}) > 0;
        for (int rank = 0; rank < own.size; rank++)
            if (!called.count({rank, EVERYONE})) return false;
        return true;
    };
    changed.wait(held, [&] {
        if (own.is_aborted) return true;
        for (auto &[_, step] : steps)
            if (!is_met(step)) return false;
        return true;
    });
}

void start(std::shared_ptr<Communicator> own, Stream *stream, std::function<void(Communicator &)> what) {
    {
        std::lock_guard held(lock);
        own->n_under_way++;
        launches[own->device].push_back(own->world->number);
    }
    put(stream, [own, what] {
        what(*own);
        std::lock_guard held(lock);
        own->n_under_way--;
        changed.notify_all();
    });
}

void launch(std::shared_ptr<Communicator> own, const Group &steps) {
    std::this_thread::sleep_for(launch_time());
    connect(*own, steps);
    std::map<Stream *, std::vector<Step>> letters;
    for (auto &[stream, step] : steps) {
        if (is_letter(step)) {
            letters[stream].push_back(step);
        } else {
            start(own, stream, [step = step, number = own->n_operations++](auto &own) { meet(own, number, step); });
        }
    }
    for (auto &[stream, steps] : letters) start(own, stream, [steps = steps](auto &own) { post(own, steps); });
    std::lock_guard held(lock);
    own->is_launching = false;
    own->n_under_way--;
    changed.notify_all();
}

int take(Handle handle, Stream *stream, Step step) {
    auto &own = **handle;
    if (n_groups == 0 || (group_of && group_of != *handle)) return INVALID_USAGE;
    if (current_device() != own.device || stream->device != own.device) return INVALID_ARGUMENT;
    if (step.peer >= own.size) return INVALID_ARGUMENT;
    std::lock_guard held(lock);
    if (group.empty() && !own.is_ready()) return INVALID_USAGE;
    group_of = *handle;
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
const char *ncclGetErrorString(int) { return "refused by the stand-in for NCCL"; }
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
    if (--n_groups > 0 || !group_of) return SUCCESS;
    auto own = std::move(group_of);
    group_of = nullptr;
    {
        std::lock_guard held(lock);
        own->is_launching = true;
        own->n_under_way++;
    }
    std::thread([own, steps = std::move(group)] { launch(own, steps); }).detach();
    group.clear();
    return IN_PROGRESS;
}

int ncclAllReduce(const char *from, char *to, size_t n, int dtype, int op, Handle handle, Stream *stream) {
    return take(handle, stream, {Kind::ALL_REDUCE, from, to, n, dtype, op});
}
int ncclAllGather(const char *from, char *to, size_t n, int dtype, Handle handle, Stream *stream) {
    return take(handle, stream, {Kind::ALL_GATHER, from, to, n, dtype});
}
int ncclReduceScatter(const char *from, char *to, size_t n, int dtype, int op, Handle handle, Stream *stream) {
    return take(handle, stream, {Kind::REDUCE_SCATTER, from, to, n, dtype, op});
}
int ncclBroadcast(const char *from, char *to, size_t n, int dtype, int root, Handle handle, Stream *stream) {
    return take(handle, stream, {Kind::BROADCAST, from, to, n, dtype, 0, root});
}
int ncclSend(const char *from, size_t n, int dtype, int peer, Handle handle, Stream *stream) {
    return take(handle, stream, {Kind::SEND, from, nullptr, n, dtype, 0, peer});
}
int ncclRecv(char *to, size_t n, int dtype, int peer, Handle handle, Stream *stream) {
    return take(handle, stream, {Kind::RECEIVE, nullptr, to, n, dtype, 0, peer});
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
        if (!(*handle)->is_finalized || (*handle)->n_under_way > 0) return INVALID_USAGE;
    }
    return delete handle, SUCCESS;
}

int ncclCommAbort(Handle handle) {
    {
        std::unique_lock held(lock);
        (*handle)->is_aborted = true;
        changed.notify_all();
        changed.wait(held, [=] { return (*handle)->n_under_way == 0; });
    }
    return delete handle, SUCCESS;
}

// For tests: writes up to `n_most` numbers of the communicators that have launched on a device, and returns how many have.
size_t stand_in_launches(int device, uint64_t *numbers, size_t n_most) {
    std::lock_guard held(lock);
    auto &all = launches[device];
    std::copy_n(all.begin(), std::min(n_most, all.size()), numbers);
    return all.size();
}

// For tests: lets the next call of an NCCL function fail.
void stand_in_fail_next(const char *function) {
    std::lock_guard held(lock);
    failing = function;
}
}
