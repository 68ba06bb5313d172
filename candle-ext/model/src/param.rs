//! A parameter: its name, shape and what it starts from. Random values depend on the seed and the name only, so that no
//! order of units, thread or rank changes them.

use candlewick_ops::WeightStorage;
use rand_chacha::{ChaCha8Rng, rand_core::RngCore, rand_core::SeedableRng};
use rayon::prelude::*;

/// One parameter of the model.
#[derive(Clone, Debug, PartialEq)]
pub struct ParamSpec {
    /// The Hugging Face name; an adapter's factor is `<module>.lora_A.weight` or `<module>.lora_B.weight`.
    pub name: String,
    /// The shape on disk and in memory.
    pub shape: Vec<usize>,
    /// What each of its dims counts.
    pub dims: Vec<Dim>,
    /// Where the model uses it.
    pub scope: ParamScope,
    /// What it starts from when there is no checkpoint.
    pub init: Init,
    /// Whether weight decay applies: not to norms and biases.
    pub decay: bool,
    /// Whether it is trained; false for the base of an adapter.
    pub trainable: bool,
    /// The process groups that shard it and reduce its gradient.
    pub group: ParamGroupKind,
    /// The storage of its elements.
    pub storage: WeightStorage,
}

/// A kind of parameter group: parameters of one kind are sharded and reduced over the same ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum ParamGroupKind {
    /// Everything but experts, over the data-parallel ranks.
    Dense,
    /// Experts, over the expert-data-parallel ranks.
    Expert,
}

impl ParamGroupKind {
    /// All kinds, in the order of a unit's groups.
    pub const ALL: [Self; 2] = [Self::Dense, Self::Expert];
}

impl ParamSpec {
    /// Returns a trainable matrix, which decays.
    pub(crate) fn matrix(name: String, [rows, columns]: [DimSize; 2], scope: ParamScope, init: Init) -> Self {
        let (shape, dims) = (vec![rows.len, columns.len], vec![rows.dim, columns.dim]);
        let (group, storage) = (ParamGroupKind::Dense, WeightStorage::Dense);
        Self { name, shape, dims, scope, init, decay: true, trainable: true, group, storage }
    }

    /// Returns a trainable vector, which does not decay.
    pub(crate) fn vector(name: String, width: DimSize, scope: ParamScope, init: Init) -> Self {
        let (shape, dims) = (vec![width.len], vec![width.dim]);
        let (group, storage) = (ParamGroupKind::Dense, WeightStorage::Dense);
        Self { name, shape, dims, scope, init, decay: false, trainable: true, group, storage }
    }

    /// Returns the weight of an RMS norm.
    pub(crate) fn norm(name: String, width: DimSize, scope: ParamScope) -> Self {
        Self::vector(name, width, scope, Init::Ones)
    }
}

/// What a dim of a parameter counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dim {
    /// Tokens of the vocabulary.
    Vocab,
    /// The model's width.
    Embed,
    /// All query heads, each with all of its dims.
    Heads,
    /// All key or value heads, likewise.
    KvHeads,
    /// The dims of one head.
    HeadDim,
    /// The MLP's width.
    Ffn,
    /// All experts, each with all of its rows or columns.
    Experts,
    /// An adapter's rank.
    Rank,
}

/// A dim and its length.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DimSize {
    /// The dim.
    pub dim: Dim,
    /// The length.
    pub len: usize,
}

/// Where a parameter acts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ParamScope {
    /// On what all branches read and add to: norms of the model's width, the embedding, the output layer.
    ResidualStream,
    /// Within a branch, between [`ParallelOps::copy_to_tp`](crate::ParallelOps::copy_to_tp) and [`ParallelOps::reduce_from_tp`](crate::ParallelOps::reduce_from_tp).
    Sublayer,
}

/// What a parameter starts from.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Init {
    /// A normal distribution around 0.
    Normal {
        /// Its standard deviation.
        std: f64,
        /// A row left at zero: the padding token's.
        zero_row: Option<usize>,
    },
    /// A uniform distribution over [-bound, bound).
    Uniform {
        /// Its bound.
        bound: f64,
    },
    /// All zeros.
    Zeros,
    /// All ones.
    Ones,
}

impl ParamSpec {
    /// Returns the number of elements.
    pub fn numel(&self) -> usize {
        self.shape.iter().product()
    }

    /// Fills `out`, which holds [`ParamSpec::numel`] elements, with initial values.
    pub fn initialise(&self, seed: u64, out: &mut [f32]) {
        assert_eq!(out.len(), self.numel(), "the buffer of {} has its shape", self.name);
        match self.init {
            Init::Zeros => out.fill(0.0),
            Init::Ones => out.fill(1.0),
            Init::Uniform { bound } => self.fill(seed, out, |a, b| [bound * (2.0 * a - 1.0), bound * (2.0 * b - 1.0)]),
            Init::Normal { std, zero_row } => {
                self.fill(seed, out, |a, b| box_muller(a, b).map(|z| z * std));
                if let Some(row) = zero_row {
                    let width = self.shape[1..].iter().product::<usize>();
                    out[row * width..(row + 1) * width].fill(0.0);
                }
            }
        }
    }

    /// Two uniform numbers in, two values out. Each piece starts at its own place of the stream.
    fn fill(&self, seed: u64, out: &mut [f32], pair: impl Fn(f64, f64) -> [f64; 2] + Sync) {
        const PIECE: usize = 1 << 14;
        let key = stream_key(seed, &self.name);
        out.par_chunks_mut(PIECE).enumerate().for_each(|(piece_idx, piece)| {
            let mut rng = ChaCha8Rng::from_seed(key);
            rng.set_word_pos((piece_idx * PIECE) as u128);
            for two in piece.chunks_mut(2) {
                let values = pair(unit_interval(rng.next_u32()), unit_interval(rng.next_u32()));
                two.iter_mut().zip(values).for_each(|(x, value)| *x = value as f32);
            }
        });
    }
}

/// The middle of one of 2^32 equal parts of (0, 1): never 0, whose logarithm is infinite.
fn unit_interval(bits: u32) -> f64 {
    (f64::from(bits) + 0.5) / 4_294_967_296.0
}

fn box_muller(a: f64, b: f64) -> [f64; 2] {
    let radius = (-2.0 * a.ln()).sqrt();
    let (sin, cos) = (std::f64::consts::TAU * b).sin_cos();
    [radius * cos, radius * sin]
}

/// FNV-1a's usual start.
pub(crate) const FNV_START: u64 = 0xcbf2_9ce4_8422_2325;

/// FNV-1a of a text.
pub(crate) fn fnv1a(start: u64, text: &str) -> u64 {
    text.bytes().fold(start, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3))
}

/// The name's hash, twice with different starts, beside the seed.
fn stream_key(seed: u64, name: &str) -> [u8; 32] {
    let words = [seed, fnv1a(FNV_START, name), fnv1a(0x6c62_272e_07bb_0142, name), name.len() as u64];
    let mut key = [0; 32];
    key.chunks_exact_mut(8).zip(words).for_each(|(bytes, word)| bytes.copy_from_slice(&word.to_le_bytes()));
    key
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn values(name: &str, shape: &[usize], init: Init, seed: u64) -> Vec<f32> {
        let (name, shape, dims) = (name.to_string(), shape.to_vec(), vec![Dim::Embed; shape.len()]);
        let (scope, group, storage) = (ParamScope::ResidualStream, ParamGroupKind::Dense, WeightStorage::Dense);
        let spec = ParamSpec { name, shape, dims, scope, init, decay: true, trainable: true, group, storage };
        let mut out = vec![f32::NAN; spec.numel()];
        spec.initialise(seed, &mut out);
        out
    }

    const NORMAL: Init = Init::Normal { std: 0.02, zero_row: None };

    #[test]
    fn values_depend_on_seed_and_name_only() {
        let once = values("a", &[300, 111], NORMAL, 7);
        assert_eq!(once, values("a", &[300, 111], NORMAL, 7));
        assert_eq!(once[..5000], values("a", &[5000], NORMAL, 7), "a longer tensor begins the same");
        assert_ne!(once, values("b", &[300, 111], NORMAL, 7));
        assert_ne!(once, values("a", &[300, 111], NORMAL, 8));
    }

    #[test]
    fn a_normal_has_its_moments_across_pieces() {
        let x = values("w", &[401, 501], NORMAL, 1);
        let n = x.len() as f64;
        let moment = |power| x.iter().map(|&v| f64::from(v).powi(power)).sum::<f64>() / n;
        assert!(moment(1).abs() < 2e-4, "mean {}", moment(1));
        assert!((moment(2).sqrt() / 0.02 - 1.0).abs() < 5e-3, "deviation {}", moment(2).sqrt());
        assert!((moment(4) / moment(2).powi(2) - 3.0).abs() < 0.05, "kurtosis");
        let repeats = x.chunks(2).skip(1 << 13).zip(x.chunks(2)).filter(|(a, b)| a == b).count();
        assert_eq!(repeats, 0, "pieces do not repeat each other");
    }

    #[test]
    fn a_uniform_stays_in_its_bound_and_fills_it() {
        let x = values("w", &[10_001], Init::Uniform { bound: 0.5 }, 1);
        assert!(x.iter().all(|v| v.abs() <= 0.5));
        assert!(x.iter().any(|v| *v > 0.49) && x.iter().any(|v| *v < -0.49));
    }

    #[test]
    fn the_padding_row_is_zero_and_constants_are_constant() {
        let x = values("w", &[3, 4], Init::Normal { std: 1.0, zero_row: Some(1) }, 1);
        assert_eq!(x[4..8], [0.0; 4]);
        assert!(x[..4].iter().chain(&x[8..]).all(|v| *v != 0.0));
        assert_eq!(values("n", &[3], Init::Ones, 1), [1.0; 3]);
        assert_eq!(values("b", &[3], Init::Zeros, 1), [0.0; 3]);
        assert!(values("e", &[0, 4], NORMAL, 1).is_empty());
    }
}
