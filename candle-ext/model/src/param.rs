//! Parameter specifications: names, shapes and initialization.
//!
//! Initial values depend on the seed and the parameter's name alone. Thread and rank counts do not change them.

use std::ops::Range;

use candle_core::{Result, Tensor};
use candlewick_ops::{Weight, WeightStorage};
use rand_chacha::{ChaCha8Rng, rand_core::RngCore, rand_core::SeedableRng};
use rayon::prelude::*;

/// Function that returns the weight of a parameter by its name.
pub type WeightLookup<'a> = dyn FnMut(&str) -> Result<Weight> + 'a;

/// Specification of one parameter.
#[derive(Clone, Debug, PartialEq)]
pub struct ParamSpec {
    /// Hugging Face name. LoRA factors are `<module>.lora_A.weight` and `<module>.lora_B.weight`.
    pub name: String,
    /// Shape, equal on disk and in memory.
    pub shape: Vec<usize>,
    /// Meaning of each dimension.
    pub dims: Vec<Dim>,
    /// Position of the parameter in a layer.
    pub scope: ParamScope,
    /// Initialization of a model that is trained from scratch.
    pub init: Init,
    /// True if weight decay applies; false for norms and biases.
    pub decay: bool,
    /// True if the parameter is trained; false for the frozen base of LoRA.
    pub trainable: bool,
    /// Kind of process groups that shard the parameter and reduce its gradient.
    pub group: ParamGroupKind,
    /// Storage of the elements: dense or quantized.
    pub storage: WeightStorage,
    /// Tensors of Hub checkpoints that make up the parameter; `None` if one tensor has its name and shape.
    pub hub: Option<Box<HubTensors>>,
}

/// Tensors of a Hub checkpoint that make up one parameter, such as the matrices of all experts of a layer.
#[derive(Clone, Debug, PartialEq)]
pub struct HubTensors {
    /// Shape of the parameter in a checkpoint that stores it as one tensor: [experts, rows, columns] for experts.
    pub fused_shape: Vec<usize>,
    /// The tensors in the order of their rows.
    pub tensors: Vec<HubTensor>,
    /// Arrangement of the elements in the tensors.
    pub layout: HubLayout,
}

/// Arrangement of a parameter's elements in the tensors of a checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HubLayout {
    /// Each tensor holds rows of the parameter.
    Rows,
    /// One tensor [out, columns * experts], whose fastest index is the expert, for a parameter [experts * out, columns].
    /// PEFT stores `lora_B` of a 3-D parameter in this way.
    ExpertsInColumns {
        /// Number of experts.
        n_experts: usize,
    },
}

impl HubLayout {
    /// Returns the shape of a tensor that holds `n_rows` rows of a parameter.
    pub(crate) fn shape(self, n_rows: usize, param_shape: &[usize]) -> Vec<usize> {
        match self {
            Self::Rows => [&[n_rows], &param_shape[1..]].concat(),
            Self::ExpertsInColumns { n_experts } => {
                vec![n_rows / n_experts, param_shape[1..].iter().product::<usize>() * n_experts]
            }
        }
    }

    /// Returns the parameter whose tensor has the elements of `stored`.
    pub(crate) fn read(self, stored: Tensor, param_shape: &[usize]) -> Result<Tensor> {
        let Self::ExpertsInColumns { n_experts } = self else { return Ok(stored) };
        let (rows, columns) = (param_shape[0] / n_experts, param_shape[1]);
        stored.reshape((rows, columns, n_experts))?.permute((2, 0, 1))?.contiguous()?.reshape(param_shape)
    }

    /// Returns the elements of a parameter in the order of its tensor.
    pub(crate) fn write(self, param: Tensor) -> Result<Tensor> {
        let Self::ExpertsInColumns { n_experts } = self else { return Ok(param) };
        let (rows, columns) = param.dims2()?;
        let by_expert = param.reshape((n_experts, rows / n_experts, columns))?;
        by_expert.permute((1, 2, 0))?.contiguous()?.reshape((rows / n_experts, columns * n_experts))
    }
}

/// One tensor of a Hub checkpoint: some rows of a parameter.
#[derive(Clone, Debug, PartialEq)]
pub struct HubTensor {
    /// Name in the checkpoint.
    pub name: String,
    /// Rows of the parameter.
    pub rows: Range<usize>,
}

/// Kind of process groups over which parameters are sharded and their gradients reduced.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum ParamGroupKind {
    /// All parameters except experts, sharded over the data parallel ranks.
    Dense,
    /// Experts, sharded over the expert-data parallel ranks.
    Expert,
}

impl ParamGroupKind {
    /// All kinds, in the order of a unit's parameter groups.
    pub const ALL: [Self; 2] = [Self::Dense, Self::Expert];
}

impl ParamSpec {
    /// Returns a hash of the name, for random numbers that differ between parameters.
    pub fn name_hash(&self) -> u64 {
        fnv1a(FNV_START, &self.name)
    }

    /// Returns a trainable matrix with weight decay.
    pub fn matrix(name: String, [rows, columns]: [DimSize; 2], scope: ParamScope, init: Init) -> Self {
        let (shape, dims) = (vec![rows.len, columns.len], vec![rows.dim, columns.dim]);
        let (group, storage) = (ParamGroupKind::Dense, WeightStorage::Dense);
        Self { name, shape, dims, scope, init, decay: true, trainable: true, group, storage, hub: None }
    }

    /// Returns a trainable vector without weight decay.
    pub fn vector(name: String, width: DimSize, scope: ParamScope, init: Init) -> Self {
        let (shape, dims) = (vec![width.len], vec![width.dim]);
        let (group, storage) = (ParamGroupKind::Dense, WeightStorage::Dense);
        Self { name, shape, dims, scope, init, decay: false, trainable: true, group, storage, hub: None }
    }

    /// Returns the tensors of Hub checkpoints that make up the parameter, each as a parameter of its own.
    pub(crate) fn hub_params(&self) -> Vec<Self> {
        let tensors = self.hub.iter().flat_map(|hub| &hub.tensors);
        let one = |HubTensor { name, rows }: &HubTensor| Self {
            name: name.clone(),
            shape: [&[rows.len()], &self.shape[1..]].concat(),
            dims: self.dims.clone(),
            hub: None,
            ..*self
        };
        tensors.map(one).collect()
    }

    /// Returns the weight of an RMS norm.
    pub fn norm(name: String, width: DimSize, scope: ParamScope) -> Self {
        Self::vector(name, width, scope, Init::Ones)
    }
}

/// Meaning of a parameter's dimension.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dim {
    /// Vocabulary entries.
    Vocab,
    /// Hidden size.
    Embed,
    /// Query heads times head size.
    Heads,
    /// KV heads times head size.
    KvHeads,
    /// Head size.
    HeadDim,
    /// MLP intermediate size.
    Ffn,
    /// Experts times the rows or columns of each.
    Experts,
    /// Rows of the gate and up matrices of all experts, each as high as an expert's intermediate size.
    ExpertFfn {
        /// Number of matrices: two per expert.
        n_matrices: usize,
    },
    /// LoRA rank.
    Rank,
}

/// A named dimension with its length.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DimSize {
    /// Meaning of the dimension.
    pub dim: Dim,
    /// Number of elements along the dimension.
    pub len: usize,
}

/// Position of a parameter in a layer, which decides its tensor parallel placement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ParamScope {
    /// The residual stream: norms, embedding and output layer.
    ResidualStream,
    /// Attention or MLP, between [`TokenParallel::copy_to_tp`](crate::TokenParallel::copy_to_tp) and
    /// [`TokenParallel::reduce_from_tp`](crate::TokenParallel::reduce_from_tp).
    Sublayer,
}

/// Initialization of a parameter.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Init {
    /// Normal distribution with mean 0.
    Normal {
        /// Standard deviation.
        std: f64,
        /// Index of a row that stays zero: the padding token's.
        zero_row: Option<usize>,
    },
    /// Uniform distribution over [-bound, bound).
    Uniform {
        /// Bound of the distribution.
        bound: f64,
    },
    /// All zeros.
    Zeros,
    /// All ones.
    Ones,
}

impl ParamSpec {
    /// Returns true for a buffer, as torch calls it: state that the optimizer does not train but a checkpoint stores, such
    /// as an expert bias.
    pub fn is_buffer(&self) -> bool {
        !self.trainable && self.storage == WeightStorage::F32
    }

    /// Returns the number of elements.
    pub fn numel(&self) -> usize {
        self.shape.iter().product()
    }

    /// Fills `out` with initial values. Its length must be [`ParamSpec::numel`].
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

    /// Fills `out` in parallel chunks. `pair` maps two uniform numbers to two values.
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

/// Maps 32 random bits to the open interval (0, 1), whose logarithms are finite.
fn unit_interval(bits: u32) -> f64 {
    (f64::from(bits) + 0.5) / 4_294_967_296.0
}

fn box_muller(a: f64, b: f64) -> [f64; 2] {
    let radius = (-2.0 * a.ln()).sqrt();
    let (sin, cos) = (std::f64::consts::TAU * b).sin_cos();
    [radius * cos, radius * sin]
}

/// Offset basis of FNV-1a.
pub(crate) const FNV_START: u64 = 0xcbf2_9ce4_8422_2325;

/// Returns the FNV-1a hash of a text.
pub(crate) fn fnv1a(start: u64, text: &str) -> u64 {
    text.bytes().fold(start, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3))
}

/// Returns the key of a parameter's random stream: the seed and two hashes of its name.
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
        let spec =
            ParamSpec { name, shape, dims, scope, init, decay: true, trainable: true, group, storage, hub: None };
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
