// Attention by cuDNN: a C interface to graphs of cudnn-frontend, for cudnn.rs alone.
//
// Neither cuDNN nor CUDA is linked. The frontend looks its functions up in the library that `candlewick_cudnn_open` is
// given. Every function returns 0, or 1 with a text in `error`; no exception leaves this file.
//
// The layout is packed ("THD"): the rows of all sequences follow each other, [t, heads, dim], and tables on the device
// say where each sequence begins (in elements) and how long it is. The statistics are the log-sum-exp of each row, f32
// [t, heads].

#include <cudnn_frontend.h>

#include <bit>
#include <cstdio>
#include <memory>
#include <string>
#include <unordered_map>

namespace fe = cudnn_frontend;

namespace cudnn_frontend {
void *cudnn_dlhandle = nullptr;
}

// Key of a graph. Same layout as in cudnn.rs.
struct Shape {
    int64_t batch, max_q, max_k, total_q, total_k, heads_q, heads_k, dim;
    int64_t window;  // 0: none
    uint32_t scale_bits;
    int32_t is_causal, ends_together, is_bf16, capability, is_backward, is_deterministic;
};

// Device addresses. Same layout as in cudnn.rs.
struct Addresses {
    void *q, *k, *v, *o, *stats, *d_o, *dq, *dk, *dv;
    void *lens_q, *lens_k, *offsets_q, *offsets_k, *offsets_stats, *workspace;
};

namespace {

enum Uid : int64_t {
    Q = 1, K, V, O, STATS, D_O, DQ, DK, DV, LENS_Q, LENS_K, OFFSETS_Q, OFFSETS_K, OFFSETS_V, OFFSETS_O, OFFSETS_STATS
};

using Tensor = std::shared_ptr<fe::graph::Tensor_attributes>;

int fail(char *error, size_t size, const char *text) {
    std::snprintf(error, size, "%s", text);
    return 1;
}

template <typename F>
int guarded(char *error, size_t size, F &&f) {
    try {
        fe::error_t status = f();
        return status.is_good() ? 0 : fail(error, size, status.get_message().c_str());
    } catch (const std::exception &exception) {
        return fail(error, size, exception.what());
    } catch (...) {
        return fail(error, size, "an exception that says nothing");
    }
}

fe::error_t from_status(cudnnStatus_t status, const char *what) {
    if (status == CUDNN_STATUS_SUCCESS) return {};
    return {fe::error_code_t::CUDNN_BACKEND_API_FAILED, std::string(what) + ": " + fe::detail::get_error_string(status)};
}

// Builder of one graph.
struct Builder {
    const Shape &shape;
    fe::graph::Graph &graph;

    // Offset of each sequence's first element, for one tensor.
    Tensor offsets(const char *name, Uid uid) {
        return table(name, uid, shape.batch + 1, fe::DataType_t::INT64);
    }

    Tensor lens(const char *name, Uid uid) { return table(name, uid, shape.batch, fe::DataType_t::INT32); }

    Tensor table(const char *name, Uid uid, int64_t n, fe::DataType_t type) {
        return graph.tensor(fe::graph::Tensor_attributes()
                                .set_name(name)
                                .set_uid(uid)
                                .set_dim({n, 1, 1, 1})
                                .set_stride({1, 1, 1, 1})
                                .set_data_type(type));
    }

    // Gives a tensor the packed layout: element (sequence, head, row, i) is at offset[sequence] + row * heads * dim +
    // head * dim + i.
    template <typename Attributes>
    static Attributes &lay_out(Attributes &tensor, Uid uid, int64_t batch, int64_t heads, int64_t rows, int64_t dim,
                               const Tensor &offsets) {
        tensor.set_uid(uid)
            .set_dim({batch, heads, rows, dim})
            .set_stride({heads * rows * dim, dim, heads * dim, 1})
            .set_ragged_offset(offsets);
        return tensor;
    }

    Tensor queries(const char *name, Uid uid, const Tensor &offsets) {
        fe::graph::Tensor_attributes tensor;
        tensor.set_name(name);
        return graph.tensor(lay_out(tensor, uid, shape.batch, shape.heads_q, shape.max_q, shape.dim, offsets));
    }

    Tensor keys(const char *name, Uid uid, const Tensor &offsets) {
        fe::graph::Tensor_attributes tensor;
        tensor.set_name(name);
        return graph.tensor(lay_out(tensor, uid, shape.batch, shape.heads_k, shape.max_k, shape.dim, offsets));
    }

    // Options that forward and backward share.
    template <typename Attributes>
    void describe(Attributes &options) {
        options.set_attn_scale(std::bit_cast<float>(shape.scale_bits))
            .set_padding_mask(true)
            .set_seq_len_q(lens("lens_q", LENS_Q))
            .set_seq_len_kv(lens("lens_k", LENS_K));
        // Alignment of the causal mask: queries are the last positions. With as many queries as keys both alignments
        // mean the same, and more cuDNN versions support the first.
        options.set_diagonal_alignment(shape.ends_together ? fe::DiagonalAlignment_t::BOTTOM_RIGHT
                                                           : fe::DiagonalAlignment_t::TOP_LEFT);
        if (shape.is_causal) options.set_diagonal_band_right_bound(0);
        // cuDNN keeps a key if key + bound > query, which is our window.
        if (shape.window > 0) options.set_diagonal_band_left_bound(static_cast<int>(shape.window));
    }

    void forward() {
        Tensor q = queries("q", Q, offsets("offsets_q", OFFSETS_Q));
        Tensor k = keys("k", K, offsets("offsets_k", OFFSETS_K));
        Tensor v = keys("v", V, offsets("offsets_v", OFFSETS_V));
        auto options = fe::graph::SDPA_attributes().set_name("attention").set_generate_stats(true);
        describe(options);
        auto [o, stats] = graph.sdpa(q, k, v, options);
        lay_out(*o, O, shape.batch, shape.heads_q, shape.max_q, shape.dim, offsets("offsets_o", OFFSETS_O))
            .set_output(true);
        lay_out(*stats, STATS, shape.batch, shape.heads_q, shape.max_q, 1, offsets("offsets_stats", OFFSETS_STATS))
            .set_data_type(fe::DataType_t::FLOAT)
            .set_output(true);
    }

    void backward() {
        Tensor offsets_q = offsets("offsets_q", OFFSETS_Q), offsets_o = offsets("offsets_o", OFFSETS_O);
        Tensor offsets_k = offsets("offsets_k", OFFSETS_K), offsets_v = offsets("offsets_v", OFFSETS_V);
        Tensor q = queries("q", Q, offsets_q);
        Tensor k = keys("k", K, offsets_k), v = keys("v", V, offsets_v);
        Tensor o = queries("o", O, offsets_o), d_o = queries("d_o", D_O, offsets_o);
        fe::graph::Tensor_attributes row;
        row.set_name("stats").set_data_type(fe::DataType_t::FLOAT);
        Tensor stats = graph.tensor(lay_out(row, STATS, shape.batch, shape.heads_q, shape.max_q, 1,
                                            offsets("offsets_stats", OFFSETS_STATS)));
        auto options = fe::graph::SDPA_backward_attributes()
                           .set_name("attention_backward")
                           .set_deterministic_algorithm(shape.is_deterministic != 0)
                           // Without these, the workspace is sized for batch * max rows instead of the actual rows.
                           .set_max_total_seq_len_q(shape.total_q)
                           .set_max_total_seq_len_kv(shape.total_k);
        describe(options);
        auto [dq, dk, dv] = graph.sdpa_backward(q, k, v, o, d_o, stats, options);
        lay_out(*dq, DQ, shape.batch, shape.heads_q, shape.max_q, shape.dim, offsets_q).set_output(true);
        lay_out(*dk, DK, shape.batch, shape.heads_k, shape.max_k, shape.dim, offsets_k).set_output(true);
        lay_out(*dv, DV, shape.batch, shape.heads_k, shape.max_k, shape.dim, offsets_v).set_output(true);
    }
};

}  // namespace

extern "C" {

// Takes the library (from dlopen) that provides all cuDNN functions. Called once, first.
int candlewick_cudnn_open(void *library, size_t *version, char *error, size_t size) {
    fe::cudnn_dlhandle = library;
    return guarded(error, size, [&]() -> fe::error_t {
        *version = fe::detail::get_backend_version();
        return {};
    });
}

// Creates a handle for the current context's device. It is never destroyed.
int candlewick_cudnn_handle(void **handle, char *error, size_t size) {
    return guarded(error, size, [&]() -> fe::error_t {
        return from_status(fe::detail::create_handle(reinterpret_cast<cudnnHandle_t *>(handle)), "cudnnCreate");
    });
}

// Builds a graph, or returns the reason why cuDNN does not support the shape. A graph is never destroyed.
int candlewick_cudnn_build(void *handle, const Shape *shape, void **graph_out, int64_t *workspace, char *error,
                           size_t size) {
    return guarded(error, size, [&]() -> fe::error_t {
        auto graph = std::make_unique<fe::graph::Graph>();
        graph->set_io_data_type(shape->is_bf16 ? fe::DataType_t::BFLOAT16 : fe::DataType_t::HALF)
            .set_intermediate_data_type(fe::DataType_t::FLOAT)
            .set_compute_data_type(fe::DataType_t::FLOAT)
            .set_sm_version(shape->capability);
        Builder builder{*shape, *graph};
        if (shape->is_backward) {
            builder.backward();
        } else {
            builder.forward();
        }
        fe::error_t status = graph->build(static_cast<cudnnHandle_t>(handle), {fe::HeurMode_t::A});
        if (status.is_bad()) return status;
        status = graph->get_workspace_size(*workspace);
        if (status.is_bad()) return status;
        *graph_out = graph.release();
        return {};
    });
}

// Runs a graph on a stream. All addresses that its direction needs must be set.
int candlewick_cudnn_run(void *handle, const void *graph, int32_t is_backward, void *stream, const Addresses *at,
                         char *error, size_t size) {
    return guarded(error, size, [&]() -> fe::error_t {
        auto *cudnn = static_cast<cudnnHandle_t>(handle);
        cudnnStatus_t set = fe::detail::set_stream(cudnn, static_cast<cudaStream_t>(stream));
        fe::error_t status = from_status(set, "cudnnSetStream");
        if (status.is_bad()) return status;
        std::unordered_map<int64_t, void *> addresses{
            {Q, at->q},
            {K, at->k},
            {V, at->v},
            {O, at->o},
            {STATS, at->stats},
            {LENS_Q, at->lens_q},
            {LENS_K, at->lens_k},
            {OFFSETS_Q, at->offsets_q},
            {OFFSETS_K, at->offsets_k},
            {OFFSETS_V, at->offsets_k},
            {OFFSETS_O, at->offsets_q},
            {OFFSETS_STATS, at->offsets_stats},
        };
        if (is_backward) {
            addresses.insert({{D_O, at->d_o}, {DQ, at->dq}, {DK, at->dk}, {DV, at->dv}});
        }
        return static_cast<const fe::graph::Graph *>(graph)->execute(cudnn, addresses, at->workspace);
    });
}
}
