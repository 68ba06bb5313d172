//! The head: the last norm, the logits of some tokens at a time, and their gradients.
//!
//! t tokens, o of them outside of branches, d model, v vocabulary as far as it is here, n tokens whose logits exist at once, s bytes of an element

use candlewick_ops::{CrossEntropyCost, GemmSize, LOGITS_BYTES_ON_CPU, cpu_gemm_buffer_bytes, logits_bytes_on_gpu};

use super::{Place, Setup};
use crate::run::dtype;

/// The loss and its gradient. The norm's output and its gradient stay while `ops::linear_cross_entropy` runs.
pub(super) fn backward(setup: &Setup) -> u64 {
    let Sizes { t, o, d, s, .. } = Sizes::of(setup);
    let logits = loss(setup).forward_backward().scratch_bytes;
    // When the logits are gone, the gradient of the norm's input comes.
    o * d * s + t * d * s + logits.max(o * d * s) + if setup.ranks.tensor > 1 { t * d * s } else { 0 }
}

/// The losses alone, beside the norm's output.
pub(super) fn forward(setup: &Setup) -> u64 {
    let Sizes { t, d, s, .. } = Sizes::of(setup);
    t * d * s + loss(setup).forward().scratch_bytes
}

/// The packing buffers of the MLP's and the head's matmuls on the CPU, which stay for the next ones.
pub(super) fn packed(setup: &Setup) -> u64 {
    let Sizes { t, d, v, .. } = Sizes::of(setup);
    let n = loss(setup).rows_at_once();
    let f = (setup.model.config().intermediate_size() / setup.ranks.tensor) as u64;
    // Forward and gradient of the input, of each; the gradient of the MLP's weights.
    let matmuls = [(t, f, d), (t, d, f), (n, v, d), (n, d, v), (d, f, t)].map(|(m, n, k)| GemmSize { m, n, k });
    match setup.place {
        Place::Cpu => cpu_gemm_buffer_bytes(&matmuls),
        Place::Gpu => 0,
    }
}

fn loss(setup: &Setup) -> CrossEntropyCost {
    let Sizes { t, d, v, .. } = Sizes::of(setup);
    CrossEntropyCost {
        n_tokens: t,
        n_vocab: v,
        n_in: d,
        logits_bytes: match setup.place {
            Place::Cpu => LOGITS_BYTES_ON_CPU,
            Place::Gpu => logits_bytes_on_gpu(setup.gpu_bytes),
        },
        dtype: dtype(setup.compute),
        device: setup.device(),
        grad: setup.base_grad(),
    }
}

struct Sizes {
    t: u64,
    o: u64,
    d: u64,
    v: u64,
    s: u64,
}

impl Sizes {
    fn of(setup: &Setup) -> Self {
        let config = setup.model.config();
        Self {
            t: setup.tokens(),
            o: setup.tokens_outside(),
            d: config.hidden_size() as u64,
            v: config.vocab_size().div_ceil(setup.ranks.tensor) as u64,
            s: setup.compute.n_bytes(),
        }
    }
}
