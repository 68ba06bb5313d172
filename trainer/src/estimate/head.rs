//! The head: the last norm, the logits of some tokens at a time, and their gradients.
//!
//! t tokens, o of them outside of branches, d model, v vocabulary as far as it is here, n tokens whose logits exist at once

use candlewick_parallel::logits_bytes_on_gpu;

use super::{Place, Setup};

const F32: u64 = 4;
/// Bytes of logits at once on the CPU (`parallel::Engine::logits_bytes`).
const CPU_LOGITS: u64 = 64 << 20;

/// The loss and its gradient. The norm's output and its gradient stay while `ops::linear_cross_entropy` holds n rows of
/// logits, their inputs and their dx. Where gradients are bf16 that of the weight is
/// summed in f32 meanwhile.
pub(super) fn backward(setup: &Setup) -> u64 {
    let Sizes { t, o, d, v, n, s } = Sizes::of(setup);
    let rounded = match setup.place {
        Place::Cpu if setup.masters.n_bytes() < F32 && setup.model.lora().is_none() => v * d * F32,
        _ => 0,
    };
    let logits = match setup.place {
        Place::Cpu => n * (v + 2 * d) * F32,
        Place::Gpu if s == F32 => n * (v + 2 * d) * F32,
        Place::Gpu => n * v * (F32 + s) + 2 * n * d * s,
    };
    // When the logits are gone, the gradient of the norm's input comes.
    o * d * s + t * d * s + (logits + rounded).max(o * d * s) + if setup.ranks.tensor > 1 { t * d * s } else { 0 }
}

/// The losses alone: the norm's output, n rows of logits and of inputs.
pub(super) fn forward(setup: &Setup) -> u64 {
    let Sizes { t, d, v, n, s, .. } = Sizes::of(setup);
    let width = if setup.place == Place::Cpu { F32 } else { s };
    t * d * s + n * (v * F32 + d * width)
}

/// What products on the CPU pack of their factors (`ops::gemm::blocks`) and keep for the next one: up to 2^21 elements of the
/// one with fewer rows or columns, of 6 bytes where the processor has AMX and 4 elsewhere, and 768 KiB a thread of the other.
pub(super) fn packed(setup: &Setup) -> u64 {
    const MOST: u64 = 1 << 21;
    const BLOCK: u64 = 768 << 10;
    let Sizes { t, d, v, n, .. } = Sizes::of(setup);
    let f = (setup.model.config().intermediate_size() / setup.ranks.tensor) as u64;
    // Of the MLP's and the head's products: forward, the input's gradient, the weight's.
    let shared = (t.min(d) * f).max(t.min(f) * d).max(n.min(d) * v).max(n.min(v) * d).max(d.min(f) * t);
    match setup.place {
        Place::Cpu => 6 * shared.min(MOST) + BLOCK * rayon::current_num_threads() as u64,
        Place::Gpu => 0,
    }
}

/// Chunks on a GPU are even, of whole tiles (`ops::linear_cross_entropy`).
fn even_chunk(t: u64, most: u64) -> u64 {
    t.div_ceil(t.div_ceil(most).max(1)).next_multiple_of(128).clamp(1, most)
}

struct Sizes {
    t: u64,
    o: u64,
    d: u64,
    v: u64,
    n: u64,
    s: u64,
}

impl Sizes {
    fn of(setup: &Setup) -> Self {
        let config = setup.model.config();
        let (t, v) = (setup.tokens(), config.vocab_size().div_ceil(setup.ranks.tensor) as u64);
        let most = |bytes: u64| (bytes / (v * F32).max(1)).clamp(1, t.max(1));
        let n = match setup.place {
            Place::Cpu => most(CPU_LOGITS),
            Place::Gpu => even_chunk(t, most(logits_bytes_on_gpu(setup.gpu_bytes))),
        };
        Self { t, o: setup.tokens_outside(), d: config.hidden_size() as u64, v, n, s: setup.compute.n_bytes() }
    }
}
